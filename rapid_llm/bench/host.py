"""`bench_host`: what one call costs on the host, in nanoseconds, beside a control measured in the same run.

The figure is the best of many blocks: noise on a host only ever adds time. The control has the same call shape, and its
blocks alternate with those of the function, so that loop and call overhead can be subtracted honestly.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .errors import ResolutionError
from .summary import Summary, summarise

Clock = Callable[[], int]
"""Returns nanoseconds; only differences are used."""

_MAX_LOOPS = 1 << 24


@dataclass(frozen=True, slots=True)
class HostResult:
    """Nanoseconds a call. `loops` calls made up one block; every block's mean is in the summaries."""

    blocks: Summary
    control: Summary
    loops: int

    @property
    def ns(self) -> float:
        """Best block, the loop's own cost included."""
        return self.blocks.min

    @property
    def net_ns(self) -> float:
        """Best block less the control's best block: slightly negative for a function as cheap as the control."""
        return self.blocks.min - self.control.min

    def json(self) -> dict[str, Any]:
        return {"loops": self.loops, "blocks_ns": self.blocks.json(), "control_ns": self.control.json()}


def bench_host(
    fn: Callable[..., object],
    reset: Callable[[], object] | None = None,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    control: Callable[..., object] | None = None,
    blocks: int = 20,
    block_seconds: float = 0.005,
    clock: Clock = time.perf_counter_ns,
) -> HostResult:
    """Time `fn(*args, **kwargs)` on the host.

    reset: called before every single call and outside the timed window, for calls that change state; a block is then
    one call. control: called with the same arguments in the same loop, by default a function that does nothing.
    blocks: at least 3. block_seconds: a block is made long enough to last this long. The garbage collector is off
    meanwhile. Raises `ResolutionError` if the clock does not move, `ValueError` on other bad arguments, and whatever
    `fn` raises.
    """
    if blocks < 3:
        raise ValueError(f"blocks={blocks}: at least 3, or there is no best to speak of")
    if not block_seconds > 0:
        raise ValueError(f"block_seconds={block_seconds}: must be above 0")
    keywords = dict(kwargs or {})
    timed = _timed_loop(len(args), tuple(keywords))
    values = (*args, *keywords.values())
    other = control if control is not None else _no_op(len(args), tuple(keywords))

    def block(target: Callable[..., object], loops: int) -> float:
        if reset is not None:
            reset()
        return timed(target, clock, itertools.repeat(None, loops), *values) / loops

    with quiet():
        if reset is None:
            loops = _calibrate(lambda n: block(fn, n) * n, block_seconds)
            control_loops = _calibrate(lambda n: block(other, n) * n, block_seconds)
        else:
            block(fn, 1)  # the first call may import or allocate
            loops = control_loops = 1
        ours, theirs = [], []
        for _ in range(blocks):
            theirs.append(block(other, control_loops))
            ours.append(block(fn, loops))
    result = HostResult(summarise(ours), summarise(theirs), loops)
    if result.blocks.min <= 0:
        raise ResolutionError(f"{_name(fn)}: {loops} call(s) took no time by this clock; let one call do more")
    return result


def _calibrate(elapsed: Callable[[int], float], block_seconds: float) -> int:
    """The number of calls that lasts `block_seconds`."""
    wanted = block_seconds * 1e9
    loops = 1
    while (spent := elapsed(loops)) < wanted:
        if loops >= _MAX_LOOPS:
            if spent <= 0:
                raise ResolutionError(f"the clock did not move in {loops} calls")
            return loops
        grow = wanted / spent if spent > 0 else 16.0
        loops = min(max(loops + 1, int(loops * min(grow * 1.1, 16.0))), _MAX_LOOPS)
    return loops


@functools.cache
def _timed_loop(positional: int, keywords: tuple[str, ...]) -> Callable[..., int]:
    """A loop with the call written out: `fn(*args)` would add the cost of unpacking to every call."""
    names = [f"a{i}" for i in range(positional)] + [f"k_{name}" for name in keywords]
    call = ", ".join([f"a{i}" for i in range(positional)] + [f"{name}=k_{name}" for name in keywords])
    source = (
        f"def timed({', '.join(['fn', 'clock', 'loops', *names])}):\n"
        "    start = clock()\n"
        "    for _ in loops:\n"
        f"        fn({call})\n"
        "    return clock() - start\n"
    )
    return _define(source, "timed")


@functools.cache
def _no_op(positional: int, keywords: tuple[str, ...]) -> Callable[..., object]:
    """A function of the same call shape that does nothing."""
    params = [f"a{i}" for i in range(positional)] + (["*", *keywords] if keywords else [])
    return _define(f"def no_op({', '.join(params)}):\n    pass\n", "no_op")


def _define(source: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(source, scope)
    function: Callable[..., Any] = scope[name]
    return function


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)

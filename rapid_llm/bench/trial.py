"""One function under measurement: proven right before, timed in blocks, and proven right again after the timed calls.

The order matters. The first call is never blocked and never timed. Poison is laid, and values are changed in the memory
that the function already knows, before the block whose results are looked at; that block is timed like all others, so
that nothing can tell it from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from .calibration import floor
from .device import Block, Call, Clocks, Device
from .errors import (
    BenchError,
    CallFailedError,
    HiddenInputError,
    HostBoundError,
    LeakedWorkError,
    NoCheckError,
    NoLaunchError,
    RememberedError,
    ResolutionError,
    UnwrittenError,
    WrongResultError,
)
from .inputs import refuse_degenerate, refuse_hidden
from .rotation import VARIANTS, Plan, Rotation
from .storages import Arguments, call, is_tensor, opaque, poison, poisoned, storage_key, tensors

Judge = Callable[[Any], str | None]
"""Of a result: what is wrong with it, or None."""

Check = Callable[..., Judge]
"""Called with the arguments of a call before it runs; answers a judge of the call's result."""

LEAK_SHARE: Final = 0.10
LEAK_SECONDS: Final = 100e-6
FRESH_SLOWER: Final = 1.5
FRESH_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class RowArm:
    """One function to time. out: a tensor like the one that the function takes as `out`, None if it returns its own.
    mutated: keys of the arguments that it changes, which are its results then. reset: called with a copy's arguments
    before each block, for state that they do not show. adapt: turns arguments into the form that it takes. check:
    instead of the one given for all arms. row: the registry row that it is. forced: it is measured although dispatch
    may choose another. graph: capture it (None: try)."""

    name: str
    fn: Callable[..., Any]
    out: Any = None
    mutated: tuple[int | str, ...] = ()
    reset: Callable[..., object] | None = None
    adapt: Callable[[Arguments], Arguments] | None = None
    check: Check | None = None
    row: str | None = None
    forced: bool = False
    graph: bool | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds a call, of one block."""

    seconds: float
    clocks: Clocks
    host_bound: bool = False

    @property
    def good(self) -> bool:
        return not self.clocks.disturbed and not self.host_bound


@dataclass(slots=True)
class Trial:
    """An arm on a device. `probe`, `load`, `sample` any number of times, `finish`: in this order."""

    arm: RowArm
    rotation: Rotation
    device: Device
    judges: list[Judge]
    plan: Plan | None = None
    floor_seconds: float = 0.0
    launches: int | None = None
    graph: bool = False
    isolated: float | None = None
    _block: Block | None = None
    _outs: list[Any] = field(default_factory=list)
    _flush: Call | None = None

    def probe(self) -> float:
        """Call it once for each set of values, judge the results, and answer seconds a call, roughly."""
        self.rotation.allocate(max(VARIANTS, len(self.rotation.copies)))
        self._refill(0)
        self._make_outs(len(self.rotation.copies))
        calls = self._calls(range(VARIANTS))
        try:
            results = [made() for made in calls]
            self.device.settle()
        except Exception as error:
            raise CallFailedError(f"{self.arm.name}: raised {type(error).__name__}: {error}") from error
        for index, result in enumerate(results):
            self._refuse_wrong(index, result, "before timing")
        self.rotation.refuse_changed(self.arm.name)
        block = self.device.block(calls, graph=False)
        seconds = []
        for _ in range(3):
            self._restore()
            seconds.append(self.device.time(block, None, self._restore).seconds / VARIANTS)
        self._restore()
        return min(seconds)

    def load(self, plan: Plan) -> None:
        """Make the block of `plan`, and prove it: with poison laid and values changed, its results must be right, its
        work must be launched by it, and be over when it says so."""
        self.plan = plan
        self.rotation.allocate(plan.copies)
        self._make_outs(plan.copies)
        self._flush = self.device.reader(plan.flush_bytes) if plan.flush_bytes else None
        self._block = self._made(self._calls(plan.order))
        self.graph, self.launches = self._block.graph, self._block.launches
        if self.launches == 0:
            raise NoLaunchError(f"{self.arm.name}: {len(plan.order)} calls were captured and no kernel among them")
        self.floor_seconds = floor(self.device, len(plan.order), self.graph)
        fresh = partial(self._fresh, 1)
        fresh()
        if self.device.time(self._block, self._flush, fresh).seconds <= 0:
            raise ResolutionError(f"{self.arm.name}: {len(plan.order)} calls took no time by the device's clock")
        self._refuse_wrong_block("in the timed loop")
        self._refuse_leak()

    def sample(self, prepare: Call | None = None) -> Sample:
        """Time one block, whose arguments `prepare` makes ready; by default they get their values back."""
        block, plan = self._ready()
        prepare = self._restore if prepare is None else prepare
        prepare()
        before = self.device.clocks()
        timing = self.device.time(block, self._flush, prepare)
        after = self.device.clocks()
        seconds = timing.seconds / len(plan.order)
        if not seconds > 0:
            raise ResolutionError(f"{self.arm.name}: {len(plan.order)} calls took no time by the device's clock")
        return Sample(seconds, before if before.disturbed else after, timing.host_bound)

    def finish(self, samples: Sequence[Sample]) -> None:
        """After the last of `samples`: blocks over new values in the known memory, timed and judged, each followed by
        one over the same values."""
        longest = max(s.seconds for s in samples)
        fresh, known = [], []
        for step in range(FRESH_TRIES):
            fresh.append(self.sample(partial(self._fresh, 2 + step)).seconds)
            self._refuse_wrong_block("after the timed calls")
            known.append(self.sample().seconds)
        slower = min(new / old for new, old in zip(fresh, known, strict=True))
        if slower > FRESH_SLOWER and min(fresh) > max(longest, 3 * self.floor_seconds):
            raise RememberedError(
                f"{self.arm.name}: {slower:.1f} times as slow for values that it has not met: it uses results of "
                "earlier calls again"
            )
        bound = sum(s.host_bound for s in samples)
        if bound * 2 > len(samples):
            raise HostBoundError(
                f"{self.arm.name}: in {bound} of {len(samples)} samples the device waited for the host; "
                "make it graph-safe, or time it with bench_host"
            )
        self.isolated = self._isolated()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Block, Plan]:
        if self._block is None or self.plan is None:
            raise ValueError(f"{self.arm.name}: load a plan before taking samples")
        return self._block, self.plan

    def _refill(self, epoch: int) -> None:
        self.rotation.refill(epoch)
        self._reset()

    def _fresh(self, epoch: int) -> None:
        """New values in the known memory, and poison where results go."""
        self._refill(epoch)
        self._lay_poison()

    def _restore(self) -> None:
        self.rotation.restore()
        self._reset()

    def _reset(self) -> None:
        if self.arm.reset is not None:
            for copy in self.rotation.copies:
                call(self.arm.reset, copy)()

    def _make_outs(self, count: int) -> None:
        import torch

        if self.arm.out is not None:
            del self._outs[count:]
            self._outs += [torch.empty_like(self.arm.out) for _ in range(count - len(self._outs))]
            for out in self._outs:
                poison(out)

    def _calls(self, order: Sequence[int]) -> list[Call]:
        """Calls over the copies in `order`."""
        copies = self.rotation.copies
        outs: list[Arguments] = [{"out": out} for out in self._outs] or [{}] * len(copies)
        return [call(self.arm.fn, {**copies[at], **outs[at]}) for at in order]

    def _made(self, calls: list[Call]) -> Block:
        if self.arm.graph is not None:
            return self.device.block(calls, graph=self.arm.graph)
        try:
            return self.device.block(calls, graph=True)
        except RuntimeError:  # not every function can be captured; what is wrong with it shows in the queued calls
            self.device.settle()
            return self.device.block(calls, graph=False)

    def _lay_poison(self) -> None:
        block, _ = self._ready()
        for out in self._outs:
            poison(out)
        if self.arm.out is None and not self.arm.mutated:
            for _, tensor in tensors(block.results):
                poison(tensor)
        self.device.settle()

    def _refuse_leak(self) -> None:
        block, _ = self._ready()
        seconds, lag = self.device.lag(block)
        self._restore()
        if lag > max(LEAK_SHARE * seconds, LEAK_SECONDS):
            raise LeakedWorkError(
                f"{self.arm.name}: {lag * 1e6:.0f} us of work were left when the calls were over (they took "
                f"{seconds * 1e6:.0f} us): another stream or thread does it; launch on the current stream"
            )

    def _refuse_wrong_block(self, when: str) -> None:
        """Judge the result of every call of the block."""
        block, plan = self._ready()
        self.device.settle()
        last = {copy: at for at, copy in enumerate(plan.order)}
        owners: dict[int, int] = {}
        for at, result in enumerate(block.results):
            copy = plan.order[at]
            for _, tensor in tensors(result) if self.arm.out is None and not self.arm.mutated else ():
                key = storage_key(tensor)
                if tensor.numel() and owners.setdefault(key, at) != at:
                    raise RememberedError(f"{self.arm.name}: calls {owners[key]} and {at} returned the same memory")
            if last[copy] == at or self.arm.out is None:
                self._refuse_wrong(copy, result, f"{when}, call {at}")
        if len(block.results) != len(plan.order):
            raise WrongResultError(f"{self.arm.name}: {len(block.results)} results of {len(plan.order)} calls")
        self.rotation.refuse_changed(self.arm.name)

    def _refuse_wrong(self, copy: int, returned: Any, when: str) -> None:
        """Judge one result, which is `out`, the changed arguments, or what was returned."""
        arguments, name = self.rotation.copies[copy], self.arm.name
        if self.arm.mutated:
            result: Any = tuple(arguments[key] for key in self.arm.mutated)
        elif self._outs:
            result = self._outs[copy]
            if returned is not None and returned is not result:
                raise WrongResultError(f"{name}: the tensor returned is not the `out` that was given")
        else:
            result = returned
            shared = {storage_key(t) for _, t in tensors(arguments)}
            if any(t.numel() and storage_key(t) in shared for _, t in tensors(result)):
                raise WrongResultError(f"{name}: the result shares memory with an argument")
        problem = self.judges[self.rotation.variant(copy)](result)
        if problem is None:
            return
        left = sum(poisoned(t) for _, t in tensors(result)) if not self.arm.mutated else 0
        if left:
            raise UnwrittenError(f"{name} ({when}): {left} elements of the result were never written")
        raise WrongResultError(f"{name} ({when}): {problem}")

    def _isolated(self) -> float | None:
        """Seconds of one call alone behind a flush, less what an empty one costs more alone than in a block; None where
        blocks are no graphs."""
        _, plan = self._ready()
        if not self.graph or len(plan.order) < 2:
            return None
        alone = self.device.block(self._calls(plan.order[:1]), graph=True)
        seconds = []
        for _ in range(5):
            self._restore()
            seconds.append(self.device.time(alone, self._flush, self._restore).seconds)
        return statistics.median(seconds) - floor(self.device, 1, True) + self.floor_seconds


def prepare(
    arm: RowArm, arguments: Arguments, check: Check | None, device: Device, rotation: Rotation | None = None
) -> Trial:
    """A trial of `arm`; what can be refused without running it is refused here. rotation: shared with other arms that
    take the same arguments."""
    refuse_hidden(arm.fn, arm.name)
    check = arm.check or check
    if check is None:
        raise NoCheckError(f"{arm.name}: no check is given; pass check=, which judges a result by its arguments")
    missing = [key for key in arm.mutated if key not in arguments]
    if missing:
        raise ValueError(f"{arm.name}: mutated={missing[0]!r} is no argument; arguments: {list(arguments)}")
    if rotation is None:
        refuse_degenerate(arguments, arm.name)
        try:
            rotation = Rotation(arguments, arm.mutated, arm.adapt)
        except BenchError:
            raise
        except Exception as error:
            raise CallFailedError(f"{arm.name}: packing raised {type(error).__name__}: {error}") from error
        held = opaque(rotation.sources[0])
        if held:
            raise HiddenInputError(f"{arm.name}: an argument holds a {held}, whose memory cannot be rotated")
    if not any(is_tensor(t) for _, t in tensors(rotation.sources[0])):
        raise NoCheckError(f"{arm.name}: no argument is a tensor, so nothing can be rotated or checked")
    if check not in rotation.judges:
        rotation.judges[check] = [check(*_positional(master), **_named(master)) for master in rotation.masters]
    return Trial(arm, rotation, device, rotation.judges[check])


def _positional(arguments: Arguments) -> list[Any]:
    return [value for key, value in arguments.items() if isinstance(key, int)]


def _named(arguments: Arguments) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if isinstance(key, str)}

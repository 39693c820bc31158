"""The decision trace: which row ran which op on which shapes, how often; written as JSON when the process ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from . import overrides
from .forking import Lock

if TYPE_CHECKING:
    from pathlib import Path

    from .dispatcher import Decision
    from .facts import Facts

_lock: Final = Lock()
_calls: Final[Counter[tuple[str, tuple[object, ...]]]] = Counter()
_keys: Final[dict[tuple[object, ...], Facts]] = {}
_falls: Final[Counter[tuple[str, str]]] = Counter()
_file: list[Path | None] = [None]
_registered: list[bool] = [False]
_ranges: list[int] = [0]


def enabled() -> bool:
    """Whether calls are being counted."""
    return _file[0] is not None


def follow(file: Path | None) -> None:
    """Start counting into `file`, or stop (None). The file is written at exit, and by `write()`."""
    if (file is None) != (_file[0] is None):
        overrides.active[0] += 1 if file is not None else -1
    _file[0] = file
    if file is not None and not _registered[0]:
        import atexit

        _registered[0] = True
        atexit.register(write)


def count(decision: Decision) -> None:
    """Count one call that ran under `decision`."""
    key = decision.facts.key()
    with _lock:
        _keys.setdefault(key, decision.facts)
        _calls[decision.row.name, key] += 1


def counted(function: Callable[..., Any], decision: Decision) -> Callable[..., Any]:
    """`function` itself, or with each call counted while the trace is on."""
    if not enabled():
        return function

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        count(decision)
        return function(*args, **kwargs)

    return wrapper


@contextmanager
def profiler_ranges() -> Iterator[None]:
    """Within the block, public op calls appear in torch.profiler (and NVTX under `emit_nvtx`) as `op [row]`."""
    _ranges[0] += 1
    overrides.active[0] += 1
    try:
        yield
    finally:
        overrides.active[0] -= 1
        _ranges[0] -= 1


def span(op: str, row: str) -> AbstractContextManager[Any]:
    """A profiler range for one call, or nothing while ranges are off."""
    if not _ranges[0]:
        return nullcontext()
    from torch.profiler import record_function

    span: AbstractContextManager[Any] = record_function(f"{op} [{row}]")
    return span


def fell(op: str, floor: str) -> None:
    """Count a decision for the floor that was forced by a missing or broken row."""
    with _lock:
        _falls[op, floor] += 1


def falls() -> dict[str, int]:
    """Floor decisions forced by missing or broken rows, by op."""
    with _lock:
        return {op: n for (op, _), n in sorted(_falls.items())}


def entries() -> list[dict[str, Any]]:
    """The trace so far, most frequent first: `op, row, dtype, shape, count`, and `key`, which `prepare` takes."""
    with _lock:
        found = [(row, _keys[key], count) for (row, key), count in _calls.items()]
    told = [_entry(row, facts, count) for row, facts, count in found]
    return sorted(told, key=lambda e: (-e["count"], e["op"], e["row"], e["dtype"], e["shape"], str(e["key"])))


def _entry(row: str, facts: Facts, count: int) -> dict[str, Any]:
    shape = ", ".join(f"{k}={v}" for k, v in sorted(facts.dims.items()))
    told = {"op": facts.op, "row": row, "dtype": facts.dtype or "", "shape": shape, "count": count}
    return {**told, "key": facts.as_json()}


def write(file: Path | None = None) -> None:
    """Write the trace to `file`, or to the file being followed."""
    import json

    target = file if file is not None else _file[0]
    if target is not None:
        data = {"decisions": entries(), "falls_to_floor": falls(), "forced_but_never_ran": list(overrides.never_ran())}
        try:
            target.write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            import sys

            print(f"rapid_llm: RAPID_LLM_TRACE: {target} cannot be written: {error}", file=sys.stderr)

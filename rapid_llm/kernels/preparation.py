"""`prepare` and `freeze`: build everything before serving, then forbid building.

Invariant: while kernels are frozen nothing compiles. A row that is not built, or a Triton kernel that is not loaded, is
passed over for the floor, counted (`RAPID_LLM_TRACE`, `explain()`) and warned of once; with RAPID_LLM_STRICT=1 it is a
`FrozenError`. A CUDA graph's capture is under the same rule, with `NotReadyError`.

Nothing here reaches for a network: what is built comes from the package's own sources.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from . import build
from .registry import ArgumentError, KernelError, KernelSpec, NotReadyError, Selected, overrides, plugins
from .registry import dispatcher as _dispatch
from .registry.errors import told
from .registry.facts import Facts
from .registry.overrides import Forced

BUILT: Final = "built"
CACHED: Final = "cached"
LOADED: Final = "loaded"
REFUSED: Final = "refused"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """What became of one row's code. status: `built` now, `cached` from an earlier build, `loaded` where nothing had to
    be built, `refused` because it may not be built now, or `failed`, with the reason in `text`."""

    name: str
    dtype: str | None
    sm: int | None
    status: str
    seconds: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class PreparedKey:
    """One call that was prepared: the row that it runs, or None and why there is none."""

    op: str
    dtype: str | None
    dims: tuple[tuple[str, int], ...]
    row: str | None
    text: str = ""


Progress = Callable[[PreparedRow, int, int], None]
"""Called after each row with it, how many are done, and of how many that are known so far."""


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """kernels: Triton kernels compiled, or loaded from Triton's cache. notes: what could not be prepared, and why."""

    rows: tuple[PreparedRow, ...]
    keys: tuple[PreparedKey, ...]
    kernels: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row's code is ready and every key has a row."""
        return all(r.status in (BUILT, CACHED, LOADED) for r in self.rows) and all(k.row for k in self.keys)

    def json(self) -> dict[str, Any]:
        """`ok, seconds, kernels, rows, keys, notes` as plain data."""
        data = {"ok": self.ok, **asdict(self)}
        data["keys"] = [{**key, "dims": dict(key["dims"])} for key in data["keys"]]
        return data

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{len(self.keys)} keys, {self.kernels} Triton kernels, {self.seconds:.1f} s"]
        for row in self.rows:
            for_what = " ".join(filter(None, (row.dtype, None if row.sm is None else f"sm_{row.sm}")))
            lines.append(f"{row.name:<{width}}  {row.status:<7}  {row.seconds:6.2f} s  {for_what}".rstrip())
            lines += [f"    {line}" for line in row.text.splitlines()]
        lines += [f"{key.op}: {key.text}" for key in self.keys if key.row is None]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A key to prepare, and a call of it if example arguments were given."""

    facts: Facts
    forced: Forced | None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def prepare(
    keys: Iterable[Any] | str | Path | None = None,
    *,
    model: Any = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> PrepareReport:
    """Choose, build and load the rows of every key, several at a time, so that no later call has to.

    keys: each a mapping of `op` and the facts that `dispatch` takes, or of `op` and example `args` (and `kwargs`, the
    op's keyword arguments), or a bound handle; or the path of a file that RAPID_LLM_TRACE wrote. model: an `LLM` or a
    decoder, whose bound rows are taken; an `LLM` also has its kernels compiled for every size of step. Triton compiles
    for arguments, not for facts: kernels of native rows are prepared where there are `args` or an `LLM`. jobs: builds
    at once; by default what processors and memory allow. A build that fails is in the report, never raised.
    """
    if keys is None and model is None:
        raise ArgumentError("prepare: give keys= or model=")
    started, kernels = time.monotonic(), build.counters.kernels
    plugins.scan()
    _dispatch.notice_environment()
    wanted = [_wanted(key) for key in _entries(keys)]
    if model is not None:
        wanted += [_wanted(handle) for _, _, handle in model.bindings()]
    count = build.jobs() if jobs is None else jobs
    if count < 1:
        raise ArgumentError(f"prepare: jobs={jobs}: use a whole number of at least 1")
    rows = _make_ready(wanted, count, progress)
    settled = [_settle(one) for one in wanted]
    notes = _compile_kernels(wanted, settled, model, count)
    made = build.counters.kernels - kernels
    return PrepareReport(tuple(rows), tuple(dict.fromkeys(settled)), made, time.monotonic() - started, notes)


def freeze() -> None:
    """From now on nothing compiles in this process; see the module."""
    build.freeze()


def thaw() -> None:
    """Allow compiles again, and forget the choices that were made because they were not."""
    build.thaw()
    _dispatch.forget(None)


def frozen() -> bool:
    """Whether `freeze()` holds."""
    return build.frozen()


def compiles() -> int:
    """Compilers started in this process, and Triton kernels made or loaded for a new kind of arguments."""
    return build.counters.compiles + build.counters.kernels


def _entries(keys: Iterable[Any] | str | Path | None) -> Iterable[Any]:
    if keys is None:
        return ()
    if not isinstance(keys, (str, Path)):
        return keys
    try:
        decisions = json.loads(Path(keys).read_bytes())["decisions"]
        return [entry["key"] for entry in decisions]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"prepare: {keys} is not a trace that RAPID_LLM_TRACE wrote ({text})") from error


def _wanted(key: Any) -> _Wanted:
    if isinstance(key, Selected):
        return _Wanted(key.decision.facts, key.decision.forced)
    if not isinstance(key, Mapping) or "op" not in key:
        raise ArgumentError(f"prepare takes a list; a key in it is a mapping with 'op', or a bound handle, not {key!r}")
    stated = {name: value for name, value in key.items() if name not in ("op", "sm", "backend", "args", "kwargs")}
    args, kwargs = tuple(key.get("args", ())), dict(key.get("kwargs", {}))
    if kwargs and not args:
        raise ArgumentError(f"prepare: {key['op']}: kwargs= go with args=")
    found = _dispatch.facts_of(key["op"], args, {**stated, **kwargs})
    return _Wanted(found, overrides.current(key["op"], key.get("backend")), args, kwargs)


_Task = tuple[str, str, int | None, int | None, str | None, str | None]
"""What a row's build may depend on: row, device, index, SM, dtype, scheme."""


def _make_ready(wanted: list[_Wanted], jobs: int, progress: Progress | None) -> list[PreparedRow]:
    """Build each key's best row; where that fails, its next best, until every key has one that stands."""
    done: dict[_Task, PreparedRow] = {}
    unready: dict[_Task, NotReadyError] = {}
    with ThreadPoolExecutor(jobs, thread_name_prefix="rapid-llm-prepare") as pool:
        while todo := dict(_candidates(wanted, done, unready)):
            pending = [pool.submit(_ready, row, facts) for row, facts in todo.values()]
            total = len(done) + len(todo)
            for task, future in zip(todo, pending, strict=True):
                done[task], refusal = future.result()
                if refusal is not None:
                    unready[task] = refusal
                if progress is not None:
                    progress(done[task], len(done), total)
    return list(done.values())


def _candidates(
    wanted: list[_Wanted], done: Mapping[_Task, PreparedRow], unready: Mapping[_Task, NotReadyError]
) -> Iterator[tuple[_Task, tuple[KernelSpec, Facts]]]:
    """The best row of each key that has not been tried for it yet."""
    for one in wanted:
        facts = one.facts
        about = (facts.device, facts.index, facts.sm, facts.dtype, facts.scheme)
        known = {task[0]: error for task, error in unready.items() if task[1:] == about}
        best = next(iter(_dispatch.verdicts(facts, one.forced, known)), None)
        if best is None or not best.admitted or best.row.is_native:
            continue
        task = (best.row.name, *about)
        if task not in done:
            yield task, (best.row, facts)


def _ready(row: KernelSpec, facts: Facts) -> tuple[PreparedRow, NotReadyError | None]:
    """Build and load one row; the engine's own counts tell what that took."""
    started = time.monotonic()
    refused: dict[str, NotReadyError] = {}
    with build.watch() as seen:
        good = _dispatch.make_ready(row, facts, refused)
    status = BUILT if "compiles" in seen else CACHED if "hits" in seen else LOADED
    text = ""
    refusal = refused.get(row.name)
    if not good:
        status = FAILED if refusal is None else REFUSED
        text = str(refusal) if refusal is not None else _dispatch.broken_text(row.name) or ""
    seconds = time.monotonic() - started
    return PreparedRow(row.name, facts.dtype, facts.sm, status, seconds, text), refusal


def _settle(one: _Wanted) -> PreparedKey:
    facts = one.facts
    dims = tuple(sorted(facts.dims.items()))
    try:
        return PreparedKey(facts.op, facts.dtype, dims, _dispatch.settle(facts, one.forced).row.name)
    except KernelError as error:  # for whoever makes the call to meet; here, one line of the report
        return PreparedKey(facts.op, facts.dtype, dims, None, str(error))


_Call = tuple[str, Callable[[], object]]


def _compile_kernels(wanted: list[_Wanted], settled: list[PreparedKey], model: Any, jobs: int) -> tuple[str, ...]:
    """Compile and load what native rows launch for the calls that are known; the texts of calls that failed."""
    calls: dict[int | None, list[_Call]] = {}
    for one, key in zip(wanted, settled, strict=True):
        if one.args and one.facts.device == "cuda" and key.row is not None and key.row.startswith("native/"):
            call = partial(_dispatch.load_target(key.row), *one.args, **(one.kwargs or {}))
            calls.setdefault(one.facts.index, []).append((key.row, call))
    rehearsals = list(getattr(model, "rehearsals", tuple)())
    if rehearsals:
        calls.setdefault(model.device.index, []).extend(rehearsals)
    notes: list[str] = []
    for index, several in calls.items():
        notes += _rehearse(index, several, jobs)
    return tuple(dict.fromkeys(notes))


def _rehearse(index: int | None, calls: list[_Call], jobs: int) -> list[str]:
    import torch  # here and below, as facts alone are prepared without it

    from .ops.rehearsal import rehearse

    notes: list[str] = []

    def make() -> None:
        for what, call in calls:
            try:
                call()
            except Exception as error:  # a call that fails now would fail later, where it is somebody's to handle
                notes.append(f"{what}: {told(error)}")

    with torch.cuda.device(torch.cuda.current_device() if index is None else index):
        if not rehearse(make, load=True, threads=jobs):
            notes.append("Triton cannot compile ahead here: its kernels compile at their first launch")
    return notes

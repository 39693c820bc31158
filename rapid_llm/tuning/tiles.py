"""A search for better tiles of a native Triton row, for one call: in processes of their own, one step at a time.

What may go wrong with a candidate goes wrong there: a compiler that dies, an illegal address after which every call of
a process fails, a hang. Such a candidate is out, and the search goes on. A candidate that computes anything wrong is
refused by the harness, which lays poison into the result and looks at every element; one that Triton cannot build must
not be answered by PyTorch instead, which RAPID_LLM_STRICT sees to. The winner is proven alone afterwards, by all cases
of its op.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from rapid_llm.bench import BenchError, device_for
from rapid_llm.bench.checks import against_oracle
from rapid_llm.bench.op_arms import empty_out
from rapid_llm.bench.rows import RowComparison, compare
from rapid_llm.bench.trial import RowArm
from rapid_llm.bench.work import work_of
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.registry import KernelSpec, probes
from rapid_llm.kernels.registry.facts import bind
from rapid_llm.kernels.registry.timings import Timing, order
from rapid_llm.verify import pool, proving
from rapid_llm.verify.conformance import check_row

from .calls import Call

STATED: Final = "the heuristic"
TRIED: Final = "candidate"
WARPS: Final = (1, 2, 4, 8, 16)
STAGES: Final = (1, 2, 3, 4, 5, 6)
LIMIT_SECONDS: Final = 120.0
PROOF_SECONDS: Final = 1200.0
"""A proof runs every case of an op; a candidate that takes longer than `LIMIT_SECONDS` hangs."""

PASSES: Final = 3

Tiles = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Question:
    """What a call asks `tile_policy`: a name and dimensions, and what the heuristic says."""

    name: str
    dims: Mapping[str, int]
    stated: Tiles

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.dims.items())})"


@dataclass(frozen=True, slots=True)
class Task:
    """Work of a child. kind: `ask` which questions a call has, `time` a candidate, `prove` the winner."""

    kind: str
    call: Call
    row: str
    device: str
    question: Question | None = None
    meta: Tiles = field(default_factory=dict)
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate: its time over the heuristic's, or why it is out."""

    meta: Tiles
    timing: Timing | None = None
    reach: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome for a question. best: None where nothing is faster than the heuristic for sure, or proven."""

    question: Question
    best: Trial | None
    tried: tuple[Trial, ...]
    text: str


Do = Callable[[Sequence[Task]], Sequence[Any]]
"""Does tasks in children, one after another: of each its value, or a `pool.Lost`."""


def native_row(call: Call) -> KernelSpec:
    """The floor for the call's scheme: the row that takes its tiles from `tile_policy`."""
    rows = [row for row in registry.rows(call.op) if row.is_native and (not row.schemes or call.scheme in row.schemes)]
    return rows[0]


def neighbours(meta: Tiles) -> Iterator[dict[str, int]]:
    """Every candidate that differs from `meta` in one choice: warps, stages, or a block twice or half as large. Where
    a block has a count of blocks beside it (BLOCK, BLOCKS), that goes the other way, so that all is covered."""
    for name, value in meta.items():
        if name == "num_warps":
            yield from ({**meta, name: other} for other in WARPS if other != value)
        elif name == "num_stages":
            yield from ({**meta, name: other} for other in STAGES if other != value)
        elif f"{name}S" in meta:
            count = meta[f"{name}S"]
            yield {**meta, name: value * 2, f"{name}S": -(-count // 2)}
            if value > 1:
                yield {**meta, name: value // 2, f"{name}S": count * 2}
        elif not (name.endswith("S") and name[:-1] in meta) and value > 0 and value & (value - 1) == 0:
            yield {**meta, name: value * 2}
            if value > 1:
                yield {**meta, name: value // 2}


def search(call: Call, question: Question, row: str, device: str, do: Do, *, seconds: float) -> Found:
    """Walk from the heuristic's answer to the best of its neighbours until none is faster for sure, then prove it."""
    stated = Trial(question.stated, Timing(0.0, 0.0, 0.0))
    tried: dict[tuple[tuple[str, int], ...], Trial] = {_key(question.stated): stated}
    best = stated
    for _ in range(PASSES):
        new = {_key(meta): meta for meta in neighbours(best.meta) if _key(meta) not in tried}
        for trial in map(_trial, do([Task("time", call, row, device, question, m, seconds) for m in new.values()])):
            tried[_key(trial.meta)] = trial
        leader = _leader(best, list(tried.values()))
        if leader is best:
            break
        best = leader
    others = tuple(trial for trial in tried.values() if trial is not stated)
    if best is stated:
        return Found(question, None, others, "no candidate is faster than the heuristic beyond noise")
    (answer,) = do([Task("prove", call, row, device, question, best.meta)])
    wrong = answer.why if isinstance(answer, pool.Lost) else str(answer)
    if wrong:
        return Found(question, None, others, f"the fastest candidate {dict(best.meta)} was not proven: {wrong}")
    return Found(question, best, others, "proven by every case of the op")


def _leader(best: Trial, trials: Sequence[Trial]) -> Trial:
    """The trial to stand on: `best`, unless another is faster beyond noise."""
    named = {str(i): trial for i, trial in enumerate([best, *(t for t in trials if t is not best)])}
    timings = {name: t.timing for name, t in named.items() if t.timing is not None}
    reach = max((t.reach for t in trials), default=0.0)
    return next((named[name] for name in order(list(timings), timings, reach)), best)


def _trial(answer: Any) -> Trial:
    if isinstance(answer, pool.Lost):
        return Trial(answer.task.meta, failure=answer.why)
    if not isinstance(answer, Trial):
        raise TypeError(f"a child answered {answer!r}")
    return answer


def _key(meta: Tiles) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(meta.items()))


def children(tasks: Sequence[Task]) -> list[Any]:
    """Do tasks in a process of their own, and in a fresh one after each that failed."""
    limit_s = PROOF_SECONDS if any(task.kind == "prove" for task in tasks) else LIMIT_SECONDS
    return list(pool.run(tasks, work, start, jobs=1, limit_s=limit_s))


# -- in the child -----------------------------------------------------------------------------------------------------


def start(lock: Any) -> None:
    """Make a worker ready: a kernel that cannot be built is an error, and not a call of PyTorch."""
    os.environ["RAPID_LLM_STRICT"] = "1"
    proving.start(lock)


def work(task: Task) -> pool.Done:
    """Do a task; the worker ends after one that failed, for nobody knows what it left behind."""
    try:
        if task.kind == "ask":
            return pool.Done(questions(task.call, task.row, task.device))
        if task.question is None:
            raise ValueError(f"{task.kind}: no question is given")
        if task.kind == "prove":
            return pool.Done(prove(task, task.question))
        return pool.Done(time(task, task.question))
    except Exception as error:  # whatever a candidate does to a compiler or a device
        text = f"{type(error).__name__}: {str(error).strip()[:300]}"
        trial = Trial(task.meta, failure=text)
        return pool.Done(trial if task.kind == "time" else text, last=True)


def questions(call: Call, row: str, device: str) -> list[Question]:
    """What a call of the row asks, in order, once each."""
    asked: dict[str, Question] = {}

    def note(name: str, dims: Mapping[str, int], stated: Tiles) -> Tiles:
        question = Question(name, dict(dims), dict(stated))
        asked.setdefault(str(question), question)
        return stated

    with tile_policy.choosing(note):
        _call(call, row, device, 0)
    return list(asked.values())


def _call(call: Call, row: str, device: str, seed: int) -> None:
    """Call the row, and look at its result."""
    op = registry.get_op(call.op)
    values, _ = bind(op, (), call.values(device, seed))
    positional = [values[arg.name] for arg in op.parsed.positional]
    named = {arg.name: values[arg.name] for arg in op.parsed.keyword_only if values[arg.name] is not None}
    judge = against_oracle(op, registry.get_row(row).roundings)(*positional, **named)
    result = registry.load_target(row)(*positional, **named)
    problem = judge(tuple(values[name] for name in op.parsed.mutated) if op.parsed.mutated else result)
    if problem is not None:
        raise ValueError(problem)


def instead(question: Question, meta: Tiles) -> tuple[tile_policy.Choose, list[int]]:
    """A chooser that answers `meta` wherever the heuristic would answer what it does for the question, and how often
    it did."""
    used: list[int] = [0]

    def choose(name: str, dims: Mapping[str, int], stated: Tiles) -> Tiles:
        if name != question.name or dict(stated) != dict(question.stated):
            return stated
        used[0] += 1
        return meta

    return choose, used


def time(task: Task, question: Question, *, run: Callable[..., RowComparison] = compare) -> Trial:
    """Time the row with the candidate against the row as it is."""
    op, row = registry.get_op(task.call.op), registry.get_row(task.row)
    values, _ = bind(op, (), task.call.values(task.device))
    positional = [values[arg.name] for arg in op.parsed.positional]
    named = {arg.name: values[arg.name] for arg in op.parsed.keyword_only if values[arg.name] is not None}
    names = [arg.name for arg in op.parsed.positional]
    mutated = tuple(names.index(name) for name in op.parsed.mutated)
    out = empty_out(op, values)
    arms = [
        RowArm(label, _with(registry.load_target(row.name), question, meta), out, mutated)
        for label, meta in ((STATED, question.stated), (TRIED, task.meta))
    ]
    try:
        found = run(
            arms,
            positional,
            named,
            work=work_of(probes.load(op.work)(**values)),
            check=against_oracle(op, row.roundings),
            device=device_for(task.device),
            max_seconds=task.seconds,
        )
    except BenchError as error:
        return Trial(task.meta, failure=f"{error.code}: {error}")
    if TRIED in found.refused:
        return Trial(task.meta, failure=f"{found.refused[TRIED].code}: {found.refused[TRIED]}")
    result, ratio = found.results[TRIED], found.ratios[TRIED]
    figures = tuple(1e6 * s for s in (result.seconds.median, result.seconds.p10, result.seconds.p90))
    timing = Timing(*figures, ratio.median, ratio.low, ratio.high, result.flags)
    return Trial(task.meta, timing, max(found.control.high - 1, 1 - found.control.low, 0.0))


def _with(function: Callable[..., Any], question: Question, meta: Tiles) -> Callable[..., Any]:
    """The row's function with `meta` for the question."""
    choose, _ = instead(question, meta)

    def call(*args: Any, **kwargs: Any) -> Any:
        with tile_policy.choosing(choose):
            return function(*args, **kwargs)

    return call


def prove(task: Task, question: Question) -> str:
    """Every case of the op, and the call itself and its neighbours in size, with the winner's tiles wherever the
    heuristic says what it says for the question; "" if all is right."""
    choose, used = instead(question, task.meta)
    with tile_policy.choosing(choose):
        for seed, call in enumerate(_near(task.call)):
            _call(call, task.row, task.device, seed)
        if not used[0]:
            return f"no call asks for {question}"
        report = check_row(task.call.op, task.row, device=task.device, dtype=task.call.dtype, scheme=task.call.scheme)
    if torch.device(task.device).type == "cuda":
        torch.cuda.synchronize()
    return "" if report.ok else str(report.failures[0]) if report.failures else "nothing was compared"


def _near(call: Call) -> Iterator[Call]:
    yield call
    for name in ("tokens", "sequences", "rows"):
        size = call.dims.get(name)
        if size is not None and call.op.split(".")[0] not in ("comm", "attention"):
            yield from (replace(call, dims={**call.dims, name: n}) for n in (size - 1, size + 1) if n >= 1)

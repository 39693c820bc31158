"""How many wrong rows the cases of a row refuse: without that, passing them proves little.

The wrong rows are plain PyTorch on the CPU with one fault each (`faulty`, `faulty_in_place`); a row's shapes, layouts
and declared roundings decide which cases they meet and under which bounds, as they do for the row itself. A row with a
critical fault that its own cases do not refuse stays unverified, however well it passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from rapid_llm.kernels.registry import KernelSpec, OpSpec, load_target, rows
from rapid_llm.verify import faulty, faulty_in_place, faulty_layout, faulty_several, plain_paged
from rapid_llm.verify.cases.build import torch_dtype
from rapid_llm.verify.conformance import variants
from rapid_llm.verify.faulty import FaultyRow
from rapid_llm.verify.truths import Truths

ENOUGH: Final = 8
"""Wrong rows that must have been tried before a score means anything."""

_CRITICAL: Final = frozenset(
    {
        *("tail unwritten", "last row unwritten", "last column dropped", "last row dropped", "one output unwritten"),
        *("output unwritten", "answers from memory", "nothing back unwritten", "rest not marked"),
        *("input strides ignored", "out strides ignored", "NaN swallowed", "truncates"),
        *(faulty_layout.SPACED, faulty_layout.OTHER_SPACED),
        *("sees one more", "sees one less", "not causal", "one too far", "position off by one"),
        *("window ignored", "window one wider", "window one narrower", "softcap ignored", "softcap before scale"),
        *("fp8 truncates", "fp8 overflows", "fp8 bias of 8", "fp8 subnormals flushed"),
        *("eps constant", "eps ignored", "eps outside", "scale ignored", "temperature ignored", "0.3 of the answer"),
    }
)
"""Tail dropped, tile unwritten, mask off by one, stale output, wrong stride, NaN swallowed, store truncated, wrong
scale or eps."""

_WITH_RESULT: Final = (
    *("tail unwritten", "last row unwritten", "output unwritten", "input strides ignored", "out strides ignored"),
    *("NaN swallowed", "0.3 of the answer", "out ignored", "stray write", "input changed"),
)
_HALF: Final = ("bf16", "fp16")

_NO_FAULT: Final = frozenset(
    {
        *(("sample", fault) for fault in ("NaN swallowed", "0.3 of the answer", "truncates")),
        *((op, "truncates") for op in ("kvcache.write", "comm.dispatch", "comm.combine")),
    }
)
"""Wrappers that change nothing in the results of an op: ids are no floats, and a copy has no low bits to cut off."""


@dataclass(frozen=True, slots=True)
class Score:
    """tried: wrong rows. alive: those that the cases took for right. critical_alive: the critical ones among them."""

    tried: int = 0
    alive: tuple[str, ...] = ()
    critical_alive: tuple[str, ...] = ()

    @property
    def killed(self) -> int:
        return self.tried - len(self.alive)

    @property
    def enough(self) -> bool:
        """Whether the cases have shown that they can tell right from wrong."""
        return self.tried >= ENOUGH and not self.critical_alive


def key(op: OpSpec, row: KernelSpec) -> tuple[object, ...]:
    """Rows with equal keys meet the same cases under the same bounds, so they have the same score."""
    require = tuple(str(dim) for dim in row.shape.require)
    return (op.id, require, row.layout, row.roundings, tuple(sorted(variants(op, row), key=str)))


def score(op: OpSpec, row: KernelSpec, *, budget: str, check: Callable[..., Any]) -> Score:
    """Try every wrong row of `op` that has a dtype and scheme of `row` on the cases that `row` takes.

    check: `conformance.check_callable`.
    """
    judged = replace(row, devices=(), capability=(), prepack=None)
    tried, alive, truths = 0, [], Truths()
    for mutant in mutants_of(op, row):
        tried += 1
        report = check(
            op,
            mutant.fn,
            dtype=mutant.dtype,
            scheme=mutant.scheme,
            budget=budget,
            row=judged,
            first_failure=True,
            truths=truths,
        )
        if not report.failures:
            alive.append(mutant)
    names = tuple(f"{m.fault} ({m.dtype})" for m in alive)
    return Score(tried, names, tuple(f"{m.fault} ({m.dtype})" for m in alive if m.fault in _CRITICAL))


def mutants_of(op: OpSpec, row: KernelSpec) -> Iterator[FaultyRow]:
    """The op's own faults in the dtypes and schemes that the row takes, and the general ones in one of them."""
    pairs = variants(op, row)
    if not pairs:
        return
    dtype, scheme = min(pairs, key=lambda p: (p[0] not in _HALF, p[0] != "bf16", str(p)))
    right = right_row(op)
    if op.parsed.takes_out:
        for fault in _WITH_RESULT:
            if (op.id, fault) not in _NO_FAULT:
                yield FaultyRow(op.id, fault, faulty.wrapped(fault, right), dtype, scheme)
        yield FaultyRow(op.id, "answers from memory", faulty.remembering(right), dtype, scheme)
        if dtype in _HALF and (op.id, "truncates") not in _NO_FAULT:
            fn = faulty.truncating(right, op.function, torch_dtype(dtype))
            yield FaultyRow(op.id, "truncates", fn, dtype, scheme)
    elif op.outs:
        for fault in faulty_several.FAULTS:
            yield FaultyRow(op.id, fault, faulty_several.wrapped(fault, right), dtype, scheme)
    else:
        for fault in faulty_in_place.FAULTS:
            yield FaultyRow(op.id, fault, faulty_in_place.wrapped(op, fault, right), dtype, scheme)
        if dtype in _HALF and (op.id, "truncates") not in _NO_FAULT:
            fn = faulty_in_place.truncating(op, right, torch_dtype(dtype))
            yield FaultyRow(op.id, "truncates", fn, dtype, scheme)
    for mutant in faulty.own(op.id):
        feature, value = plain_paged.FEATURES.get(mutant.fault, ("", 0))
        if any(dim.name == feature and not dim.holds(value) for dim in row.shape.require):
            continue  # the row takes no call in which it shows
        if (mutant.dtype, mutant.scheme or (op.schemes[0] if op.schemes else None)) in pairs:
            yield mutant


def right_row(op: OpSpec) -> Callable[..., Any]:
    """The plain row of an op of this package; the native row of another package's op, which is all that there is."""
    try:
        return faulty.plain_row(op.id)
    except (AttributeError, ModuleNotFoundError):
        native = next(row for row in rows(op.id) if row.is_native)
        return load_target(native.name)

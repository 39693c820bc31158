"""One row over one case: the calls that are made, and everything that is looked at after each of them.

A case is called at least twice: once letting the row allocate (fresh memory is filled with NaN first) and once with
`out` given, or for an in-place op twice on fresh copies. All tensors live in poisoned memory of their own (`guard`);
inputs must come back untouched; the oracle works on private copies taken before the call; equal calls must give equal
bits. Later seeds are written into the same memory, so that an answer remembered by pointer is wrong.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import KernelSpec, OpSpec, probes
from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.compare import Comparison, compare, compare_ids
from rapid_llm.verify.guard import Guarded, bits
from rapid_llm.verify.report import Failure, Report
from rapid_llm.verify.selection import AcceptableIds
from rapid_llm.verify.setting import PoisonedAllocations, alone, one_thread
from rapid_llm.verify.standing import Standing, standing
from rapid_llm.verify.truth import Truth, allocation, truth_of
from rapid_llm.verify.truths import Truths

Fn = Callable[..., Any]

_RAISED: Final = object()
_APART: Final = ("strided", "parted")
"""Layouts of `out` that leave gaps."""


@dataclass(slots=True)
class Run:
    """A row under test, and the report that its cases fill. truths: kept from earlier runs, and for later ones."""

    op: OpSpec
    fn: Fn
    row: KernelSpec | None
    device: torch.device
    scheme: str | None
    report: Report
    truths: Truths | None = None
    _guards: dict[str, Guarded] = field(default_factory=dict)
    _where: tuple[str, int, str] = ("", 0, "")

    def case(self, case: Case, seeds: tuple[int, ...]) -> None:
        """Make the calls of `case` with fresh values for every seed."""
        with alone(case, self.device):
            self._case(case, seeds)
            if case.vast:
                self._guards = {}

    def _case(self, case: Case, seeds: tuple[int, ...]) -> None:
        self._guards = {}
        counted = False
        for seed in seeds[: case.seeds]:
            with one_thread():
                values = case.make(self.generator(seed))
            state = standing(self.op, self.row, values)
            if state is Standing.OUTSIDE:
                self.report.skipped += 1
                return
            if not counted:
                self.report.cases += 1
                counted = True
            self._where = (case.id, seed, "")
            before = len(self.report.failures)
            if case.raises:
                self._must_raise(values, case.raises)
            elif self._refuses(values, state):
                self.report.refused += 1
            else:
                self._calls(case, self.truth(values))
            if len(self.report.failures) > before:
                return  # one seed tells what is wrong

    def rehearse(self, cases: list[Case]) -> None:
        """Make the calls of `cases` for the sake of what they launch; what they answer or raise is of no interest."""
        for case in cases:
            with alone(case, self.device):
                self._rehearse(case)

    def _rehearse(self, case: Case) -> None:
        values = case.make(torch.Generator().manual_seed(0))
        if case.raises or standing(self.op, self.row, values) is not Standing.TAKEN:
            return
        outs: list[Guarded | None] = [None]
        if self.op.parsed.takes_out:
            shape, dtype = self._out_facts(values)
            outs += [Guarded.empty(shape, dtype, self.device, layout=_layout(how)) for how in ("", *case.outs)]
        for out in outs:
            positional, keywords = self.bind(self.guarded(values))
            with contextlib.suppress(Exception):
                self.fn(*positional, **keywords, **({} if out is None else {"out": out.tensor}))

    def truth(self, values: dict[str, Any]) -> Truth:
        find = truth_of if self.truths is None else self.truths.of
        with one_thread():
            return find(self.op, values, self.row.roundings if self.row else ())

    def _calls(self, case: Case, truth: Truth) -> None:
        if self.op.outs:
            self._same(self._several(truth, "call"), self._several(truth, "again"))
            return
        if not self.op.parsed.takes_out:
            first = self._in_place(truth, "call")
            again = self._in_place(truth, "again")
            self._same(first, again)
            return
        first = self._with_out(truth, None, "allocating")
        again = self._with_out(truth, "contiguous", "out given")
        self._same(first, again)
        for how in case.outs:
            self._where = (*self._where[:2], f"out {how}")
            kind, _, name = how.partition(":")
            if kind in ("overlap", "try overlap", "try is"):
                self._aliased(truth, name, shift=int(kind != "try is"), must_refuse=kind == "overlap")
            else:
                self._with_out(truth, how, f"out {how}")

    # -- one call each ------------------------------------------------------------------------------------------------

    def _with_out(self, truth: Truth, how: str | None, call: str) -> list[Tensor] | None:
        """Call with no `out`, or one that is `contiguous`, `strided`, `parted` or `is:<argument>`."""
        self._where = (*self._where[:2], call)
        args = self.guarded(truth.values)
        guard, alias = None, ""
        if how is not None:
            shape, dtype = self._out_facts(truth.values)
            alias = how.partition(":")[2] if how.startswith("is:") else ""
            finite = call == "out given"
            guard = args[alias] if alias else Guarded.empty(shape, dtype, self.device, layout=how, finite=finite)
        out = None if guard is None else guard.tensor
        foreign = how in _APART and standing(self.op, self.row, truth.values, out) is Standing.FOREIGN_LAYOUT
        if foreign and self._refused(args, out):
            self.report.refused += 1
            return None
        result = self._invoke(args, out, finite=call == "out given")
        if result is _RAISED:
            return None
        if not isinstance(result, Tensor):
            self.fail("return value", f"expected a Tensor, got {type(result).__name__}")
            return None
        if out is not None and result is not out:
            self.fail("out ignored", "the tensor returned is not the `out` that was given")
            return None
        if guard is None and not self._fresh(result, args, truth.values):
            return None
        self._untouched(args, {alias} if alias else set())
        if guard is not None and not alias and guard.stray():
            self.fail("stray write", f"{guard.stray()} elements around out were written")
        self.compare([result], truth)
        return [result.detach().cpu().clone()]

    def _in_place(self, truth: Truth, call: str) -> list[Tensor] | None:
        self._where = (*self._where[:2], call)
        args = self.guarded(truth.values)
        result = self._invoke(args, None)
        if result is _RAISED:
            return None
        if result is not None:
            self.fail("return value", f"an in-place op returns None, got {type(result).__name__}")
        mutated = self.op.parsed.mutated
        self._untouched(args, set(mutated))
        got = [args[name].tensor for name in mutated]
        self.compare(got, truth)
        return [t.detach().cpu().clone() for t in got]

    def _several(self, truth: Truth, call: str) -> list[Tensor] | None:
        """Call an op that returns several tensors."""
        self._where = (*self._where[:2], call)
        args = self.guarded(truth.values)
        result = self._invoke(args, None, finite=call == "again")
        if result is _RAISED:
            return None
        count = len(self.op.outs)
        if not isinstance(result, tuple) or [isinstance(t, Tensor) for t in result] != [True] * count:
            self.fail("return value", f"expected a tuple of {count} Tensors, got {type(result).__name__}")
            return None
        if not all(self._is(t, args, *facts) for t, facts in zip(result, self._outs_facts(truth.values), strict=True)):
            return None
        self._untouched(args, set())
        self.compare(list(result), truth)
        return [t.detach().cpu().clone() for t in result]

    def where(self, case: str, seed: int, call: str) -> None:
        """Say of what the next failures are."""
        self._where = (case, seed, call)

    @staticmethod
    def generator(seed: int) -> torch.Generator:
        """The source of a case's numbers for a seed."""
        return torch.Generator().manual_seed(seed * 7919 + 17)

    def answers(self, values: dict[str, Any], *, finite: bool = False) -> list[Tensor] | None:
        """What one more call gives, in memory of its own for a row that allocates; None after a failure."""
        return self.call(self.guarded(values), None, finite=finite)

    def call(self, args: dict[str, Any], out: Tensor | None, *, finite: bool = False) -> list[Tensor] | None:
        """The result, or the arguments that the op writes."""
        result = self._invoke(args, out, finite=finite)
        if result is _RAISED:
            return None
        if self.op.parsed.takes_out:
            return [result] if isinstance(result, Tensor) else None
        return self.answered(result, args)

    def answered(self, result: Any, args: dict[str, Any]) -> list[Tensor]:
        """What a call computed: what it returned, or the arguments that the op writes."""
        mutated = self.op.parsed.mutated
        if mutated:
            return [args[name].tensor for name in mutated]
        return list(result) if isinstance(result, tuple) else [result]

    def _invoke(self, args: dict[str, Any], out: Tensor | None, *, finite: bool = False) -> Any:
        """The row's answer; `_RAISED` after an exception, which is reported."""
        positional, keywords = self.bind(args)
        if out is not None:
            keywords["out"] = out
        self.report.calls += 1
        try:
            with PoisonedAllocations(finite):
                result = self.fn(*positional, **keywords)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.fail("raised", f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")
            return _RAISED
        return result

    def bind(self, args: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        values = {k: v.tensor if isinstance(v, Guarded) else v for k, v in args.items()}
        if self.row is not None and self.row.prepack is not None:
            values["weight"] = probes.load(self.row.prepack)(values["weight"], self.scheme)
        parsed = self.op.parsed
        positional = [values.get(a.name, a.default) for a in parsed.positional]
        return positional, {a.name: values[a.name] for a in parsed.keyword_only if a.name in values}

    def guarded(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fresh poisoned copies; in the memory of the previous call where they fit."""
        result: dict[str, Any] = {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                result[name] = value
                continue
            kept = self._guards.get(name)
            if kept is not None and kept.fits(value):
                kept.refill(value)
            else:
                self._guards[name] = Guarded(value)
            result[name] = self._guards[name]
        return result

    # -- what is looked at --------------------------------------------------------------------------------------------

    def compare(self, got: list[Tensor], truth: Truth) -> None:
        for index, result in enumerate(got):
            with one_thread():
                if isinstance(truth.expected, AcceptableIds):
                    outcome = compare_ids(result.detach().cpu(), truth.expected)
                else:
                    expected = truth.expected if isinstance(truth.expected, Tensor) else truth.expected[index]
                    shared = self.row is not None and bool(self.row.roundings)
                    outcome = compare(result.detach().cpu(), expected, truth.bounds[index], shared=shared)
            self._count(outcome, self.op.parsed.mutated[index] if self.op.parsed.mutated else "")

    def _count(self, outcome: Comparison, name: str) -> None:
        self.report.elements += outcome.elements
        self.report.worst_ulp = max(self.report.worst_ulp, outcome.worst_ulp)
        self.report.worst_ratio = max(self.report.worst_ratio, outcome.worst_ratio)
        self.report.worst_norm = max(self.report.worst_norm, outcome.worst_norm)
        if outcome.problem is not None:
            self.fail("value", f"{name}: {outcome.problem}" if name else outcome.problem)

    def _fresh(self, result: Tensor, args: dict[str, Any], values: dict[str, Any]) -> bool:
        return self._is(result, args, *self._out_facts(values))

    def _is(self, result: Tensor, args: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a row's own tensor is of that shape and dtype; faults of its memory are reported."""
        if tuple(result.shape) != shape or result.dtype != dtype or result.device.type != self.device.type:
            got = f"{tuple(result.shape)} {result.dtype} on {result.device}"
            self.fail("result", f"got {got}, expected {shape} {dtype} on {self.device}")
            return False
        if not result.is_contiguous():
            self.fail("result", f"the result is not contiguous: shape {shape}, strides {result.stride()}")
        storages = {g.tensor.untyped_storage().data_ptr() for g in args.values() if isinstance(g, Guarded)}
        if result.numel() and result.untyped_storage().data_ptr() in storages:
            self.fail("result", "the result shares memory with an argument")
        return True

    def _untouched(self, args: dict[str, Any], mutated: set[str]) -> None:
        for name, guard in args.items():
            if not isinstance(guard, Guarded):
                continue
            if name in mutated:
                if guard.stray():
                    self.fail("stray write", f"{guard.stray()} elements around {name} were written")
            elif guard.changed():
                self.fail("input changed", f"{guard.changed()} elements in or around {name} changed")

    def _same(self, first: list[Tensor] | None, again: list[Tensor] | None) -> None:
        if first is None or again is None or self.report.failures:
            return
        for a, b in zip(first, again, strict=True):
            if not torch.equal(bits(a.contiguous()), bits(b.contiguous())):
                self.fail("not repeatable", "a second call with equal arguments gave other bits")

    # -- calls that must fail -----------------------------------------------------------------------------------------

    def _must_raise(self, values: dict[str, Any], kinds: tuple[type[BaseException], ...]) -> None:
        args = self.guarded(values)
        wanted = " or ".join(k.__name__ for k in kinds)
        positional, keywords = self.bind(args)
        self.report.calls += 1
        try:
            self.fn(*positional, **keywords)
        except kinds:
            self._untouched(args, set())
            self.report.elements += 1
        except Exception as error:
            self.fail("wrong error", f"expected {wanted}, got {type(error).__name__}: {error}")
        else:
            self.fail("no error", f"expected {wanted}")

    def _aliased(self, truth: Truth, name: str, *, shift: int, must_refuse: bool) -> None:
        """`out` is an argument, or its memory `shift` elements on: refused with nothing written, or else right."""
        args = self.guarded(truth.values)
        source = args[name].tensor
        if source.numel() < 2 or not source.is_contiguous():
            raise ValueError(f"case {self._where[0]}: an aliased out needs a contiguous {name} of at least 2 elements")
        out = source
        if shift:  # of the result's shape: one of the argument's would be refused for that, whatever it overlaps
            shape, dtype = self._out_facts(truth.values)
            fits = dtype == source.dtype and math.prod(shape) <= source.numel()
            like = source.new_empty(shape if fits else source.shape, device="meta")
            out = source.as_strided(like.shape, like.stride(), source.storage_offset() + shift)
        positional, keywords = self.bind(args)
        self.report.calls += 1
        try:
            result = self.fn(*positional, **keywords, out=out)
        except RuntimeError:
            self._untouched(args, set())
            return
        except Exception as error:
            self.fail("wrong error", f"expected a RuntimeError for an out that overlaps, got {type(error).__name__}")
            return
        if must_refuse:
            self.fail("no error", f"out overlaps {name} in part and was accepted")
            return
        self._untouched({k: v for k, v in args.items() if k != name}, set())
        self.compare([result], truth)

    def _refuses(self, values: dict[str, Any], state: Standing) -> bool:
        """Whether the row, which does not declare this layout, says so; if it answers, it must be right."""
        return state is Standing.FOREIGN_LAYOUT and self._refused(self.guarded(values), None)

    def _refused(self, args: dict[str, Any], out: Tensor | None) -> bool:
        positional, keywords = self.bind(args)
        try:
            self.fn(*positional, **keywords, **({} if out is None else {"out": out}))
        except (RuntimeError, ValueError):
            self._untouched(args, set())
            return True
        return False

    def _out_facts(self, values: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype that the op declares for its result."""
        if self.op.out is None:
            raise ValueError(f"{self.op.id} has no result")
        return allocation(self.op, self.op.out, values)

    def _outs_facts(self, values: dict[str, Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The same of each of several results."""
        return [allocation(self.op, declared, values) for declared in self.op.outs]

    def fail(self, what: str, detail: str) -> None:
        self.report.failures.append(Failure(*self._where, what, detail))


def _layout(how: str) -> str:
    return how if how in _APART else "contiguous"

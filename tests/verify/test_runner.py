"""The conformance runner: what counts as proof, what it watches, and what it refuses to call good."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import (
    ArgumentError,
    Dim,
    KernelSpec,
    Shape,
    UnknownOpError,
    UnknownRowError,
    evidence,
    register,
    unregister,
)
from rapid_llm.verify import plain
from rapid_llm.verify.cases import Case
from rapid_llm.verify.conformance import check_callable, check_row, unavailable, variants
from rapid_llm.verify.guard import Guarded, span, unique_view
from rapid_llm.verify.oracles import OracleError
from rapid_llm.verify.report import Failure, Report

SCALE = registry.get_op("scale")
LINEAR = registry.get_op("linear")


def no_cases(dtype: str, device: str, scheme: str | None, *, budget: str) -> list[Case]:
    return []


def empty_cases(dtype: str, device: str, scheme: str | None, *, budget: str) -> list[Case]:
    return [Case("empty", lambda g: {"input": torch.empty(0), "factor": 2.0})]


def overlapping_cases(dtype: str, device: str, scheme: str | None, *, budget: str) -> list[Case]:
    return [Case("aliased", lambda g: {"input": torch.randn(3, 8, generator=g)}, outs=("overlap:input",))]


def nan_oracle(*, input: Tensor, factor: float) -> Tensor:
    return torch.full(input.shape, float("nan"), dtype=torch.float64)


def pack_transposed(weight: Tensor, scheme: str) -> tuple[str, Tensor]:
    return scheme, weight.T.contiguous()


def packed_linear(
    input: Tensor, weight: Any, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    assert weight[0] == scheme
    return plain.linear(input, weight[1].T, bias, out, scheme=scheme)


def bf16_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, *, scheme: str = "unquantized"
) -> Tensor:
    return plain.linear(input.bfloat16().float(), weight.bfloat16().float(), bias, out, scheme=scheme)


def dense_scale(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    if not input.is_contiguous() or (out is not None and not out.is_contiguous()):
        raise ArgumentError("scale: takes contiguous tensors")
    return plain.scale(input, factor, out)


def row(op: str, name: str, target: str, **fields: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        op=op,
        backend=name.split("/")[0],
        target=f"{__name__}:{target}",
        available=f"{__name__}:yes",
        **fields,
    )


def yes() -> bool:
    return True


def local(op: Any, **changes: str) -> Any:
    return dataclasses.replace(op, **{k: f"{__name__}:{v}" for k, v in changes.items()})


def test_no_cases_prove_nothing() -> None:
    """B59: an empty list of cases is not a pass."""
    report = check_callable(local(SCALE, cases="no_cases"), plain.scale, dtype="fp32")
    assert not report.ok
    assert not report.failures
    assert "nothing was compared" in str(report)


def test_cases_without_elements_prove_nothing() -> None:
    """B59: a case that compares no element is not a pass either."""
    report = check_callable(local(SCALE, cases="empty_cases"), plain.scale, dtype="fp32")
    assert report.cases == 1
    assert not report.ok


def test_nan_from_the_oracle_is_an_error() -> None:
    """B37: NaN that the inputs do not explain would make every NaN right."""
    with pytest.raises(OracleError, match="finite"):
        check_callable(local(SCALE, oracle="nan_oracle"), plain.scale, dtype="fp32")


def test_good_report() -> None:
    report = check_callable(SCALE, plain.scale, dtype="bf16", budget="interpret")
    assert report.ok
    assert report.calls >= 2 * report.cases
    assert 0.4 < report.worst_ulp <= 0.5
    assert report.worst_ratio <= 1.0
    assert "ok" in str(report)
    report.failures.append(Failure("case", 0, "call", "value", "1 of 1"))
    assert not report.ok
    assert "case (seed 0, call): value: 1 of 1" in str(report)


def test_a_row_that_raises_is_reported_with_its_place() -> None:
    def broken(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        raise KeyError("lost")

    report = check_callable(SCALE, broken, dtype="fp32", budget="interpret", first_failure=True)
    assert report.failures[0].what == "raised"
    assert "lost" in report.failures[0].detail
    assert "test_runner.py" in report.failures[0].detail


def test_first_failure_stops() -> None:
    full = check_callable(SCALE, lambda input, factor, out=None: input, dtype="fp32", budget="interpret")
    first = check_callable(
        SCALE, lambda input, factor, out=None: input, dtype="fp32", budget="interpret", first_failure=True
    )
    assert first.cases < full.cases


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"op_id": "scales"}, UnknownOpError, "scale"),
        ({"row_name": "jit/scales"}, UnknownRowError, "scale"),
        ({"row_name": "native/rmsnorm"}, ValueError, "rmsnorm"),
        ({"dtype": "int8"}, ValueError, "int8"),
        ({"dtype": "float31"}, ValueError, "float31"),
        ({"budget": "huge"}, ValueError, "huge"),
    ],
)
def test_wrong_names_are_errors(arguments: dict[str, str], error: type[Exception], text: str) -> None:
    """Would go red if a typo verified nothing and said so nowhere."""
    good = {"op_id": "scale", "row_name": "native/scale", "dtype": "fp32", "budget": "interpret"}
    with pytest.raises(error, match=text):
        check_row(**{**good, **arguments})


class TestRegisteredRows:
    """Rows with limits of their own."""

    @pytest.fixture(autouse=True)
    def _clean(self) -> Any:
        yield
        for op in registry.ops():
            unregister(*(r.name for r in registry.rows(op.id) if r.target.startswith(__name__)))

    def test_packed_weight(self) -> None:
        """A row with prepack gets the packed object, never the weight."""
        register(
            row(
                *("linear", "test/linear.packed", "packed_linear"),
                schemes=("unquantized",),
                prepack=f"{__name__}:pack_transposed",
            )
        )
        report = check_row("linear", "test/linear.packed", dtype="fp32", budget="interpret")
        assert report.ok, str(report)

    def test_roundings(self) -> None:
        """The same row passes with its declarations and fails without them."""
        declared = {"roundings": ("input:bf16", "weight:bf16"), "schemes": ("unquantized",), "dtypes": ("fp32",)}
        register(row("linear", "test/linear.declared", "bf16_linear", **declared))
        register(row("linear", "test/linear.silent", "bf16_linear", **{**declared, "roundings": ()}))
        assert check_row("linear", "test/linear.declared", dtype="fp32", budget="interpret").ok
        assert check_row("linear", "test/linear.silent", dtype="fp32", budget="interpret").failures

    def test_layouts_may_be_refused_only_if_declared(self) -> None:
        """A row may raise for a layout it does not declare, and must not for one it does."""
        register(row("scale", "test/scale.dense", "dense_scale", layout=("contiguous",)))
        register(row("scale", "test/scale.any", "dense_scale"))
        dense = check_row("scale", "test/scale.dense", dtype="fp32", budget="interpret")
        assert dense.ok, str(dense)
        assert dense.refused > 0
        assert check_row("scale", "test/scale.any", dtype="fp32", budget="interpret").failures

    def test_shapes_outside_are_not_asked(self) -> None:
        shape = Shape(require=(Dim("numel", multiple_of=8),))
        register(row("scale", "test/scale.eight", "dense_scale", layout=("contiguous",), shape=shape))
        report = check_row("scale", "test/scale.eight", dtype="fp32")
        assert report.ok, str(report)
        assert report.skipped > 0

    def test_record_becomes_evidence(self) -> None:
        """Only a good, full run is kept; a small one is not proof."""
        register(row("scale", "test/scale.any", "plain_scale"))
        found = registry.get_row("test/scale.any")
        facts = registry.dispatcher.facts_of("scale", (), {"device": "cpu", "dtype": "fp32"})
        try:
            check_row("scale", "test/scale.any", dtype="fp32", budget="interpret", record=True)
            assert not evidence.of(found, facts).verified
            check_row("scale", "test/scale.any", dtype="fp32", record=True)
            kept = evidence.of(found, facts)
            assert kept.verified
            assert kept.cases > 20
        finally:
            evidence.forget("test/scale.any")

    def test_unavailable_says_why(self) -> None:
        register(row("scale", "test/scale.gpu", "plain_scale", devices=("cuda",)))
        assert "cuda" in unavailable(registry.get_row("test/scale.gpu"), "cpu")
        assert unavailable(registry.get_row("native/scale"), "cpu") == ""


def plain_scale(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    return plain.scale(input, factor, out)


def test_variants_pair_dtypes_with_schemes() -> None:
    """Would go red if a pair that the op does not combine were run, or one that it does were left out."""
    native = registry.get_row("native/embedding")
    pairs = variants(registry.get_op("embedding"), native)
    assert ("uint8", "q4_1") in pairs
    assert ("bf16", "unquantized") in pairs
    assert ("fp32", "q4_1") not in pairs
    assert ("uint8", "unquantized") not in pairs


class TestGuard:
    """The memory around tensors."""

    @pytest.mark.parametrize(
        "view",
        [
            torch.arange(24.0).reshape(4, 6),
            torch.arange(24.0).reshape(4, 6)[:, ::2],
            torch.arange(24.0).reshape(4, 6).T,
            torch.arange(24.0)[1:8],
            torch.arange(6.0)[None].expand(3, 6),
            torch.tensor(3.0),
            torch.empty(0, 4),
            torch.arange(24, dtype=torch.int32).reshape(4, 6)[1:, 1:],
        ],
    )
    def test_copy_keeps_values_layout_and_alignment(self, view: Tensor) -> None:
        guard = Guarded(view)
        assert torch.equal(guard.tensor, view)
        assert guard.tensor.stride() == view.stride()
        assert guard.tensor.data_ptr() % 64 == view.data_ptr() % 64
        assert guard.stray() == guard.changed() == 0

    def test_margins_gaps_and_elements_are_watched(self) -> None:
        """Would go red if a write before, after or between the elements went unseen."""
        base = torch.arange(24.0).reshape(4, 6)[:, ::2]
        for offset in (-1, 1, span(base)):
            guard = Guarded(base)
            storage = guard.tensor.as_strided((1,), (1,), guard.tensor.storage_offset() + offset)
            storage.fill_(0.0)
            assert guard.stray() == 1
            assert guard.changed() == 1
        guard = Guarded(base)
        guard.tensor[0, 0] = 5.0
        assert guard.stray() == 0
        assert guard.changed() == 1

    def test_nan_for_nan_is_no_change(self) -> None:
        guard = Guarded(torch.tensor([float("nan"), 1.0]))
        assert guard.changed() == 0

    def test_refill_is_the_same_memory(self) -> None:
        guard = Guarded(torch.ones(3, 4)[:, ::2])
        other = torch.zeros(3, 4)[:, ::2]
        address = guard.tensor.data_ptr()
        assert guard.fits(other)
        guard.refill(other)
        assert guard.tensor.data_ptr() == address
        assert torch.equal(guard.tensor, other)
        assert guard.changed() == 0
        assert not guard.fits(torch.zeros(3, 2))

    def test_outputs_start_as_nan(self) -> None:
        out = Guarded.empty((2, 3), torch.bfloat16, torch.device("cpu"), layout="strided")
        assert bool(torch.isnan(out.tensor).all())
        assert out.tensor.stride() == (6, 2)

    def test_unique_view(self) -> None:
        expanded = torch.arange(3.0)[None].expand(4, 3)
        assert unique_view(expanded).shape == (1, 3)


def test_report_without_cases_is_not_ok() -> None:
    assert not Report("scale", "row", "cpu", "fp32", None, "full", (0,)).ok


def test_an_overlapping_out_has_the_results_shape() -> None:
    """Catches: an overlap that no row of a smaller result is ever asked about, because its shape is refused first."""
    op = dataclasses.replace(registry.get_op("silu_and_mul"), cases=f"{__name__}:overlapping_cases")

    def checks_shape(input: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None and out.shape != (*input.shape[:-1], input.shape[-1] // 2):
            raise ArgumentError("silu_and_mul: out has another shape")
        return plain.silu_and_mul(input, out)

    report = check_callable(op, checks_shape, dtype="fp32")
    assert {f.what for f in report.failures} == {"no error"}, report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_row_is_not_checked_on_a_device_that_is_not_here() -> None:
    """Catches: torch's AssertionError from deep inside, of a row that nothing is wrong with."""
    with pytest.raises(ValueError, match=r"native/scale .* no CUDA device is visible here"):
        check_row("scale", "native/scale", device="cuda", dtype="fp32")

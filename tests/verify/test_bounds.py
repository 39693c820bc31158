"""Bounds: a correctly rounded result always passes, at every exponent, and little more than that does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import probes
from rapid_llm.verify import bounds, oracles
from rapid_llm.verify.cases.build import integers, wide
from rapid_llm.verify.compare import compare
from rapid_llm.verify.formats import random_blocks
from rapid_llm.verify.rounding import U
from rapid_llm.verify.ulp import half_ulp, round_to, spacing

NUMERIC = [op for op in registry.ops() if op.id != "sample"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _results(op_id: str, args: dict[str, Any]) -> list[tuple[Tensor, Tensor, torch.dtype]]:
    """(expected, bound, dtype of the result) for each result of an op."""
    op = registry.get_op(op_id)
    expected = probes.load(op.oracle)(**args)
    limits = probes.load(op.bound)(args, expected, ())
    several = (expected,) if isinstance(expected, Tensor) else expected
    if op.outs:
        dtypes = [eval(out.dtype, {"torch": torch, **args}) for out in op.outs]
    elif op.out is None:
        dtypes = [args[name].dtype for name in op.parsed.mutated]
    else:
        own = args[op.dtype_of].dtype
        dtypes = [args.get("dtype") or (torch.float32 if own == torch.uint8 else own)]
        if op_id == "linear":
            dtypes = [args["input"].dtype]
    return list(zip(several, limits, dtypes, strict=True))


@pytest.mark.parametrize("op", NUMERIC, ids=lambda op: op.id)
def test_correctly_rounded_result_passes_every_case(op: Any) -> None:
    """Would go red if a bound were anywhere below the rounding of its own output."""
    compared = 0
    load = probes.load(op.cases)
    pairs = [(d, s) for s in op.schemes or (None,) for d in op.dtypes]
    for case in [c for d, s in pairs for c in load(d, "cpu", s, budget="interpret") if not c.raises]:
        for expected, bound, dtype in _results(op.id, case.make(generator(5))):
            right = round_to(expected, dtype) if dtype.is_floating_point else expected
            outcome = compare(right.to(dtype), expected, bound)
            assert outcome.problem is None, f"{case.id}: {outcome.problem}"
            compared += outcome.elements
    assert compared > 100, f"only {compared} numbers: give {op.id} more rows in its cases for `interpret`"


@pytest.mark.parametrize("label", ["fp32", "fp16", "bf16"])
def test_scale_over_all_exponents(label: str) -> None:
    """B42: at 16 in bf16 half an ulp is 0.0625; whatever the exponent, right passes and one ulp away fails."""
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[label]
    x = wide(generator(), (20_000,), dtype, -126, 126)
    expected = oracles.scale(input=x, factor=0.75)
    (bound,) = bounds.scale({"input": x, "factor": 0.75}, expected)
    right = round_to(expected, dtype)
    assert compare(right.to(dtype), expected, bound).problem is None
    beside = right + spacing(right, dtype)
    finite = beside.abs() <= torch.finfo(dtype).max
    wrong = (beside - expected).abs() > bound
    exact = right == expected
    assert bool((wrong | ~finite | ~exact).all())
    assert bool((bound <= half_ulp(expected, dtype) * (1 + 2.0**-9)).all())


def test_exact_sums_have_no_slack() -> None:
    """Would go red if integer sums were allowed an error that fp32 cannot make on them."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, w = integers(generator(1), (3, 500), -15, 15, dtype), integers(generator(2), (4, 500), -8, 8, dtype)
        args = {"input": x, "weight": w}
        expected = oracles.linear(**args)
        (bound,) = bounds.linear(args, expected)
        assert torch.equal(bound, half_ulp(expected, dtype))


def test_inexact_sums_have_the_derived_slack() -> None:
    """gamma(K) sum |x w| for K terms, no more than the formula says."""
    x, w = torch.randn(2, 300, generator=generator(1)), torch.randn(3, 300, generator=generator(2))
    args = {"input": x, "weight": w}
    expected = oracles.linear(**args)
    (bound,) = bounds.linear(args, expected)
    total = x.double().abs() @ w.double().abs().T
    slack = 300 * U / (1 - 300 * U) * total
    assert bool((bound >= slack).all())
    assert bool((bound <= slack + half_ulp(expected.abs() + slack, torch.float32) + 1e-30).all())


def test_zeros_do_not_count_as_terms() -> None:
    """Would go red if a single term among 4,096 were given the slack of 4,096: TF32 would hide in it."""
    x = torch.zeros(1, 4096)
    x[0, 4000] = 1.2345678
    w = torch.randn(5, 4096, generator=generator(3))
    expected = oracles.linear(input=x, weight=w)
    (bound,) = bounds.linear({"input": x, "weight": w}, expected)
    assert bool((bound <= expected.abs() * 4 * U).all())


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize(("rounding", "dtype"), [("weight:bf16", torch.bfloat16), ("weight:fp16", torch.float16)])
def test_declared_roundings_widen_the_bound_by_what_they_move(scheme: str, rounding: str, dtype: torch.dtype) -> None:
    """A row that rounds its weight passes with the declaration and fails without."""
    x = integers(generator(4), (4, 128), -7, 7, torch.float32)
    blocks = random_blocks(generator(5), 9, 128, scheme, spread=0.7)
    args = {"input": x, "weight": blocks, "scheme": scheme}
    expected = oracles.linear(**args)
    weight = oracles.embedding(input=torch.arange(9), weight=blocks, scheme=scheme)
    got = (x.double() @ round_to(weight, dtype).T).to(torch.float32)
    (with_it,) = bounds.linear(args, expected, (rounding,))
    (without,) = bounds.linear(args, expected)
    assert compare(got, expected, with_it).problem is None
    if dtype == torch.bfloat16 or scheme == "q8_0":
        assert compare(got, expected, without).problem is not None


def test_rounded_output_and_input() -> None:
    """`input:bf16` and `output:bf16` together cover a bf16 product stored as fp32."""
    x, w = torch.randn(6, 96, generator=generator(6)), torch.randn(8, 96, generator=generator(7))
    expected = oracles.linear(input=x, weight=w)
    got = (x.bfloat16().float() @ w.bfloat16().float().T).bfloat16().float()
    args = {"input": x, "weight": w}
    declared = ("input:bf16", "weight:bf16", "output:bf16")
    assert compare(got, expected, bounds.linear(args, expected, declared)[0]).problem is None
    assert compare(got, expected, bounds.linear(args, expected)[0]).problem is not None


def test_rounded_output_alone() -> None:
    """Would go red if the roundings of operands covered one of the output that was not declared."""
    x = integers(generator(6), (6, 96), -15, 15, torch.float32)
    w = integers(generator(7), (8, 96), -8, 8, torch.float32)
    expected = oracles.linear(input=x, weight=w)
    got = (x @ w.T).bfloat16().float()
    args = {"input": x, "weight": w}
    assert compare(got, expected, bounds.linear(args, expected, ("output:bf16",))[0]).problem is None
    assert compare(got, expected, bounds.linear(args, expected, ("input:bf16", "weight:bf16"))[0]).problem is not None


def test_unknown_rounding_is_an_error() -> None:
    """Would go red if a misspelt declaration were ignored, or taken for no rounding."""
    x = torch.ones(1, 4)
    with pytest.raises(ValueError, match="weight:int4"):
        bounds.linear({"input": x, "weight": x}, oracles.linear(input=x, weight=x), ("weight:int4",))


def test_what_is_not_rotated_must_be_equal() -> None:
    args = {
        "query": torch.randn(2, 1, 8),
        "key": torch.randn(2, 1, 8),
        "positions": torch.tensor([1, 2]),
        "cos_sin_cache": torch.rand(4, 4),
    }
    for bound in bounds.rope(args, oracles.rope(**args)):
        assert bool((bound[..., 4:] == 0).all())
        assert bool((bound[..., :4] > 0).all())

"""The oracles against a second formulation, and what makes an oracle an oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import probes
from rapid_llm.verify import oracles
from rapid_llm.verify.cases import Case
from rapid_llm.verify.oracles import OracleError
from rapid_llm.verify.selection import AcceptableIds
from tests.reference import oracle, second


def small_cases(op_id: str) -> list[Case]:
    """The small set of every dtype class and scheme of an op."""
    op = registry.get_op(op_id)
    load = probes.load(op.cases)
    pairs = [(d, s) for s in op.schemes or (None,) for d in ("fp32", "uint8" if op.schemes else "bf16")]
    return [c for d, s in pairs if d in op.dtypes for c in load(d, "cpu", s, budget="interpret") if not c.raises]


def drawn(case: Case, seed: int = 3) -> dict[str, Any]:
    return case.make(torch.Generator().manual_seed(seed))


def tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


NUMERIC = [op.id for op in registry.ops() if op.id != "sample"]
OVERWRITTEN = {"comm.dispatch": {"recv_ids", "recv_weights", "recv_source"}}
"""Arguments that are results alone: the op writes every element of them."""


@pytest.mark.parametrize("op_id", NUMERIC)
def test_oracle_equals_second_formulation(op_id: str) -> None:
    """Would go red if an oracle misread its op: another pairing, mask, nibble order, epsilon or head mapping."""
    compared = 0
    for case in small_cases(op_id):
        args = drawn(case)
        expected = second(op_id)(**args)
        for mine, other in zip(
            tensors(oracle(op_id)(**args)), expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            np.testing.assert_allclose(mine.numpy(), other, rtol=1e-9, atol=1e-12, err_msg=case.id)
            compared += mine.numel()
    assert compared > 100, f"only {compared} numbers: give {op_id} more rows in its cases for `interpret`"


def test_sample_oracle_allows_the_exact_answer_and_hardly_more() -> None:
    """Would go red if the acceptable set missed the answer, or were so wide that it accepted anything."""
    rows, allowed = 0, 0
    for case in [c for d in ("fp32", "bf16") for c in probes.load("rapid_llm.verify.cases:sample")(d, "cpu")]:
        if "x32000" in case.id or "flat" in case.id or "beyond" in case.id:
            continue
        args = drawn(case)
        answer = oracle("sample")(**args)
        for i, chosen in enumerate(second("sample")(**args)):
            if chosen == -1:
                assert bool(answer.invalid[i]), case.id
                continue
            assert bool(answer.allowed[i, chosen]), f"{case.id} row {i}: {chosen} is not allowed"
            rows += 1
            allowed += int(answer.allowed[i].sum())
    assert rows > 500
    assert allowed / rows < 1.05


def test_greedy_has_one_answer() -> None:
    """Would go red if slack crept into greedy rows, or ties were broken upwards."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.0, 0.0]])
    off = torch.ones(2)
    answer = oracles.sample(
        logits=logits, temperature=0 * off, top_k=off.int(), top_p=off, min_p=0 * off, uniform=0.5 * off
    )
    assert answer.allowed.tolist() == [[False, True, False, False], [True, False, False, False]]


@pytest.mark.parametrize("op_id", [op.id for op in registry.ops()])
def test_oracle_gives_float64_and_changes_nothing(op_id: str) -> None:
    """Would go red if an oracle worked in fp32 somewhere at its end, or in place."""
    for case in small_cases(op_id):
        args = drawn(case)
        before = {k: v.clone() for k, v in args.items() if isinstance(v, Tensor)}
        result = oracle(op_id)(**args)
        if not isinstance(result, AcceptableIds):
            assert all(t.dtype == torch.float64 for t in tensors(result))
        for name, tensor in before.items():
            assert torch.equal(args[name].double().nan_to_num(), tensor.double().nan_to_num()), (
                f"{case.id}: {name} changed"
            )


def _moved(value: Tensor) -> Tensor:
    """Other values of the same kind, still legal: integers are permuted, floats rescaled."""
    if value.dtype == torch.uint8:
        return value.roll(value.shape[1] // 2, 1) ^ 3
    if not value.dtype.is_floating_point:
        return value.flip(0)
    return (value.float() * 0.7 + 0.05).to(value.dtype)


@pytest.mark.parametrize("op_id", NUMERIC)
def test_result_depends_on_every_argument(op_id: str) -> None:
    """Would go red for a case set in which some argument has no effect: a row that ignored it would pass."""
    op = registry.get_op(op_id)
    insensitive = {a.name for a in op.parsed.tensors} - OVERWRITTEN.get(op_id, set())
    for case in small_cases(op_id):
        args = drawn(case)
        first = tensors(oracle(op_id)(**args))
        for name in [n for n in insensitive if isinstance(args.get(n), Tensor) and args[n].numel()]:
            try:
                other = tensors(oracle(op_id)(**{**args, name: _moved(args[name])}))
            except (IndexError, RuntimeError):  # permuted ids can be illegal: then the argument mattered
                insensitive.discard(name)
                continue
            if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, other, strict=True)):
                insensitive.discard(name)
    assert not insensitive, f"no case of {op_id} depends on {insensitive}"


def test_cases_are_not_degenerate() -> None:
    """Would go red if outputs were constant or tiny against their bounds, so that any row passed."""
    for op_id in NUMERIC:
        op = registry.get_op(op_id)
        telling = 0
        for case in small_cases(op_id):
            args = drawn(case)
            result = oracle(op_id)(**args)
            bounds = probes.load(op.bound)(args, result, ())
            for expected, bound in zip(tensors(result), bounds, strict=True):
                values = expected[torch.isfinite(expected)]
                if values.numel() > 8 and float(values.std()) > 50 * float(bound.median()):
                    telling += 1
        assert telling >= 2, op_id


def test_wrapper_refuses_a_result_that_is_not_float64() -> None:
    """Would go red if the guard around oracles were lost."""

    def half_hearted(*, input: Tensor) -> Tensor:
        return input * 2

    with pytest.raises(OracleError, match="float64"):
        oracles._reference(half_hearted)(input=torch.ones(2))


@pytest.mark.gpu
def test_oracle_refuses_tf32() -> None:
    """Would go red if an oracle could run on CUDA with TF32 switched on."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with pytest.raises(OracleError, match="TF32"):
            oracles.scale(input=torch.ones(2, device="cuda"), factor=1.0)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

"""What a row must do beside being right once; each test is a row that is right and still wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.arguments import check_alias
from rapid_llm.kernels.registry import KernelSpec
from rapid_llm.verify import habits
from rapid_llm.verify.compare import NORM_LIMIT, compare
from rapid_llm.verify.conformance import check_callable
from rapid_llm.verify.plain import kvcache_write, rmsnorm, scale


class Rare:
    """Another last bit at every seventh call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        result = scale(input, factor, out)
        self.calls += 1
        if self.calls % 7 == 0 and result.numel():
            flat = result.view(-1) if result.is_contiguous() else result
            flat[0] = torch.nextafter(flat[0], torch.tensor(0.0)) if flat.dim() == 1 else flat[0]
        return result


def curious(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Adds the first row in an order that the last row's size decides: another last bit, within every bound."""
    result = rmsnorm(input, weight, eps, out)
    if input.dim() == 2 and input.numel() and input.shape[0] > 1 and bool(torch.isfinite(input).all()):
        for _ in range(int(input[-1].abs().sum() * 64) % 7):
            result[0] = torch.nextafter(result[0], torch.zeros_like(result[0]))
    return result


def accumulating(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
    """Takes the larger of the answer and what `out` held, which NaN there would hide."""
    right = scale(input, factor)
    if out is None:
        return right
    if out is input or out.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        return scale(input, factor, out)
    return out.copy_(torch.where(torch.isnan(out), right, torch.maximum(right, out)))


def alone_otherwise(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Another kernel for a single row: another last bit in its first element, within every bound."""
    result = rmsnorm(input, weight, eps, out)
    if input.dim() == 2 and input.numel() and input.shape[0] == 1 and bool(torch.isfinite(result).all()):
        result[0, 0] = torch.nextafter(result[0, 0], result.new_zeros(()))
    return result


def report(op: str, fn: Any, budget: str = "full", dtype: str = "fp32", row: KernelSpec | None = None) -> str:
    found = check_callable(registry.get_op(op), fn, dtype=dtype, budget=budget, row=row)
    return " ".join(str(f) for f in found.failures)


def test_twenty_calls_give_equal_bits() -> None:
    """Catches: a race that shows once in several calls, or split sums joined in the order in which they come."""
    assert "not repeatable" in report("scale", Rare())


def test_neighbours_do_not_matter() -> None:
    """Catches P58: a row whose bits depend on what else is in the batch."""
    assert "neighbours" in report("rmsnorm", curious)


def test_a_row_that_declares_itself_batch_invariant_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a lying declaration, and a check that refuses honest ones: the same row without it, and one that is."""
    monkeypatch.setattr(habits, "REPEATS", 2)
    row = registry.get_row("native/rmsnorm")
    lying = replace(row, batch_invariant=True)
    assert "other bits than one of" in report("rmsnorm", alone_otherwise, row=lying)
    assert "batch" not in report("rmsnorm", alone_otherwise, row=row)
    honest = registry.get_row("native/scale")
    assert honest.batch_invariant
    assert report("scale", scale, row=honest) == ""


def test_an_op_without_a_batch_cannot_be_declared() -> None:
    """Catches: a declaration that nothing tries."""
    row = replace(registry.get_row("native/kvcache.write"), batch_invariant=True)
    assert "has no batch to try it on" in report("kvcache.write", kvcache_write, row=row)


def test_memory_that_holds_a_number_is_poison_too() -> None:
    """Catches: an output that is accumulated into, or joined by a maximum, which NaN in it would hide."""
    assert "value" in report("scale", accumulating, budget="interpret")


def test_a_bias_within_the_bounds_is_seen() -> None:
    """Catches: a store that always errs to one side, by less than each element's bound; a matched-ratio rule."""
    g = torch.Generator().manual_seed(0)
    expected = torch.rand(4, 256, generator=g, dtype=torch.float64) + 1.0
    bound = torch.full_like(expected, 1e-3)
    spread = torch.rand(4, 256, generator=g, dtype=torch.float64)
    good = compare((expected + (2 * spread - 1) * 1e-3).float(), expected, bound + 1e-6)
    assert good.problem is None
    assert 0.5 < good.worst_norm < 0.65
    biased = compare((expected + (0.9 + 0.1 * spread) * 1e-3).float(), expected, bound + 1e-6)
    assert biased.problem is not None
    assert "norm" in biased.problem
    assert biased.worst_norm > NORM_LIMIT


@pytest.mark.parametrize("errors", [63, 0])
def test_few_errors_are_no_bias(errors: int) -> None:
    """Catches: a right row that is refused because the few elements which it rounds are all at their bounds."""
    expected = torch.ones(1, 128, dtype=torch.float64)
    got = expected.clone()
    got[0, :errors] += 1e-3
    assert compare(got.float(), expected, torch.full_like(expected, 1.001e-3)).problem is None


@pytest.mark.gpu
def test_streams_and_graphs() -> None:
    """Catches P51's kin: a launch on a fixed stream, and a call whose capture keeps the values of its first inputs."""
    elsewhere = torch.cuda.Stream()

    def result_of(input: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            return torch.empty_like(input, memory_format=torch.contiguous_format)
        check_alias("scale", out, "input", input)
        return out

    def fixed_stream(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        result = result_of(input, out)
        if not torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(elsewhere):
                result.copy_(input.float() * factor)
            torch.cuda.current_stream().wait_stream(elsewhere)
        return result

    def on_the_host(input: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        host = (input.detach().cpu().float() * factor).to(input.dtype)
        return result_of(input, out).copy_(host)

    op = registry.get_op("scale")
    for fn, what in ((fixed_stream, "other stream"), (on_the_host, "replays")):
        found = check_callable(op, fn, device="cuda", dtype="fp32")
        assert any(f.call == what for f in found.failures), str(found)

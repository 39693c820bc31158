"""`native/fused_moe`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels.ops.moe import fused_moe as module
from rapid_llm.kernels.ops.moe.fused_moe import fused_moe
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def made(tokens: int, experts: int, k: int, device: str = "cpu", hidden: int = 16, inter: int = 12) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(tokens)]).to(torch.int32)
    shapes = ((tokens, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter), (tokens, k))
    return [t.to(device) for t in (*(torch.randn(s, generator=g) for s in shapes), ids)]


def expected(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    result = torch.zeros_like(x, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for factor, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if 0 <= expert < len(gate_up):
                gate, up = (gate_up[expert].double() @ row).chunk(2)
                result[token] += factor * (down[expert].double() @ (gate * torch.special.expit(gate) * up))
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 9, 3), (40, 2, 1), (35, 3, 2)])
def test_blocks_of_experts(device: str, tokens: int, experts: int, k: int) -> None:
    """Catches: a grid with too few blocks, a block that takes its neighbour expert's rows, a tail of rows dropped."""
    args = made(tokens, experts, k, device)
    torch.testing.assert_close(fused_moe(*args).double(), expected(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_more_choices_than_a_program_of_the_sort_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a chunk of choices that forgets how many came before it, or that ends the loop a chunk early."""
    monkeypatch.setattr(module, "_CHUNK", 16)
    args = made(50, 3, 2, device, 8, 4)
    args[4][7] = -1
    torch.testing.assert_close(fused_moe(*args).double(), expected(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_in_turns(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a workspace of several GB for a long prompt, a turn that writes another's tokens."""
    monkeypatch.setattr(module, "_WORKSPACE", 2 * 16 * 5)
    args = made(13, 4, 2, device)
    torch.testing.assert_close(fused_moe(*args).double(), expected(*args), rtol=1e-4, atol=1e-4)


def test_without_triton() -> None:
    """Catches: the path of a GPU without Triton letting an expert that nobody chose reach a token, or reading ids."""
    args = made(6, 4, 2)
    args[1][3], args[4][args[4] == 3] = float("nan"), -1
    torch.testing.assert_close(module._all_experts(*args).double(), expected(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_graph_follows_the_routing() -> None:
    """Catches: a grid, a count or an order of choices read on the host and frozen into the graph."""
    args = made(24, 8, 2, "cuda", 64, 48)
    fused_moe(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused_moe(*args)
    for seed in range(3):
        other = torch.rand(24, 8, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :2]
        args[4].copy_(other if seed else torch.zeros_like(other))
        graph.replay()
        torch.testing.assert_close(result.double(), expected(*args), rtol=1e-3, atol=1e-3)


def test_refusals() -> None:
    """Catches: weights of other sizes or dtypes, and ids that do not belong to the tokens."""
    x, gate_up, down, weights, ids = made(3, 4, 2)
    for args, match in (
        ((x, gate_up[:, :-1], down, weights, ids), r"fused_moe: input must be"),
        ((x[:, :8], gate_up, down[:, :8], weights, ids), r"fused_moe: gate_up takes 16 features, input has 8"),
        ((x, gate_up.half(), down, weights, ids), r"fused_moe: gate_up must have dtype"),
        ((x, gate_up, down, weights[:2], ids), r"fused_moe: topk_weights must be \(3, topk\)"),
        ((x, gate_up, down, weights, ids.float()), r"fused_moe: topk_ids.*float32"),
        ((x, gate_up, down, weights[:, :1], ids), r"fused_moe: topk_weights and topk_ids"),
    ):
        with pytest.raises(RuntimeError, match=match):
            fused_moe(*args)
    with pytest.raises(RuntimeError, match=r"fused_moe: out overlaps input"):
        fused_moe(x, gate_up, down, weights, ids, out=x)

"""What a capture leaves behind, on a GPU."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.graphs import capture

pytestmark = pytest.mark.gpu


def test_a_capture_is_replayed() -> None:
    """Catches: a body that runs outside of the graph, or on another stream than the one given."""
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with capture(graph, side):
        assert torch.cuda.current_stream() == side
        x.add_(1.0)
    assert torch.cuda.current_stream() != side
    torch.cuda.synchronize()
    assert x.tolist() == [0.0] * 4
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1.0] * 4


def test_a_capture_that_fails_leaves_nothing_behind() -> None:
    """Catches: random generators that stay in capture, and the captured stream that stays current."""
    x, side, before = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.current_stream()
    with pytest.raises(RuntimeError), capture(torch.cuda.CUDAGraph(), side):
        x.sum().item()  # the host waits, which no graph can record
    assert torch.cuda.current_stream() == before
    assert torch.randn(64, device="cuda").unique().numel() > 1
    graph = torch.cuda.CUDAGraph()
    with capture(graph, side):
        x.add_(torch.rand(4, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert bool(((x > 1.0) & (x < 2.0)).all())

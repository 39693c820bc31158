"""`native/attention.mla_decode`: what the conformance suite does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels.ops.attention.attention_mla_decode import attention_mla_decode
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.verify.compare import compare
from rapid_llm.verify.latent import attention_mla_decode_bound
from tests.kernels.devices import DEVICES
from tests.reference import oracle

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the row has no kernel of Triton")


def arguments(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "query": torch.randn(2, 3, 24),
        "kv_cache": torch.randn(4, 16, 1, 24),
        "seq_lens": torch.tensor([20, 5], dtype=torch.int32),
        "block_table": torch.tensor([[2, 1], [3, -1]], dtype=torch.int32),
        "scale": 0.3,
        "value_dim": 16,
    }
    return {**values, **changes}


def judged(got: torch.Tensor, args: dict[str, Any]) -> None:
    expected = oracle("attention.mla_decode")(**args)
    (bound,) = attention_mla_decode_bound(args, expected)
    outcome = compare(got, expected, bound)
    assert outcome.problem is None, outcome.problem


@pytest.mark.parametrize("device", DEVICES)
def test_entries_behind_the_last_page_may_be_anything(device: str) -> None:
    """Catches: a padded entry of the block table followed, be it -1 or far outside of the cache."""
    args = arguments(block_table=torch.tensor([[2, 1], [3, 10**6]], dtype=torch.int32))
    placed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    judged(attention_mla_decode(**placed).cpu(), args)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_cache": torch.zeros(4, 16, 2, 24)}, r"\(pages, page_size, 1, head_dim\)"),
        ({"kv_cache": torch.zeros(4, 0, 1, 24)}, "page_size of at least 1"),
        ({"kv_cache": torch.zeros(4, 16, 1, 32)}, "head_dim 24 of query must be that of kv_cache, 32"),
        ({"kv_cache": torch.zeros(4, 16, 1, 24).half()}, "kv_cache must have dtype torch.float32"),
        ({"value_dim": 25}, "value_dim between 1 and it: got 25"),
        ({"value_dim": 0}, "value_dim between 1 and it: got 0"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "for 2 sequences"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be int32"),
        ({"seq_lens": torch.tensor([33, 1], dtype=torch.int32)}, "sequence 0 has 33 keys"),
        ({"block_table": torch.tensor([[2, 4], [3, 0]], dtype=torch.int32)}, "names pages 2 to 4"),
        ({"block_table": torch.tensor([[2, 1], [-1, 0]], dtype=torch.int32)}, "names pages -1 to -1"),
        ({"out": torch.zeros(2, 3, 24)}, "out must have the same shape"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    """Catches: values of another shape read as if they fitted; a page outside of the cache read from elsewhere."""
    with pytest.raises(ArgumentError, match=text):
        attention_mla_decode(**arguments(**changes))


@pytest.mark.gpu
def test_captured_with_lengths_that_grow() -> None:
    """Catches: a length read on the host, which a captured call would keep for ever."""
    args = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments().items()}
    out = torch.empty(2, 3, 16, device="cuda")
    attention_mla_decode(**args, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_mla_decode(**args, out=out)
    args["seq_lens"].copy_(torch.tensor([31, 0], dtype=torch.int32))
    args["query"].mul_(-1)
    graph.replay()
    judged(out.cpu(), {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in args.items()})

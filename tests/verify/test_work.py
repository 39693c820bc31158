"""Bytes and FLOPs against counts by hand."""

from __future__ import annotations

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import probes
from rapid_llm.verify import work
from rapid_llm.verify.work import Work, unique_bytes


def test_expanded_tensors_count_their_storage() -> None:
    """B33: 512 B shown as 2 MB by an expand would make any kernel look fast."""
    row = torch.zeros(1, 128)
    assert unique_bytes(row.expand(4096, 128)) == 512
    assert work.scale(input=row.expand(4096, 128), factor=2.0).read_bytes == 512
    assert unique_bytes(torch.zeros(8, 8)[:, ::2]) == 8 * 4 * 4
    assert unique_bytes(torch.zeros(10).unfold(0, 4, 1)) == 40
    assert unique_bytes(torch.zeros(0, 4)) == 0


@pytest.mark.parametrize(
    ("scheme", "width"), [("q8_0", 34), ("q4_0", 18), ("q4_1", 20), ("int8_channel", 40), ("int4_group32", 24)]
)
def test_quantised_weights_count_their_blocks(scheme: str, width: int) -> None:
    """B33: 4-bit weights are not whole bytes each, and their scales count, with what rows are padded by."""
    weight = torch.zeros(96, 64 // 32 * width, dtype=torch.uint8)
    got = work.linear(input=torch.zeros(2, 64), weight=weight, scheme=scheme)
    assert got == Work(2 * 64 * 4 + 96 * 2 * width, 2 * 96 * 4, 2 * 2 * 64 * 96)


def test_linear_with_bias() -> None:
    x, w, b = torch.zeros(3, 8).bfloat16(), torch.zeros(5, 8).bfloat16(), torch.zeros(5).bfloat16()
    assert work.linear(input=x, weight=w, bias=b) == Work((24 + 40 + 5) * 2, 30, 2 * 3 * 5 * 8 + 15)


def test_attention_counts_what_is_seen() -> None:
    """Would go red if the whole cache, or a dense square of scores, were counted."""
    cache = torch.zeros(100, 16, 2, 32)
    args = {
        "k_cache": cache,
        "v_cache": cache,
        "seq_lens": torch.tensor([20, 0, 5], dtype=torch.int32),
        "block_table": torch.zeros(3, 6, dtype=torch.int32),
        "scale": 1.0,
    }
    decode = work.attention_decode(query=torch.zeros(3, 6, 32), **args)
    assert decode.read_bytes == 3 * 6 * 32 * 4 + 2 * 25 * 2 * 32 * 4 + 3 * 4 + 3 * 4
    assert decode.flops == 25 * 6 * (4 * 32 + 4)
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    prefill = work.attention_prefill(query=torch.zeros(5, 6, 32), cu_seqlens_q=starts, **args)
    assert prefill.flops == (18 + 19 + 20 + 4 + 5) * 6 * (4 * 32 + 4)
    decode = work.attention_decode(query=torch.zeros(3, 6, 32), **args, window=8)
    assert decode.read_bytes == 3 * 6 * 32 * 4 + 2 * (8 + 5) * 2 * 32 * 4 + 3 * 4 + 2 * 4
    prefill = work.attention_prefill(query=torch.zeros(5, 6, 32), cu_seqlens_q=starts, **args, window=8, softcap=2.0)
    assert prefill.flops == (8 + 8 + 8 + 4 + 5) * 6 * (4 * 32 + 7)
    assert prefill.read_bytes == 5 * 6 * 32 * 4 + 2 * (8 + 2 + 5) * 2 * 32 * 4 + (4 + 3) * 4 + 2 * 4


def test_cache_write_counts_kept_tokens() -> None:
    key = torch.zeros(4, 2, 8).half()
    cache = torch.zeros(3, 16, 2, 8).half()
    slots = torch.tensor([5, -1, 9, 3])
    got = work.kvcache_write(key=key, value=key, k_cache=cache, v_cache=cache, slot_mapping=slots)
    assert got == Work(2 * 3 * 16 * 2 + 32, 2 * 3 * 16 * 2, 0)


def test_rope_and_cache_write_reads_a_rotated_key_once() -> None:
    """Would go red if the write counted the key's rotated part again, which is at hand, or forgot the rest of it."""
    query, key, cache = torch.zeros(4, 3, 8).half(), torch.zeros(4, 2, 8).half(), torch.zeros(3, 16, 2, 8).half()
    index = torch.tensor([5, -1, 9, 3])
    args = {"query": query, "key": key, "value": key, "k_cache": cache, "v_cache": cache}
    got = work.rope_kvcache_write(**args, positions=index, cos_sin_cache=torch.zeros(20, 6), slot_mapping=index)
    rotated, rest, value, cached = 4 * 5 * 6 * 2, 3 * 2 * 2 * 2, 3 * 2 * 8 * 2, 2 * 3 * 2 * 8 * 2
    assert got == Work(rotated + rest + value + 4 * 6 * 4 + 2 * 32, rotated + cached, 3 * 4 * 5 * 6)


@pytest.mark.parametrize("op", registry.ops(), ids=lambda op: op.id)
def test_every_op_has_work_for_every_case(op: registry.OpSpec) -> None:
    """Would go red for an op whose work cannot be computed on one of its own cases, or is negative."""
    for scheme in op.schemes or (None,):
        for dtype in op.dtypes:
            for case in probes.load(op.cases)(dtype, "cpu", scheme, budget="interpret"):
                got = probes.load(op.work)(**case.make(torch.Generator().manual_seed(0)))
                assert got.read_bytes >= 0
                assert got.write_bytes >= 0
                assert got.flops >= 0
                assert got.bytes == got.read_bytes + got.write_bytes

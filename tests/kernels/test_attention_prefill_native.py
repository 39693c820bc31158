"""`native/attention.prefill`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.attention import attention_prefill as module
from rapid_llm.kernels.ops.attention._paged import attend_exactly
from rapid_llm.kernels.ops.attention.attention_decode import attention_decode
from rapid_llm.kernels.ops.attention.attention_prefill import attention_prefill
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES
from tests.kernels.paged_attention import Paged, offsets, prefill

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def run(
    query: torch.Tensor, paged: Paged, chunks: list[int], scale: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    cu = offsets(chunks, query.device.type)
    return attention_prefill(query, paged.k_cache, paged.v_cache, cu, paged.seq_lens, paged.block_table, scale, out=out)


def check(query: torch.Tensor, paged: Paged, chunks: list[int], scale: float) -> None:
    result = run(query, paged, chunks, scale, torch.full_like(query, float("nan")))
    torch.testing.assert_close(result.double(), prefill(query, paged, chunks, scale), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "chunks"),
    [
        ([1], [1]),
        ([33], [33]),
        ([40], [7]),
        ([34], [4]),  # the first token sees one key less than a whole block of 32 ...
        ([66], [4]),  # ... or 64
        ([5, 1, 20, 3], [5, 1, 4, 0]),
        ([0, 6, 0], [0, 2, 0]),
        ([3, 4], [5, 4]),  # a chunk longer than its sequence: its first tokens see nothing
        ([2] * 9, [1] * 9),
    ],
)
def test_ragged(device: str, lengths: list[int], chunks: list[int]) -> None:
    """Catches: a tile that finds the wrong sequence, a causal border off by one, a resumed chunk without its prefix."""
    paged = Paged.make(lengths, 2, 24, device=device)
    check(torch.randn(sum(chunks), 6, 24, device=device), paged, chunks, 0.2)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_behind_the_last_chunk_is_zero(device: str) -> None:
    """Catches: tokens that belong to no sequence left as allocated, or given to the last one."""
    paged = Paged.make([4, 2], 1, 8, device=device)
    query = torch.randn(9, 2, 8, device=device)
    check(query, paged, [3, 2], 0.3)
    assert bool((run(query, paged, [3, 2], 0.3)[5:] == 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_equal_the_whole(device: str) -> None:
    """Catches: chunked prefill whose positions or mask differ from prefill in one piece."""
    length = 21
    paged = Paged.make([length], 1, 16, device=device)
    query = torch.randn(length, 3, 16, device=device)
    whole = run(query, paged, [length], 0.25)
    for size in (1, 7, 16):
        for begin in range(0, length, size):
            chunk = query[begin : begin + size]
            paged.seq_lens.fill_(begin + len(chunk))
            part = run(chunk, paged, [len(chunk)], 0.25)
            torch.testing.assert_close(part, whole[begin : begin + size], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_single_tokens_equal_decode(device: str) -> None:
    """Catches: a batch that mixes chunks and single tokens treating the latter otherwise than attention.decode."""
    paged = Paged.make([13, 1, 8], 2, 8, device=device)
    query = torch.randn(3, 4, 8, device=device)
    single = attention_decode(query, paged.k_cache, paged.v_cache, paged.seq_lens, paged.block_table, 0.3)
    torch.testing.assert_close(run(query, paged, [1, 1, 1], 0.3), single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_keep_their_order(device: str) -> None:
    """Catches: a finite mask value: a key that must not be seen outranks keys whose scores are about -1e5."""
    paged = Paged.make([6], 1, 8, device=device)
    paged.k_cache.masked_fill_(~paged.k_cache.isnan(), -1e5 / 8)
    query = torch.ones(6, 1, 8, device=device)
    check(query, paged, [6], 1.0)
    check(query, paged, [6], -1.0)


@pytest.mark.skipif(INTERPRETED, reason="blocks of the CPU path, too large for the interpreter")
@pytest.mark.parametrize(("chunk", "prefix"), [(255, 0), (256, 0), (257, 0), (300, 5), (520, 33)])
def test_blocks_of_queries(chunk: int, prefix: int) -> None:
    """Catches: a block of queries that loses keys at its border, or sees beyond its last token."""
    paged = Paged.make([chunk + prefix], 1, 4, page=16)
    query = torch.randn(chunk, 1, 4)
    check(query, paged, [chunk], 0.5)


@pytest.mark.skipif(INTERPRETED, reason="blocks of the CPU path, too large for the interpreter")
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (200, 0.0), (257, 2.0), (0, 2.0), (10**6, 0.0)])
def test_blocks_of_queries_with_limits(window: int, softcap: float) -> None:
    """Catches: a block of queries after the first whose window begins a key early or late, or that has no cap."""
    paged = Paged.make([300], 1, 4, page=16)
    query = torch.randn(290, 1, 4)
    args = (query, paged.k_cache, paged.v_cache, offsets([290]), paged.seq_lens, paged.block_table, 0.5)
    result = attention_prefill(*args, window, softcap)
    expected = prefill(query, paged, [290], 0.5, window, softcap)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.skipif(INTERPRETED, reason="needs two SDPA calls, not a kernel")
def test_exact_path_equals_fused_path() -> None:
    """Catches: the path of a GPU without Triton masking another triangle, or making NaN of a row that sees nothing."""
    query, keys, values = torch.randn(1, 4, 5, 8), *torch.randn(2, 1, 2, 9, 8)
    fused = module._attend_causal(query, keys, values, 0.3)
    hidden = torch.ones(5, 9, dtype=torch.bool).triu_(5)
    torch.testing.assert_close(attend_exactly(query, keys, values, hidden, 0.3).float(), fused, rtol=1e-5, atol=1e-6)
    assert bool((attend_exactly(query, keys, values, torch.ones_like(hidden), 0.3) == 0).all())


@pytest.mark.skipif(not INTERPRETED, reason="a choice that only the interpreter makes")
def test_loops_by_while_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the two spellings of the key loop drifting apart."""
    paged = Paged.make([70, 3], 1, 16)
    query = torch.randn(12, 2, 16)
    results = []
    for by_while in (False, True):
        monkeypatch.setattr(module, "loops_by_while", lambda by_while=by_while: by_while)
        results.append(run(query, paged, [9, 3], 0.2))
    assert torch.equal(*results)


@pytest.mark.gpu
def test_graph_follows_lengths() -> None:
    """Catches: a grid or a length taken from values on the host and frozen into the graph."""
    paged = Paged.make([40, 30], 2, 64, page=16, device="cuda")
    query = torch.randn(50, 8, 64, device="cuda")
    cu, lens = offsets([20, 30], "cuda"), paged.seq_lens.clone()

    def call() -> torch.Tensor:
        return attention_prefill(query, paged.k_cache, paged.v_cache, cu, lens, paged.block_table, 0.1)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for chunks, lengths in (([20, 30], [40, 30]), ([1, 40], [7, 41 - 12]), ([40, 10], [40, 10])):
        cu.copy_(offsets(chunks, "cuda"))
        paged.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        lens.copy_(paged.seq_lens)
        graph.replay()
        torch.testing.assert_close(result.double(), prefill(query, paged, chunks, 0.1), rtol=1e-5, atol=2e-6)


def test_refusals() -> None:
    """Catches: offsets that do not belong to the batch."""
    paged = Paged.make([3, 2], 1, 8)
    query = torch.randn(4, 2, 8)
    with pytest.raises(RuntimeError, match=r"attention\.prefill.*3 entries"):
        run(query, paged, [4], 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.prefill.*same shape"):
        run(query, paged, [2, 2], 1.0, torch.empty(4, 2, 4))
    for limits, match in (
        ((-1, 0.0), "window is -1"),
        ((0, -2.0), "softcap is -2.0"),
        ((0, float("nan")), "softcap is nan"),
    ):
        with pytest.raises(RuntimeError, match=rf"attention\.prefill: {match}"):
            attention_prefill(query, paged.k_cache, paged.v_cache, offsets([2, 2]), paged.seq_lens, paged.block_table,
                              1.0, *limits)  # fmt: skip
    cu = offsets([2, 2]).float()
    with pytest.raises(RuntimeError, match=r"attention\.prefill.*int32"):
        attention_prefill(query, paged.k_cache, paged.v_cache, cu, paged.seq_lens, paged.block_table, 1.0)


@pytest.mark.skipif(INTERPRETED, reason="a kernel cannot raise")
def test_refusals_by_value() -> None:
    """Catches: offsets beyond the query, and keys beyond the table, where the CPU can see it."""
    paged = Paged.make([3, 2], 1, 8)
    query = torch.randn(4, 2, 8)
    with pytest.raises(RuntimeError, match=r"attention\.prefill.*at most 4"):
        run(query, paged, [3, 2], 1.0)
    paged.seq_lens[1] = 99
    with pytest.raises(RuntimeError, match=r"sequence 1 has 99 keys"):
        run(query, paged, [2, 2], 1.0)

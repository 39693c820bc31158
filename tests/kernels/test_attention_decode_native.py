"""`native/attention.decode`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.attention import attention_decode as module
from rapid_llm.kernels.ops.attention._paged import refuse_limits
from rapid_llm.kernels.ops.attention.attention_decode import attention_decode, split_count
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import explain
from tests.kernels.devices import DEVICES
from tests.kernels.paged_attention import Paged, attend, decode

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def run(query: torch.Tensor, paged: Paged, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
    return attention_decode(query, paged.k_cache, paged.v_cache, paged.seq_lens, paged.block_table, scale, out=out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 15, 64, 65, 300])
def test_one_sequence_is_split(device: str, length: int) -> None:
    """Catches: a split that reads its neighbour's keys, an empty split that enters the sum, a tail dropped."""
    paged = Paged.make([length], 1, 48, device=device)
    query = torch.randn(1, 5, 48, device=device)
    torch.testing.assert_close(run(query, paged, 0.2).double(), decode(query, paged, 0.2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_more_query_heads_than_a_program_takes(device: str) -> None:
    """Catches: a head of a wide group computed twice or not at all (71 heads on one kv head: three programs)."""
    paged = Paged.make([9], 1, 16, device=device)
    query = torch.randn(1, 71, 16, device=device)
    torch.testing.assert_close(run(query, paged, 0.3).double(), decode(query, paged, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_rows_are_zero_and_leave_no_trace(device: str) -> None:
    """Catches: 0/0 in a padded row, a row skipped (its result left as allocated)."""
    paged = Paged.make([0, 7, 0], 2, 8, device=device)
    query = torch.randn(3, 4, 8, device=device)
    result = run(query, paged, 0.3, torch.full_like(query, float("nan")))
    assert bool((result[::2] == 0).all())
    torch.testing.assert_close(result.double(), decode(query, paged, 0.3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_keep_their_order(device: str) -> None:
    """Catches: a finite mask value (-1e4, -5e4) that outranks real scores; logits here are about -1e5."""
    paged = Paged.make([5], 1, 16, device=device)
    query = torch.full((1, 1, 16), 1.0, device=device)
    paged.k_cache.masked_fill_(~paged.k_cache.isnan(), -1e5 / 16)
    page = int(paged.block_table[0, 0])
    paged.k_cache[page, 2] += 100 / 16
    result = run(query, paged, 1.0)
    torch.testing.assert_close(result[0], paged.v_cache[page, 2])


@pytest.mark.parametrize("device", DEVICES)
def test_many_small_weights_beside_a_large_one(device: str) -> None:
    """Catches: fp16 probabilities among the subnormals, each off by up to 3 % and always the same way."""
    length, score = 512, -13.7734375  # its exponential is 17.5 steps of 2**-24
    paged = Paged.make([length], 1, 16, dtype=torch.float16, device=device, page=16)
    paged.k_cache.fill_(0)
    paged.k_cache[..., 0] = score
    paged.v_cache.fill_(60000.0)
    page = int(paged.block_table[0, 0])
    paged.k_cache[page, 0, 0, 0] = 0
    paged.v_cache[page, 0] = 0
    query = torch.zeros(1, 1, 16, dtype=torch.float16, device=device)
    query[..., 0] = 1
    result, expected = run(query, paged, 1.0), decode(query, paged, 1.0)
    torch.testing.assert_close(result.double(), expected, rtol=2**-11, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_scattered_pages_equal_consecutive_ones(device: str) -> None:
    """Catches: the shortcut for consecutive pages taken where they are not, or reading past the sequence."""
    for lengths in ([17], [3, 17, 8]):
        query = torch.randn(len(lengths), 4, 8, device=device)
        results = []
        for scattered in (False, True):
            paged = Paged.make(lengths, 2, 8, device=device)
            other = Paged.make(lengths, 2, 8, scattered=scattered, device=device)
            for i in range(len(lengths)):
                _copy_keys(paged, other, i)
            results.append(run(query, other, 0.35))
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def _copy_keys(source: Paged, target: Paged, sequence: int) -> None:
    page = source.k_cache.shape[1]
    for position in range(int(source.seq_lens[sequence])):
        there = int(source.block_table[sequence, position // page]), position % page
        here = int(target.block_table[sequence, position // page]), position % page
        target.k_cache[here], target.v_cache[here] = source.k_cache[there], source.v_cache[there]


@pytest.mark.parametrize("device", DEVICES)
def test_head_by_head_cache(device: str) -> None:
    """Catches: the order of the cache's dimensions assumed ((pages, heads, rows, dim) in memory, seen permuted)."""
    paged = Paged.make([9, 2], 3, 8, device=device)
    query = torch.randn(2, 3, 8, device=device)
    expected = run(query, paged, 0.5)
    paged.k_cache = paged.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    paged.v_cache = paged.v_cache.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    torch.testing.assert_close(run(query, paged, 0.5), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED, reason="a choice that only the interpreter makes")
def test_loops_by_while_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the two spellings of the key loop drifting apart."""
    paged = Paged.make([70, 3], 1, 16)
    query = torch.randn(2, 2, 16)
    results = []
    for by_while in (False, True):
        monkeypatch.setattr(module, "loops_by_while", lambda by_while=by_while: by_while)
        results.append(run(query, paged, 0.2))
    assert torch.equal(*results)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 2.0), (8, 0.5)])
def test_without_triton(window: int, softcap: float) -> None:
    """Catches: the path of a GPU without Triton following stale table entries, or letting NaN in."""
    paged = Paged.make([0, 7, 12], 2, 8)
    query = torch.randn(3, 4, 8)
    result = module._decode_on_device(
        *(query, paged.k_cache, paged.v_cache, paged.seq_lens, paged.block_table, 0.3, torch.empty_like(query)),
        *(window, softcap),
    )
    expected = decode(query, paged, 0.3, window, softcap)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("programs", "splits"), [(1, 128), (8, 64), (64, 8), (263, 2), (264, 1), (10**6, 1), (0, 128)])
def test_split_count(programs: int, splits: int) -> None:
    """Catches: a GPU half idle at small batches, or more splits than the join takes."""
    assert split_count(programs, 132) == splits


@pytest.mark.gpu
def test_graph_follows_lengths_and_tables() -> None:
    """Catches: a length, page or split read on the host while the graph is captured and frozen into it."""
    before, after = (Paged.make(n, 2, 64, page=16, device="cuda", seed=i) for i, n in enumerate(([40, 3], [35, 48])))
    query = torch.randn(2, 8, 64, device="cuda")
    pages = max(len(before.k_cache), len(after.k_cache))
    live = Paged(*(torch.zeros(pages, *c.shape[1:], device="cuda") for c in (before.k_cache, before.v_cache)),
                 before.block_table.clone(), before.seq_lens.clone())  # fmt: skip
    run(query, live, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(query, live, 0.1)
    for state in (before, after, before):
        live.k_cache[: len(state.k_cache)], live.v_cache[: len(state.v_cache)] = state.k_cache, state.v_cache
        live.block_table.copy_(state.block_table)
        live.seq_lens.copy_(state.seq_lens)
        graph.replay()
        torch.testing.assert_close(result.double(), decode(query, state, 0.1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_do_not_matter(device: str) -> None:
    """Catches: a NaN or a length of one sequence that reaches another."""
    paged = Paged.make([6, 9], 1, 8, device=device)
    query = torch.randn(2, 2, 8, device=device)
    paged.k_cache[int(paged.block_table[0, 0])] = float("nan")
    result = run(query, paged, 0.3)
    assert bool(result[0].isnan().all())
    expected = torch.stack([attend(query[1], *paged.keys(1), 9, 0.3)])
    torch.testing.assert_close(result[1:].double(), expected, rtol=1e-5, atol=1e-6)


def test_refusals() -> None:
    """Catches: arguments that would read the wrong memory or broadcast."""
    paged = Paged.make([3], 2, 8)
    query = torch.randn(1, 4, 8)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*one dtype"):
        run(query.half(), paged, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*head_dim"):
        run(query[..., :4], paged, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*multiple of the kv heads"):
        run(query[:, :3], paged, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode: 2 queries"):
        run(query.repeat(2, 1, 1), paged, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*same shape"):
        attention_decode(query, paged.k_cache, paged.v_cache[1:], paged.seq_lens, paged.block_table, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*int32"):
        attention_decode(query, paged.k_cache, paged.v_cache, paged.seq_lens.float(), paged.block_table, 1.0)
    with pytest.raises(RuntimeError, match=r"attention\.decode.*same shape"):
        run(query, paged, 1.0, torch.empty(2, 4, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_one_window_in_many_splits(device: str) -> None:
    """Catches: splits cut by the sequence's length, not by its window, so that most of them see nothing or too much."""
    paged = Paged.make([300, 7, 0], 1, 16, device=device)
    query = torch.randn(3, 2, 16, device=device)
    caches = paged.k_cache, paged.v_cache
    result = attention_decode(query, *caches, paged.seq_lens, paged.block_table, 0.3, 130, 1.5)
    torch.testing.assert_close(result.double(), decode(query, paged, 0.3, 130, 1.5), rtol=1e-5, atol=1e-6)


def test_rows_without_limits_are_out_and_say_why() -> None:
    """Catches: a window or a cap given to a row that would ignore it, by dispatch or by name; and a caller who states
    facts made to speak of windows."""
    told = explain("attention.decode", device="cpu", dtype="fp32", dims={"window": 8, "softcap": 1})
    (cpp,) = [v for v in told.rows if v.row.name == "cpp/attention.decode"]
    assert {"needs window <= 0, got 8", "needs softcap <= 0, got 1"} <= {r.text for r in cpp.reasons}
    (cpp,) = [v for v in explain("attention.decode", device="cpu", dtype="fp32").rows if v.row.name == cpp.row.name]
    assert not {r.code for r in cpp.reasons} & {"shape", "not_given"}
    with pytest.raises(RuntimeError, match=r"cpp/attention\.decode: has no window and no softcap, got 8"):
        refuse_limits("cpp/attention.decode", 8, 0.0)


@pytest.mark.skipif(INTERPRETED, reason="a kernel cannot raise")
def test_refusals_by_value() -> None:
    """Catches: keys read beyond a block table or outside the cache, where the CPU can see it."""
    paged = Paged.make([3], 2, 8)
    query = torch.randn(1, 4, 8)
    caches = paged.k_cache, paged.v_cache
    with pytest.raises(RuntimeError, match=r"sequence 0 has 9 keys"):
        attention_decode(query, *caches, torch.tensor([9], dtype=torch.int32), paged.block_table[:, :1], 1.0)
    with pytest.raises(RuntimeError, match=r"pages 99 to 99"):
        attention_decode(query, *caches, paged.seq_lens, torch.tensor([[99]], dtype=torch.int32), 1.0)

"""Decode steps of fixed size: padding is nobody's, lengths are data, and what cannot be a graph says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.decode_graphs import NOT_ALL_DECODE, padded_sizes

from .conftest import make_llm
from .mocks import MockDecoder, byte_tokenizer, random_logits

LENGTHS = (5, 17, 31, 40)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + j) % 200 for j in range(length)] for i, length in enumerate(LENGTHS[:count])]


def answers(llm: LLM, count: int) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts(count), GREEDY)]


def test_sizes_hold_every_batch_and_waste_little() -> None:
    """Catches: a batch that no size holds, and one that is mostly padding."""
    for most in (1, 2, 3, 31, 64, 200, 256):
        sizes = padded_sizes(most)
        assert sizes[-1] == most
        for count in range(1, most + 1):
            padded = next(size for size in sizes if size >= count)
            assert padded <= count + max(7, count // 2)


def test_batches_that_shrink_and_grow_get_their_own_tokens() -> None:
    """E78, E79. Catches: padding that writes a live slot (the mock refuses it), and positions, lengths or pages that
    stay from a larger batch."""
    plain, padded = (make_llm(random_logits(), cuda_graphs=mode, max_running=4) for mode in ("off", "padded"))
    for count in (4, 3, 4, 1):
        assert answers(padded, count) == answers(plain, count)
    assert padded.graphs is not None
    assert padded.graphs.steps > 0
    assert padded.graphs.ahead > 0
    assert padded.graphs.captured == []
    assert set(padded.graphs.eager) == {NOT_ALL_DECODE}
    assert plain.graphs is None


def test_a_step_that_runs_ahead_is_dropped_with_its_request() -> None:
    """Catches: a token that was computed behind the end of an answer, and pages that are freed while it is written."""
    first = answers(make_llm(random_logits()), 2)
    llm = make_llm(random_logits(), cuda_graphs="padded", max_running=2)
    stop = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[first[0][3]])
    out = llm.generate(prompts(2), [stop, GREEDY])
    assert list(out[0].outputs[0].token_ids) == first[0][: first[0].index(first[0][3]) + 1]
    assert list(out[1].outputs[0].token_ids) == first[1]
    llm._engine.check()
    assert answers(llm, 2) == first  # over the pages that were freed on the way


def test_a_row_that_is_not_graph_safe_keeps_its_batches_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a graph captured over a row that says that it may not be, and a fall to eager that nobody can see."""
    decoder = MockDecoder(random_logits())
    unsafe = SimpleNamespace(spec=SimpleNamespace(name="other/linear", graph_safe=False))
    monkeypatch.setattr(decoder, "handles", lambda tokens: [unsafe] if tokens > 2 else [], raising=False)
    llm = LLM.from_parts(
        decoder, byte_tokenizer(), threads=1, kv_cache_tokens=2048, cuda_graphs="padded", max_running=4
    )
    assert llm._graphs is not None
    llm._graphs._captures = True  # only what is captured need be safe
    monkeypatch.setattr(llm._graphs, "_first", lambda size, count: llm._graphs._forward(size))
    answers(llm, 3)
    (reason,) = llm.graphs.refused.values()  # type: ignore[union-attr]
    assert "other/linear" in reason
    assert llm.graphs.eager[reason] == 11  # type: ignore[union-attr]
    answers(llm, 1)
    assert llm.graphs.steps == 11  # type: ignore[union-attr]
    assert "other/linear" in str(llm.explain())


def test_an_unknown_mode_is_refused() -> None:
    """Catches: a misspelt option that does nothing."""
    with pytest.raises(ValueError, match=r"cuda_graphs='on' .* auto, off, padded"):
        make_llm(random_logits(), cuda_graphs="on")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_logits_of_the_calls(dtype: str, gpu_llms: Any) -> None:
    """Catches: a kernel that reads a length or a pointer of the batch that was captured."""
    eager, graphed = gpu_llms(dtype)
    for count in (4, 3, 4, 1, 2):
        assert answers(graphed, count) == answers(eager, count)
    assert graphed.graphs.captured == [4, 1, 2]
    assert graphed.graphs.refused == {}
    assert set(graphed.graphs.eager) == {NOT_ALL_DECODE}
    assert graphed.graphs.ahead > 0


@pytest.mark.gpu
def test_a_graph_whose_logits_differ_is_not_used(gpu_llms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: trust in a capture that nobody compared."""
    eager, graphed = gpu_llms("float32")
    graphs, forward = graphed._graphs, graphed._graphs._forward

    def wrong(size: Any) -> torch.Tensor:
        logits = forward(size)
        return logits + 1 if torch.cuda.is_current_stream_capturing() else logits

    monkeypatch.setattr(graphs, "_forward", wrong)
    assert answers(graphed, 2) == answers(eager, 2)
    assert "differ" in graphed.graphs.refused[2]


@pytest.fixture
def gpu_llms() -> Any:
    from rapid_llm.models.decoder import Decoder
    from rapid_llm.models.random_weights import random_weights
    from rapid_llm.models.shapes import shape_config

    def make(dtype: str) -> tuple[LLM, LLM]:
        config, device = shape_config("smollm2-135m"), torch.device("cuda")
        decoder = Decoder(config, random_weights(config, device, getattr(torch, dtype)), device=device, dtype=dtype)
        eager, graphed = (
            LLM.from_parts(decoder, byte_tokenizer(), kv_cache_tokens=2048, max_running=4, cuda_graphs=mode)
            for mode in ("off", "auto")
        )
        return eager, graphed

    return make

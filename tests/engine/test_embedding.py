"""Vectors of prompts: which hidden states are pooled, whatever else is in the pass and however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_llm import LLM
from rapid_llm.engine.embedding import Embedding
from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

from .mocks import MockDecoder, byte_tokenizer, random_logits

PROMPTS = [[5], [1, 2, 3], list(range(40)), [7] * 17, list(range(100, 120))]


class HiddenDecoder(MockDecoder):
    """A token's hidden state tells its id, its position, and what it sees of its sequence."""

    broken: float | None = None

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        super().forward(input_ids, meta, kv)
        rows = [hidden(history) for history in self._histories]
        found = torch.tensor(np.array(rows), dtype=torch.float32)
        if self.broken is not None:
            found[-1, 0] = self.broken
        return found

    def compute_logits(self, hidden_rows: Tensor) -> Tensor:
        rows = [[float(i)] for row in hidden_rows.tolist() for i, h in enumerate(self._histories) if hidden(h) == row]
        return super().compute_logits(torch.tensor(rows))


def hidden(history: list[int]) -> list[float]:
    return [history[-1] + 1.0, float(len(history)), float(sum(history) % 11), -1.0]


def wanted(ids: list[int], pooling: str) -> np.ndarray:
    states = np.array([hidden(ids[: i + 1]) for i in range(len(ids))])
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return pooled / np.linalg.norm(pooled)


def make(**options: int) -> LLM:
    decoder = HiddenDecoder(random_logits())
    return LLM.from_parts(decoder, byte_tokenizer(), **{"threads": 1, "kv_cache_tokens": 1024, **options})


def run(embedding: Embedding) -> int:
    """Work to the end; how many pieces it took."""
    for pieces in range(1, 100):
        if embedding.work(lambda: None):
            return pieces
    raise AssertionError("it does not end")


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("most", [4, 16, 64, 512])
def test_each_vector_is_its_prompts_own(pooling: str, most: int) -> None:
    """Catches: pooling over a neighbour's rows, a chunk left out or counted twice, a mean over chunks' means."""
    llm = make(max_batch_tokens=most, max_running=4)
    embedding = Embedding(llm._engine, PROMPTS, pooling)
    run(embedding)
    for vector, ids in zip(embedding.vectors, PROMPTS, strict=True):
        np.testing.assert_allclose(vector, wanted(ids, pooling), rtol=1e-6)
    llm._engine.check()
    llm._engine.scheduler.check_idle()


def test_it_waits_for_pages_and_leaves_running_requests_alone() -> None:
    """Catches: pages taken from a request that runs, and pages held from one piece to the next."""
    llm = make(kv_cache_tokens=64, max_batch_tokens=64, max_running=4)
    deltas = llm.stream(list(range(30)))
    first = next(deltas)
    embedding = Embedding(llm._engine, [list(range(40)), [3]])
    assert not embedding.work(lambda: None)
    assert llm._engine.scheduler.pool.free_pages == 2
    alone = make(kv_cache_tokens=64).generate(list(range(30)))[0].outputs[0].token_ids
    assert [*first.token_ids, *(token for delta in deltas for token in delta.token_ids)] == alone
    run(embedding)
    np.testing.assert_allclose(embedding.vectors[0], wanted(list(range(40)), "mean"), rtol=1e-6)


def test_beats_come_with_every_pass() -> None:
    """Catches: a long prompt that looks like an engine that hangs."""
    llm, beats = make(max_batch_tokens=4, max_running=4), []
    Embedding(llm._engine, [list(range(10))]).work(lambda: beats.append(1))
    assert len(beats) == 3


def test_what_cannot_be_a_vector_is_told() -> None:
    """Catches: NaN handed on as a number, and pages kept by a pass that failed."""
    llm = make()
    llm._decoder.broken = float("nan")  # type: ignore[attr-defined]
    embedding = Embedding(llm._engine, [[1, 2]])
    run(embedding)
    with pytest.raises(ArithmeticError, match="input 0"):
        _ = embedding.vectors
    llm._decoder.fail_at[1] = RuntimeError("planted")  # type: ignore[attr-defined]
    failing = Embedding(llm._engine, [[1, 2]])
    with pytest.raises(RuntimeError, match="planted"):
        failing.work(lambda: None)
    with pytest.raises(RuntimeError, match="before the work is done"):
        _ = failing.vectors
    llm._engine.scheduler.check_idle()
    with pytest.raises(ValueError, match="kv_cache_tokens"):
        Embedding(llm._engine, [[1] * 2000])
    with pytest.raises(ValueError, match="use one of mean, last"):
        Embedding(llm._engine, [[1]], "max")

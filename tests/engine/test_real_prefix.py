"""Prefixes and guesses with the default model: real rows round, so what is equal, and where, is seen only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams

pytestmark = pytest.mark.model

TEXT = "The quick brown fox jumps over the lazy dog. " * 7
LENGTH = 5
SCORED = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(model_path, device="cpu", threads=1, kv_cache_tokens=2048)


def around(llm: LLM, **options: Any) -> LLM:
    """Another engine around the same weights."""
    return LLM.from_parts(llm._decoder, llm.tokenizer, threads=1, kv_cache_tokens=2048, **options)


def test_deterministic_mode_is_bitwise_the_same_cold_warm_and_in_company(llm: LLM) -> None:
    """E57. Catches a hit or a neighbour that moves a logit: rows round differently for other numbers of tokens."""
    ids = llm.tokenizer.encode(TEXT)
    assert len(ids) > 64
    engine = around(llm, deterministic=True, max_batch_tokens=32, max_running=1)
    (cold,) = around(llm, deterministic=True, max_batch_tokens=32, max_running=1).generate(ids, SCORED)
    engine.generate([ids[:40], [*ids, *ids[:9]]], SCORED)  # leaves what it computed, in part by decode steps
    hits = engine._engine.scheduler.hit_tokens
    warm = engine.generate([ids, ids[:50], ids], SCORED)
    assert engine._engine.scheduler.hit_tokens - hits >= 2 * 64
    assert warm[0].outputs == warm[2].outputs == cold.outputs  # log-probabilities to the last bit


def test_a_warm_prompt_is_answered_as_a_cold_one(llm: LLM) -> None:
    """Catches keys of another position or prompt: beyond rounding, a hit changes nothing."""
    ids = llm.tokenizer.encode(TEXT)
    engine = around(llm)
    (cold,) = engine.generate(ids, SCORED)
    (warm,) = engine.generate(ids, SCORED)
    assert warm.metrics.cached_tokens == (len(ids) - 1) // 16 * 16
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    for a, b in zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        for token in a.keys() & b.keys():
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=0.02)


def test_guesses_change_no_greedy_token(llm: LLM) -> None:
    """Catches a guess that is kept although it is not what the model says."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (plain,) = llm.generate(TEXT, params)
    guessing = around(llm, speculative={"method": "ngram", "num_tokens": 5})
    (got,) = guessing.generate(TEXT, params)
    assert got.outputs == plain.outputs
    totals = guessing._engine.totals
    assert totals.accepted > 8
    assert totals.decode_steps < 14

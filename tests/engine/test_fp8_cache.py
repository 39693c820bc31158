"""An engine whose cache is of fp8: the option reaches it, halves its bytes, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm import LLM
from rapid_llm.engine.options import EngineOptions
from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.random_llm import random_llm
from rapid_llm.models.config import ModelConfig
from tests.engine.test_random_llm import TINY

from .mocks import MockDecoder, byte_tokenizer

PROMPTS = [[(7 * i + 11 * p) % 250 + 3 for i in range(40 + p)] for p in range(3)]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def make(config: ModelConfig = TINY, **options: Any) -> LLM:
    return random_llm(config, device="cpu", dtype="float32", threads=1, max_model_len=128, **options)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, GREEDY)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    """Each prompt by itself, cold, in one chunk."""
    llm = make(kv_cache_dtype="fp8", enable_prefix_caching=False)
    return [answers(llm, [ids])[0] for ids in PROMPTS]


def test_the_cache_takes_a_byte_for_a_number_and_says_so() -> None:
    """Catches: an option that is accepted and does nothing, a cache sized for another dtype, a report that lies."""
    plain, small = make(kv_cache_tokens=256), make(kv_cache_tokens=256, kv_cache_dtype="fp8")
    assert {cache.dtype for layer in small._kv for cache in layer} == {torch.float8_e4m3fn}
    told = [llm.explain().json() for llm in (plain, small)]
    assert told[0]["memory"]["kv_cache"] == 4 * told[1]["memory"]["kv_cache"] == 4 * 256 * 2 * 2 * 2 * 16
    assert told[1]["settings"]["dtype"] == "float32 (activations float32, cache float8_e4m3fn)"
    rows = {entry["op"]: entry["row"] for entry in told[1]["ops"]}
    for op in ("attention.decode", "attention.prefill", "rope_kvcache_write"):
        assert rows[op] == f"native/{op}"


def test_a_cached_prefix_of_fp8_answers_as_a_cold_one(alone: list[tuple[int, ...]]) -> None:
    """Catches: pages of fp8 that are shared before they are whole, or read as another dtype by the second request."""
    llm = make(kv_cache_dtype="fp8", max_batch_tokens=64)
    assert answers(llm) == alone
    before = llm._engine.scheduler.hit_tokens
    assert answers(llm) == alone
    assert llm._engine.scheduler.hit_tokens - before >= 3 * 32


def test_preempted_requests_of_fp8_answer_as_if_they_had_not_been(alone: list[tuple[int, ...]]) -> None:
    """Catches: what a preempted request computes again and stores differently."""
    llm = make(kv_cache_dtype="fp8", kv_cache_tokens=10 * 16, enable_prefix_caching=False)
    assert answers(llm) == alone
    assert llm._engine.scheduler.preemptions > 0


def test_refusals() -> None:
    """Catches: a misspelt dtype taken for auto, and a decoder of one's own that would keep another dtype unseen."""
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp16' is not known; use one of auto, fp8"):
        EngineOptions(kv_cache_dtype="fp16")
    mock = MockDecoder(lambda ids: torch.zeros(1))
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': this decoder was bound for a cache of torch.float32"):
        LLM.from_parts(mock, byte_tokenizer(), kv_cache_dtype="fp8")

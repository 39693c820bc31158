"""Log-probabilities of prompts: whole, right, and equal however the prompt came to be computed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.prompt_logprobs import MAX_LOGITS, score

from .conftest import make_llm
from .mocks import VOCAB, MockConfig, random_logits

BOUND = 2e-5
"""fp32: logits below 16 in magnitude, 260 exponentials added up, one logarithm: (260 + 3 * 16) * 2**-24."""


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def scored(llm: LLM, ids: list[int], top: int, **more: Any) -> list[Any]:
    (output,) = llm.generate(ids, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=top, **more))
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def check(found: list[Any], ids: list[int], top: int) -> None:
    """Against a distribution in fp64."""
    logits_of = random_logits()
    assert len(found) == len(ids)
    assert found[0] is None
    for i, entries in enumerate(found[1:], start=1):
        logits = logits_of(ids[:i]).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-logits)
        assert set(entries) == {ids[i], *order[:top].tolist()}
        for token, entry in entries.items():
            assert abs(entry.logprob - exact[token]) < BOUND
            assert entry.rank == 1 + int((logits > logits[token]).sum())


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
@pytest.mark.parametrize("top", [0, 3])
def test_every_token_but_the_first_is_scored(top: int, budget: int) -> None:
    """E61, E75. Catches rows that are off by one at the edges of chunks, and a last row that predicts the answer."""
    ids = prompt(40)
    llm = make_llm(random_logits(), max_batch_tokens=budget, max_running=1)
    check(scored(llm, ids, top), ids, top)


@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_short_prompts(length: int) -> None:
    """Catches a prompt of one token, which has nothing to score."""
    ids = prompt(length)
    check(scored(make_llm(random_logits()), ids, 1), ids, 1)


def test_twice_with_a_prefix_hit_is_equal() -> None:
    """E61. Catches a hit that leaves the tokens before it without a score."""
    llm, ids = make_llm(random_logits()), prompt(50)
    llm.generate(ids, SamplingParams(max_tokens=1))
    first = scored(llm, ids, 2)
    assert scored(llm, ids, 2) == first
    check(first, ids, 2)
    scheduler = llm._engine.scheduler
    hits = scheduler.hit_tokens
    scored(llm, ids, 2, n=3, seed=1)
    assert scheduler.hit_tokens - hits == 2 * 48  # the first sample scores, the others take what is there


def test_preempted_prompts_are_scored_once_and_whole() -> None:
    """Catches scores that are lost, doubled or shifted where a prompt is computed a second time."""
    llm = make_llm(random_logits(), kv_cache_tokens=96, max_batch_tokens=24, max_running=4)
    prompts = [prompt(30, seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    outputs = llm.generate(prompts, params)
    assert llm._engine.scheduler.preemptions > 0
    for ids, output in zip(prompts, outputs, strict=True):
        check(output.prompt_logprobs or [], ids, 1)


def test_a_prompt_that_is_preempted_halfway_is_scored_on_from_there() -> None:
    """Catches scores of the second time that are taken for those of the tokens behind the first time's."""
    llm = make_llm(random_logits(), kv_cache_tokens=96, max_batch_tokens=2, max_running=2)
    older, scoring = prompt(15, 1), prompt(40, 2)
    params = [
        SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1),
    ]
    seen = []
    preempt = llm._engine.scheduler._preempt
    llm._engine.scheduler._preempt = lambda request: seen.append(request.scored) or preempt(request)  # type: ignore[method-assign]
    outputs = llm.generate([older, scoring], params)
    assert len(seen) == 1
    assert 1 < seen[0] < 40
    check(outputs[1].prompt_logprobs or [], scoring, 1)


def test_scores_beside_requests_that_want_none() -> None:
    """Catches rows of a neighbour's prompt, and scores for everybody."""
    llm = make_llm(random_logits())
    prompts = [prompt(20, seed) for seed in range(3)]
    params = [SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=wanted) for wanted in (None, 0, None)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_logprobs is None for o in outputs] == [True, False, True]
    check(outputs[1].prompt_logprobs or [], prompts[1], 0)


def test_padding_of_the_vocabulary_has_no_probability() -> None:
    """Catches a softmax over rows of the table that are no tokens: the mock gives them the highest logits of all."""
    ids = prompt(20)
    check(scored(make_llm(random_logits(), MockConfig(vocab_size=VOCAB + 7)), ids, 2), ids, 2)


def test_few_logits_exist_at_a_time() -> None:
    """E50. Catches the logits of a whole prompt at once: 62 GiB for a long one and a large vocabulary."""
    vocab, rows = 1 << 16, 130
    seen = []

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden.expand(len(hidden), vocab)

    found = score(logits_of, torch.zeros(rows, 1), list(range(rows)), top=0, vocab_size=vocab)
    assert sum(seen) == len(found) == rows
    assert max(seen) * vocab <= MAX_LOGITS
    assert [entries[0].token for entries in found] == list(range(rows))
    assert all(abs(entries[0].logprob + 16 * np.log(2)) < 1e-4 for entries in found)


def test_tokens_of_equal_probability_share_the_better_rank() -> None:
    """Catches a rank that counts equals, or that comes from the place in a list."""
    found = score(lambda h: torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.zeros(1, 1), [2], top=2, vocab_size=4)
    assert found[0][0].rank == 1

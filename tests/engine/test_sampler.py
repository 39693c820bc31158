"""Sampling: whose random numbers, which logits, and what is reported of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rapid_llm import SamplingParams
from rapid_llm.engine.job import BAD_LOGITS
from rapid_llm.engine.penalties import LogitEdits
from rapid_llm.engine.request import Request
from rapid_llm.engine.sampler import Sampler, mix, request_key, uniform

from .conftest import make_llm
from .mocks import VOCAB, random_logits

GOLDEN = 0x9E3779B97F4A7C15


def test_mix_is_splitmix64() -> None:
    """Catches a wrong constant or shift: the published stream of seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix(1234567 + (i + 1) * GOLDEN) for i in range(5)] == known


def test_uniforms_are_uniform_and_unrelated() -> None:
    """Catches draws outside [0, 1), a lumpy distribution, and samples or positions that move together."""
    draws = np.array([[uniform(request_key(5, n), i) for i in range(4000)] for n in range(3)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert np.float32(draws.max()) < 1.0
    counts = np.stack([np.histogram(row, bins=50, range=(0, 1))[0] for row in draws])
    chi_square = ((counts - 80) ** 2 / 80).sum(axis=1)
    assert (chi_square < 95).all()  # 49 degrees of freedom: P = 1e-4
    assert abs(np.corrcoef(draws) - np.eye(3)).max() < 0.06
    assert abs(np.corrcoef(draws[0, 1:], draws[0, :-1])[0, 1]) < 0.06
    near = {request_key(*path) for path in [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    assert len(near) == 7


def request(params: SamplingParams, key: int = 1, output: Sequence[int] = ()) -> Request:
    stops = frozenset(params.stop_ids)
    edits = LogitEdits.of(params, [0], stops, 2**20)
    return Request("r", 0, 1, [0, *output], params, key=key, max_len=100, stop_ids=stops, edits=edits)


def test_draws_follow_the_distribution() -> None:
    """Catches a bias between uniform numbers and tokens: 3,000 draws against the softmax they come from."""
    rows, vocab = 3000, 8
    sampler = Sampler(vocab, torch.device("cpu"), rows)
    logits = torch.linspace(-2, 1, vocab)
    params = SamplingParams(temperature=0.8)
    requests = [request(params, key=request_key(3, i)) for i in range(rows)]
    tokens = [c.token for c in sampler(logits.expand(rows, vocab).clone(), requests)]
    expected = torch.softmax(logits.double() / 0.8, 0).numpy() * rows
    counts = np.bincount(tokens, minlength=vocab)
    assert ((counts - expected) ** 2 / expected).sum() < 30  # 7 degrees of freedom: P = 1e-4


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    """E41, E42, E43. Catches parameters that reach a neighbour, top_k 0 or 10**6 as anything but off, top_p 0 as 1."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=10**6),
        SamplingParams(top_k=0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.0),
        SamplingParams(temperature=1e-6),
    ]
    sampler = Sampler(50, torch.device("cpu"), 6)
    tokens = [c.token for c in sampler(logits.clone(), [request(p) for p in params])]
    alone = [sampler(logits[i : i + 1].clone(), [request(p)])[0].token for i, p in enumerate(params)]
    assert tokens == alone
    best = logits.argmax(1).tolist()
    assert [tokens[i] for i in (0, 3, 4, 5)] == [best[i] for i in (0, 3, 4, 5)]
    off = sampler(logits[1:3].clone(), [request(SamplingParams())] * 2)
    assert [c.token for c in off] == tokens[1:3]


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    """Catches ties that depend on the row or on the vocabulary's layout (top_p 0 keeps ties, and must not draw)."""
    logits = torch.zeros(2, 9)
    logits[:, [3, 5, 8]] = 2.0
    both = [SamplingParams(temperature=0), SamplingParams(top_p=0.0)]
    assert [c.token for c in Sampler(9, torch.device("cpu"), 2)(logits, [request(p) for p in both])] == [3, 3]


def test_logprobs_are_the_models_own() -> None:
    """E59. Catches logprobs after temperature, filters or masks, wrong ranks, and rows mixed up."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 40, generator=generator) * 3
    params = [
        SamplingParams(logprobs=3, top_p=0.1, temperature=5.0),
        SamplingParams(),
        SamplingParams(logprobs=0, temperature=0),
        SamplingParams(logprobs=5, min_tokens=1, stop_token_ids=[int(logits[3].argmax())]),
    ]
    choices = Sampler(36, torch.device("cpu"), 4)(logits.clone(), [request(p) for p in params])
    raw = torch.log_softmax(logits[:, :36].double(), 1)
    assert choices[1].logprobs is None
    for row, k in ((0, 3), (2, 0), (3, 5)):
        entries = choices[row].logprobs
        assert entries is not None
        assert entries[0].token == choices[row].token
        order = raw[row].argsort(descending=True).tolist()
        assert [e.token for e in entries[1:]] == [t for t in order[:k] if t != choices[row].token]
        for entry in entries:
            assert entry.logprob == pytest.approx(float(raw[row, entry.token]), abs=1e-5)
            assert entry.rank == order.index(entry.token) + 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_unusable_logits_end_their_request_alone(value: float, logprobs: int | None) -> None:
    """E58. Catches token 0 for ever, and a neighbour that is stopped or changed."""
    good = random_logits()

    def logits_of(history: Sequence[int]) -> np.ndarray:
        logits = np.array(good(history))
        if history[0] == 66 and len(history) == 4:
            logits[:] = value
            if value > 0:
                logits[:-1] = 0.0
        return logits

    llm = make_llm(logits_of)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, logprobs=logprobs)
    first, bad, last = (o.outputs[0] for o in llm.generate([[65], [66], [67]], params))
    assert (bad.finish_reason, bad.stop_reason, len(bad.token_ids)) == ("error", BAD_LOGITS, 3)
    if logprobs is not None:
        assert len(bad.logprobs) == 3
    clean = make_llm(good)
    for prompt, output in ([65], first), ([67], last):
        assert output.token_ids == clean.generate(prompt, params)[0].outputs[0].token_ids
        assert output.finish_reason == "length"
    assert list(llm.stream([66], params))[-1].finish_reason == "error"


def test_logprobs_carry_the_tokens_text() -> None:
    """Catches logprobs without text, and control tokens without a name."""
    llm = make_llm(random_logits())
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4, logprobs=4, ignore_eos=True))
    for token, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
        best = max(entry.values(), key=lambda found: found.logprob)
        assert entry[token] == best
        assert best.rank == 1
        assert all(found.decoded_token for found in entry.values())
        assert all(0 <= other < VOCAB for other in entry)

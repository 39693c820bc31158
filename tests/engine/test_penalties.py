"""Penalties, biases and early stops: what they count, what they change, and that they stay with their own request."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.job import BAD_LOGITS
from rapid_llm.engine.params import ParameterError
from rapid_llm.engine.penalties import LogitEditor, LogitEdits
from rapid_llm.engine.request import Request
from rapid_llm.engine.sampler import Sampler

from .conftest import make_llm
from .mocks import EOS, VOCAB, LogitsOf, random_logits

HALF_ULP = 2.0**-24
A, B, C = 65, 66, 67


def fixed(values: dict[int, float]) -> LogitsOf:
    """The same logits at every position: these, and -9 for every other token."""
    logits = np.full(VOCAB, -9.0, dtype=np.float32)
    logits[list(values)] = list(values.values())
    return lambda history: logits


def said(llm: LLM, prompt: list[int], **params: Any) -> list[int]:
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params}
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0].token_ids


def oracle(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stops: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """(logits after all edits, their error bound), in float64 over the whole vocabulary.

    The fp32 result has one rounding in the penalty, one in the quotient or product, one in the addend, one in the sum.
    """
    x = logits.astype(np.float64)
    occurs = np.zeros(len(x))
    for token, count in Counter(output).items():
        occurs[token] = count
    repeated = occurs > 0
    repeated[list(prompt)] = True
    scaled = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    x = np.where(repeated, scaled, x)
    addend = -params.presence_penalty * (occurs > 0) - params.frequency_penalty * occurs
    for token, bias in params.biases:
        addend[token] += bias
    after = x + addend
    bound = 1.01 * HALF_ULP * (2 * np.abs(x) + np.abs(addend) + np.abs(after))
    if len(output) < params.min_tokens:
        after[list(stops)] = -np.inf
        bound[list(stops)] = 0.0
    return after, bound


def test_edits_equal_the_formulas_over_the_whole_vocabulary() -> None:
    """E53. Catches a wrong formula, count, sign or order, a token that is missed as lists grow, rows that are mixed up.

    Twelve requests of every kind at once, over outputs long enough that each list grows several times.
    """
    rng, vocab = random.Random(3), 700
    generator = np.random.default_rng(3)
    editor = LogitEditor(torch.device("cpu"))
    requests = []
    for i in range(12):
        params = SamplingParams(
            repetition_penalty=[1.0, 1.3, 0.5][i % 3],
            presence_penalty=[0.0, 1.5, -2.0, 0.7][i % 4],
            frequency_penalty=[0.0, 0.3, 2.0, -0.25][i // 3],
            logit_bias={rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(i)},
            min_tokens=5 * (i % 2),
            max_tokens=None,
        )
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 90))]
        stops = rng.sample(range(vocab), 3)
        edits = LogitEdits.of(params, prompt, stops, vocab)
        assert edits is None or i > 0
        requests.append((params, prompt, stops, edits, [*prompt]))
    lengths = 0
    for _ in range(8):
        logits = (generator.standard_normal((12, vocab + 4)) * 20).astype(np.float32)
        changed = torch.from_numpy(logits.copy())[:, :vocab]
        editor(changed, [(row, r[3]) for row, r in enumerate(requests) if r[3] is not None])
        for row, (params, prompt, stops, edits, ids) in enumerate(requests):
            want, bound = oracle(logits[row, :vocab], params, prompt, ids[len(prompt) :], stops)
            with np.errstate(invalid="ignore"):
                error = np.nan_to_num(np.abs(changed[row].double().numpy() - want))  # -inf against -inf
            assert (error <= bound).all(), (row, error.max())
            ids += [rng.randrange(vocab) for _ in range(rng.randint(1, 60))]
            if edits is not None:
                edits.count(ids)
                lengths = max(lengths, len(edits))
    assert lengths > 256


def test_repetition_counts_prompt_and_output_the_others_output_only() -> None:
    """E53, by hand. Catches a prompt left out of the first or counted by the others."""
    llm = make_llm(fixed({A: 3.0, B: 2.0}))
    assert said(llm, [A]) == [A, A, A, A]
    assert said(llm, [A], repetition_penalty=2.0) == [B, A, A, A]  # A 1.5 from the prompt, then B 1.0
    assert said(llm, [C], repetition_penalty=2.0) == [A, B, A, A]
    assert said(llm, [A], presence_penalty=1.5) == [A, B, A, A]  # the prompt's A costs nothing; each once
    assert said(llm, [A], frequency_penalty=0.75) == [A, A, B, A]  # 3, 2.25, 1.5 < 2, then B 1.25
    assert said(llm, [C], presence_penalty=-1.0, frequency_penalty=1.75) == [A, A, B, B]  # 3; 2.25; A 0.5, B 2; 1.25


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    """Catches a division alone, which makes a repeated token of negative logit more probable."""
    llm = make_llm(fixed({A: -2.0, B: -3.0}))
    assert said(llm, [A], repetition_penalty=2.0, max_tokens=1) == [B]
    assert said(llm, [B], repetition_penalty=0.5, max_tokens=1) == [B]


def test_frequency_penalty_changes_the_argmax() -> None:
    """E45. Catches a penalty that is accepted and has no effect."""
    llm = make_llm(fixed({A: 3.0, B: 2.0, C: 1.5}))
    assert said(llm, [1], frequency_penalty=2.0) == [A, B, C, A]
    assert said(llm, [1], frequency_penalty=0.0) == [A] * 4


def test_logit_bias_bans_and_forces() -> None:
    """Catches a bias on the wrong token or of the wrong sign, and one that reaches the reported log-probabilities."""
    llm = make_llm(fixed({A: 3.0, B: 2.0, C: 1.0}))
    assert said(llm, [1], logit_bias={A: -100}) == [B] * 4
    assert said(llm, [1], logit_bias={str(C): 100, A: -5.5}) == [C] * 4
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, logit_bias={C: 100})
    (entry,) = llm.generate([1], params)[0].outputs[0].logprobs
    plain = SamplingParams(temperature=0, max_tokens=1, logprobs=3)
    (raw,) = llm.generate([1], plain)[0].outputs[0].logprobs
    assert entry == {token: raw[token] for token in (C, A)}


def test_ids_outside_the_vocabulary_are_refused_and_the_neighbour_is_untouched() -> None:
    """E51. Catches an id that would write into another request's row."""
    llm = make_llm(random_logits())
    alone = said(llm, [B], seed=1, temperature=1)
    for bias in ({10**7: 1.0}, {VOCAB: 1.0}):
        with pytest.raises(ParameterError, match=rf"logit_bias={next(iter(bias))} .* from 0 to {VOCAB - 1}"):
            llm.generate([[A], [B]], [SamplingParams(logit_bias=bias), SamplingParams(seed=1)])
    with pytest.raises(ParameterError, match="logit_bias"):
        SamplingParams(logit_bias={-1: 1.0})
    params = SamplingParams(max_tokens=4, logit_bias={VOCAB - 1: 5.0}, stop_token_ids=[VOCAB - 1])
    both = llm.generate([[A], [B]], [params, SamplingParams(seed=1, temperature=1, max_tokens=4, ignore_eos=True)])
    assert both[1].outputs[0].token_ids == alone


def shaped(i: int) -> SamplingParams:
    """Eight ways to ask, of which some leave the logits alone."""
    ways: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.5, "temperature": 0},
        {"logit_bias": {A: 8.0, B: -100.0}},
        {"temperature": 0},
        {"presence_penalty": 2.0, "min_tokens": 9, "ignore_eos": False},
        {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "top_k": 20},
        {"min_tokens": 10, "stop_token_ids": list(range(0, 250, 2))},
    ]
    return SamplingParams(**{"max_tokens": 14, "seed": 7, "ignore_eos": True, **ways[i]})


def test_a_request_alone_is_what_it_is_in_a_batch_of_eight() -> None:
    """E54, E55. Catches a penalty or a seed that reaches a neighbour, in any order of the batch."""
    llm = make_llm(random_logits(likely=[EOS, A, B]), kv_cache_tokens=4096)
    prompts = [[A + i, B, A + i] * (i + 1) for i in range(8)]
    alone = [llm.generate(p, shaped(i))[0].outputs[0].token_ids for i, p in enumerate(prompts)]
    for order in (list(range(8)), [5, 2, 7, 0, 6, 1, 4, 3]):
        outputs = llm.generate([prompts[i] for i in order], [shaped(i) for i in order])
        assert [o.outputs[0].token_ids for o in outputs] == [alone[i] for i in order]
    plain = [llm.generate(p, SamplingParams(seed=7, max_tokens=14, ignore_eos=True))[0] for p in prompts]
    assert all(alone[i] != plain[i].outputs[0].token_ids for i in (1, 3, 6, 7))  # or the test could not fail


def test_samples_of_a_prompt_count_their_own_output() -> None:
    """Catches counts that the `n` samples share."""
    params = SamplingParams(n=3, seed=2, max_tokens=12, ignore_eos=True, frequency_penalty=2.0, repetition_penalty=1.5)
    logits = random_logits(likely=[A, B], lift=9.0)
    outputs = make_llm(logits).generate([C], params)[0].outputs
    apart = make_llm(logits, max_running=1).generate([C], params)[0].outputs
    assert [o.token_ids for o in outputs] == [o.token_ids for o in apart]
    assert len({tuple(o.token_ids) for o in outputs}) == 3


def test_penalties_survive_preemption() -> None:
    """Catches output counted twice, or forgotten, when a request computes its tokens again."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, frequency_penalty=1.0, logit_bias={A: 6.0})
    logits = random_logits(likely=[A, B], lift=6.0)
    prompts = [[A] * 20, [B] * 20, [C] * 20]
    small = make_llm(logits, kv_cache_tokens=112)
    outputs = small.generate(prompts, params)
    assert sum(o.metrics.preemptions for o in outputs) > 0
    large = make_llm(logits)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == large.generate(prompt, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_forbidden_still_shows_a_broken_model(value: float) -> None:
    """E58. Catches a mask written over NaN or +inf: the request would go on with numbers that mean nothing."""
    logits = fixed({A: 3.0, EOS: value})
    for params in ({"min_tokens": 2}, {"min_tokens": 2, "repetition_penalty": 2.0}):
        output = make_llm(logits).generate([EOS], SamplingParams(**params))[0].outputs[0]
        assert (output.finish_reason, output.stop_reason, output.token_ids) == ("error", BAD_LOGITS, [])


def test_penalties_that_are_off_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an engine that makes lists, or touches logits, for requests that ask for no change."""
    monkeypatch.setattr(LogitEdits, "__init__", lambda *_: pytest.fail("a list was made"))
    monkeypatch.setattr(LogitEditor, "__call__", lambda *_: pytest.fail("logits were edited"))
    llm = make_llm(random_logits())
    assert len(said(llm, [A], repetition_penalty=1, presence_penalty=-0.0, logit_bias={})) == 4
    with pytest.raises(pytest.fail.Exception, match="a list was made"):
        said(llm, [A], frequency_penalty=0.1)


def test_padding_and_prompt_ids_beyond_the_model_are_left_alone() -> None:
    """Catches an edit that writes behind the vocabulary: a tokenizer may have more ids than the model has rows."""
    vocab = 40
    params = SamplingParams(repetition_penalty=2.0, min_tokens=1)
    prompt, stops = [3, 45], frozenset({5, 41})
    edits = LogitEdits.of(params, prompt, stops, vocab)
    request = Request("r", 0, 2, prompt, params, key=1, max_len=9, stop_ids=stops, edits=edits)
    logits = torch.zeros(2, 48)
    logits[:, 5] = 9.0
    other = Request("s", 0, 1, [0], SamplingParams(temperature=0), key=1, max_len=9)
    Sampler(vocab, torch.device("cpu"), 2)(logits, [request, other])
    assert logits[0, 5] == -torch.inf
    assert logits[1].tolist() == [9.0 if i == 5 else 0.0 for i in range(48)]
    assert logits[0, 40:].abs().sum() == 0


@pytest.mark.gpu
def test_edits_on_a_gpu_are_those_of_the_cpu() -> None:
    """Catches an upload that is read before it is there, and a buffer that is written again too early."""
    vocab, rows = 32_000, 8
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=3)
    editors = [LogitEditor(torch.device(device)) for device in ("cpu", "cuda")]
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        ids = [torch.randint(vocab, (50 + 400 * step,), generator=generator).tolist() for _ in range(rows)]
        edits = [LogitEdits(params, prompt, [1, 2], vocab) for prompt in ids]
        for own, prompt in zip(edits, ids, strict=True):
            own.count([*prompt, *prompt[:20]])
        logits = torch.randn(rows, vocab, generator=generator) * 10
        results = [logits.clone(), logits.cuda()]
        for editor, result in zip(editors, results, strict=True):
            editor(result, list(enumerate(edits)))
        assert torch.equal(results[0], results[1].cpu())

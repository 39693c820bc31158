"""Guesses: where they come from, and that they decide when tokens come but never which."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.kv_pool import KVPool
from rapid_llm.engine.options import EngineOptions
from rapid_llm.engine.request import Request
from rapid_llm.engine.scheduler import Scheduler
from rapid_llm.engine.speculation import NgramDrafter, Speculation
from rapid_llm.engine.warmup import steps

from .conftest import make_llm
from .mocks import EOS, VOCAB, random_logits
from .scenarios import repeating_logits

NGRAM = {"method": "ngram", "num_tokens": 4, "min_ngram": 1, "max_ngram": 3}


def request(ids: Sequence[int], max_len: int = 1000) -> Request:
    return Request("r", 0, len(ids), list(ids), SamplingParams(), key=0, max_len=max_len)


def propose(ids: Sequence[int], most: int = 99, **how: Any) -> tuple[int, ...]:
    return NgramDrafter(Speculation(**{**NGRAM, **how})).propose(request(ids), most)


def obvious(ids: Sequence[int], count: int, low: int, high: int) -> tuple[int, ...]:
    """The same by trying every place, one token at a time."""
    for size in range(high, low - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if list(ids[start : start + size]) == list(ids[-size:]):
                history = list(ids)
                period = len(ids) - (start + size)
                for _ in range(count):
                    history.append(history[-period])
                return tuple(history[len(ids) :])
    return ()


def cycle(*period: int) -> Any:
    """A model that says the same over and over, whatever it was asked; the next token is the only likely one."""

    def logits_of(history: Sequence[int]) -> np.ndarray:
        logits = np.zeros(VOCAB, dtype=np.float32)
        logits[period[len(history) % len(period)]] = 20
        return logits

    return logits_of


@pytest.mark.parametrize("spread", [2, 4, 300, 70_000])
def test_the_longest_and_latest_match_is_continued(spread: int) -> None:
    """Catches an older or shorter match, the end taken for its own match, and bytes that match across two ids."""
    rng = random.Random(spread)
    for _ in range(150):
        ids = [rng.randrange(spread) for _ in range(rng.randint(1, 30))]
        low, high, count = rng.randint(1, 2), rng.randint(2, 4), rng.randint(1, 6)
        found = propose(ids, num_tokens=count, min_ngram=low, max_ngram=high)
        assert found == obvious(ids, count, low, high), ids


def test_bytes_that_match_across_two_ids_are_no_match() -> None:
    """Catches a search of bytes that takes the middle of one id and of the next for an id."""
    assert propose([256, 256, 256, 1, 1], min_ngram=2) == ()
    assert propose([1, 256, 9, 256, 1]) == (256, 9, 256, 1)


def test_guesses_follow_a_growing_history() -> None:
    """Catches a copy of the history that is not kept up with what was generated."""
    drafter, r = NgramDrafter(Speculation(**NGRAM)), request([5, 6, 7])
    assert drafter.propose(r, 4) == ()
    r.ids += [5]
    assert drafter.propose(r, 2) == (6, 7)
    r.ids += [6, 8, 6]
    assert drafter.propose(r, 4) == (8, 6, 8, 6)
    assert drafter.propose(r, 0) == ()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"method": "eagle"}, "method='eagle' is not known; use ngram"),
        ({"num_tokens": 3}, "needs a method; known: ngram"),
        ({"method": "ngram", "num_tokens": 0}, "num_tokens=0: use an integer from 1 to 32"),
        ({"method": "ngram", "num_tokens": True}, "num_tokens=True"),
        ({"method": "ngram", "min_ngram": 3, "max_ngram": 2}, "min_ngram=3 exceeds max_ngram=2"),
        ({"method": "ngram", "tokens": 3}, "no 'tokens'; known: method, num_tokens, max_ngram, min_ngram"),
        ("ngram", "speculative='ngram': use a mapping"),
    ],
)
def test_bad_settings_are_refused(given: Any, text: str) -> None:
    """Catches a setting that is accepted and ignored."""
    with pytest.raises(ValueError, match=text):
        EngineOptions(speculative=given)


def test_right_guesses_save_steps_and_are_counted() -> None:
    """Catches guesses that are never made, never kept, or counted wrongly."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain, guessing = make_llm(cycle(1, 2, 3)), make_llm(cycle(1, 2, 3), speculative=NGRAM)
    with guessing.stats() as stats:
        (output,) = guessing.generate([9, 8], params)
    assert output.outputs[0].token_ids == plain.generate([9, 8], params)[0].outputs[0].token_ids
    totals = guessing._engine.totals
    assert plain._engine.totals.decode_steps == 59
    assert totals.decode_steps < 20
    assert totals.decode_tokens == 59
    assert totals.guessed == totals.accepted == 59 - totals.decode_steps
    report = stats.report(read_bandwidth=(1e9, "given"))
    assert (report.guessed, report.accepted) == (totals.guessed, totals.accepted)
    assert f"{totals.accepted} of {totals.guessed} tokens right" in str(report)
    assert "NgramDrafter" not in str(guessing.explain())
    assert "num_tokens=4" in str(guessing.explain())


def test_wrong_guesses_cost_no_token() -> None:
    """Catches a guess that is kept although the model says another token, and keys of a wrong one that stay behind."""
    llm = make_llm(random_logits(), speculative=NGRAM)
    prompt = [7, 8] * 10
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == plain(random_logits(), prompt, params)
    totals = llm._engine.totals
    assert totals.guessed > totals.accepted
    llm._engine.check()


def plain(logits_of: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    return make_llm(logits_of).generate(prompt, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_the_answer_is_never_longer_than_asked_for(max_tokens: int) -> None:
    """Catches guesses beyond max_tokens or the context: pages that a full pool does not have, tokens too many."""
    llm = make_llm(cycle(1, 2), speculative={**NGRAM, "num_tokens": 6}, kv_cache_tokens=16)
    prompt = [1, 2] * 4
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (max_tokens, "length")
    llm._engine.check()


@pytest.mark.parametrize(
    "end",
    [{"stop_token_ids": [4]}, {"stop": "\x03\x04"}, {"stop": "\x05", "include_stop_str_in_output": True}, {}],
    ids=["id", "string", "kept", "eos"],
)
def test_what_ends_an_answer_ends_it_among_guesses(end: dict[str, Any]) -> None:
    """Catches text or log-probabilities of guesses behind the end of an answer."""
    logits_of = cycle(1, 2, 3, 4, 5, EOS) if not end else cycle(1, 2, 3, 4, 5)
    prompt = [1, 2, 3, 4, 5, EOS, 1, 2] if not end else [1, 2, 3, 4, 5, 1, 2]
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=1, **end)
    llm = make_llm(logits_of, speculative=NGRAM)
    (got,), (want,) = llm.generate(prompt, params), make_llm(logits_of).generate(prompt, params)
    assert got.outputs == want.outputs
    assert len(got.outputs[0].logprobs or ()) == len(got.outputs[0].token_ids)
    assert llm._engine.totals.accepted > 0
    assert [t for d in llm.stream(prompt, params) for t in d.token_ids] == want.outputs[0].token_ids


def test_sampled_answers_are_the_same_too() -> None:
    """Catches random numbers that depend on how many tokens a step gives."""
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=40, logprobs=2) for seed in range(4)]
    prompts = [[3, 4, 5] * 3 for _ in params]
    llm = make_llm(repeating_logits, speculative=NGRAM)
    got = [o.outputs for o in llm.generate(prompts, params)]
    assert got == [o.outputs for o in make_llm(repeating_logits).generate(prompts, params)]
    assert llm._engine.totals.accepted > 0


@pytest.mark.parametrize("edit", [{"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"min_tokens": 5}])
def test_edited_logits_are_not_guessed_at(edit: dict[str, Any]) -> None:
    """Catches a penalty that is applied to a guess as if the guesses before it had not been there."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **edit)
    llm, prompt = make_llm(repeating_logits, speculative=NGRAM), [3, 4, 5] * 3
    assert llm.generate(prompt, params)[0].outputs == make_llm(repeating_logits).generate(prompt, params)[0].outputs
    assert llm._engine.totals.guessed == 0


def guessing_step(s: Scheduler) -> list[tuple[str, int, int]]:
    """(request, tokens, guesses among them) of a step in which every guess is wrong and 1 is the next token."""
    chunks = s.schedule()
    for chunk in chunks:
        assert chunk.request.num_computed + chunk.size <= len(chunk.request.pages.ids) * s.pool.page_size
        s.commit(chunk, 1 if chunk.draft else None)
        if chunk.samples:
            chunk.request.append(1)
    s.pool.check(r.pages for r in s.requests())
    return [(chunk.request.request_id, chunk.size, len(chunk.draft)) for chunk in chunks]


def guessing_scheduler(pages: int, budget: int) -> Scheduler:
    return Scheduler(
        KVPool(pages + 1, 2), max_batch_tokens=budget, max_running=4, drafter=NgramDrafter(Speculation(**NGRAM))
    )


def test_guesses_cost_nobody_a_page() -> None:
    """Catches a preemption for the sake of a guess, and a guess beyond the pages that its request holds."""
    s = guessing_scheduler(pages=6, budget=20)
    a, b = request([1, 2, 1, 2], max_len=12), request([1, 2, 1, 2], max_len=6)
    a.request_id, b.request_id = "a", "b"
    for r in (a, b):
        s.add(r)
    assert guessing_step(s) == [("a", 4, 0), ("b", 4, 0)]
    assert guessing_step(s) == [("a", 2, 1), ("b", 1, 0)]  # 4 guesses if there were pages; b's next token is its last
    assert s.preemptions == 0


def test_guesses_take_what_a_step_has_left() -> None:
    """Catches a prompt that waits because guesses took its tokens, and a step over its budget."""
    s = guessing_scheduler(pages=40, budget=8)
    a, b = request([1, 2, 1, 2], max_len=40), request([5] * 12, max_len=40)
    a.request_id, b.request_id = "a", "b"
    s.add(a)
    assert guessing_step(s) == [("a", 4, 0)]
    s.add(b)
    assert guessing_step(s) == [("a", 1, 0), ("b", 7, 0)]
    assert guessing_step(s) == [("a", 3, 2), ("b", 5, 0)]
    assert guessing_step(s) == [("a", 5, 4), ("b", 1, 0)]


def test_warm_up_makes_steps_of_every_number_of_rows() -> None:
    """Catches a number of rows that steps of guesses have and no rehearsal: a kernel would be compiled late."""
    llm = make_llm(cycle(1, 2), speculative=NGRAM, max_running=3)
    assert llm._max_rows == 15
    known = steps(llm._decoder, llm._kv, llm._sampler, max_tokens=20, max_sequences=3, max_rows=llm._max_rows)
    rows = [int(name.split()[-2]) for name, _ in known if "verifies" in name]
    assert rows == list(range(4, 16))


def test_off_by_default() -> None:
    """Catches guesses that nobody asked for."""
    llm = make_llm(cycle(1, 2))
    assert llm._engine.scheduler.drafter is None
    llm.generate([1, 2, 1], SamplingParams(max_tokens=9))
    assert llm._engine.totals.guessed == 0


def test_prompts_are_prefilled_beside_guesses() -> None:
    """Catches rows of logits that are mixed up when one request has several and the next one has none."""
    llm: LLM = make_llm(cycle(1, 2, 3), speculative=NGRAM, max_batch_tokens=24, max_running=4)
    stream = llm.stream([1, 2, 3, 1], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    head = [t for _ in range(3) for t in next(stream).token_ids]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[5] * 50, [6] * 7]
    got = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert got == [plain(cycle(1, 2, 3), p, params) for p in prompts]
    head += [t for d in stream for t in d.token_ids]
    assert head == plain(cycle(1, 2, 3), [1, 2, 3, 1], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))

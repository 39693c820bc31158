"""Random lives of an engine: what arrives, when, what is taken back, on how small a machine; and what must come out.

Used by the property test on a few hundred requests, and by `python -m tests.engine.soak` on as many as one likes.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.job import Job
from rapid_llm.engine.outputs import TextDelta
from rapid_llm.engine.prompts import ParsedPrompt

from . import slow_generator
from .mocks import EOS, VOCAB, MockConfig, MockDecoder, byte_tokenizer

CONTEXT = 96
TICKS = 52
"""Steps within which requests arrive and are aborted; the engine then runs until all is done."""

TOKENIZER = byte_tokenizer()
LIKELY = [*b"kbcz\xf0\x9f\xa6\x99", EOS]

Events = Counter[str]

MUST_HAPPEN = (
    *("preempted", "aborted", "stop_string", "stop_id", "eos", "length", "chunked", "mixed_step"),
    *("prefix_hit", "hit_after_preemption", "evicted", "shared_page", "guessed", "accepted", "rejected"),
    *("guessed_beside_prompt", "prompt_scored", "stopped_within_guesses"),
    *("padded", "ahead", "ended_on_the_way"),
)
"""The scenarios must be ones in which the hard things happen, or the test could not fail."""


def repeating_logits(history: Sequence[int]) -> np.ndarray:
    """Logits that depend on all of the history, some ids being likelier; now and then they follow its last few ids
    alone, so that text repeats itself and guesses are sometimes right."""
    recent = sum(history[-2:]) % 4 > 0
    seen = np.array(history[-2:] if recent else history, dtype=np.int32).tobytes()
    noise = np.frombuffer(hashlib.shake_128(seen).digest(2 * VOCAB), dtype=np.uint16)
    logits = noise.astype(np.float32) * np.float32(12 / 65536)
    logits[LIKELY] += np.float32(4)
    return logits


@dataclass
class Case:
    """One request's part in a scenario: at which tick it arrives, and at which it is aborted."""

    prompt: list[int]
    params: SamplingParams
    salt: str | None
    arrives: int
    aborted: int | None


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randint(1, 70)
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 2.5]),
        top_k=rng.choice([-1, 0, 5, 10**6]),
        top_p=rng.choice([1.0, 0.9, 0.3, 0.0]),
        min_p=rng.choice([0.0, 0.05]),
        max_tokens=rng.choice([max_tokens, max_tokens, None]),
        min_tokens=min(rng.choice([0, 0, 0, 0, 3, 9]), max_tokens),
        stop=rng.choice([None, None, "kk", ["b", "bc", "cb"], "\U0001f999"]),
        stop_token_ids=rng.choice([None, None, [ord("z"), 7]]),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.6,
        seed=rng.choice([None, rng.randrange(-(2**63), 2**63)]),
        skip_special_tokens=rng.random() < 0.7,
        logprobs=rng.choice([None, None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 0, 2]),
        **(random_edits(rng) if rng.random() < 0.25 else {}),
    )


def random_edits(rng: random.Random) -> dict[str, Any]:
    return {
        "repetition_penalty": rng.choice([1.0, 1.25, 0.75]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, 0.5, -0.25]),
        "logit_bias": rng.choice([None, {ord("k"): 1.5, 7: -3.0}]),
    }


def random_prompt(rng: random.Random, earlier: Sequence[Sequence[int]]) -> list[int]:
    """Often one that begins like an earlier one, and often one that repeats itself."""
    length = rng.randint(1, 60)
    kind = rng.random()
    if earlier and kind < 0.4:
        base = rng.choice(earlier)
        return [*base[: rng.randint(1, len(base))], *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 9)))][:60]
    if kind < 0.6:
        motif = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        return [motif[i % len(motif)] for i in range(length)]
    return [rng.randrange(VOCAB) for _ in range(length)]


def random_cases(rng: random.Random) -> list[Case]:
    cases: list[Case] = []
    for _ in range(rng.randint(2, 7)):
        arrives = rng.randint(0, 30)
        cases.append(
            Case(
                prompt=random_prompt(rng, [case.prompt for case in cases]),
                params=random_params(rng),
                salt=rng.choice([None, None, None, "a"]),
                arrives=arrives,
                aborted=rng.choice([None, None, None, arrives + rng.randint(0, 25)]),
            )
        )
    return cases


def random_llm(rng: random.Random, seed: int) -> LLM:
    guesses = {"method": "ngram", "num_tokens": rng.randint(1, 6), "min_ngram": rng.randint(1, 2), "max_ngram": 3}
    return LLM.from_parts(
        MockDecoder(repeating_logits, MockConfig(max_model_len=CONTEXT, num_layers=1)),
        TOKENIZER,
        kv_cache_tokens=rng.choice([96, 112, 160, 400]),
        max_batch_tokens=rng.choice([4, 5, 7, 16, 33, 200]),
        max_running=rng.randint(1, 4),
        seed=seed,
        threads=1,
        deterministic=rng.random() < 0.1,
        enable_prefix_caching=rng.random() < 0.7,
        speculative=rng.choice([None, guesses, guesses]),
        cuda_graphs="padded" if seed % 2 else "off",
    )


def run_scenario(number: int, events: Events) -> int:
    """Live through scenario `number`, comparing every answer with the slow generator's; how many requests it had."""
    try:
        return _run(random.Random(number), events)
    except BaseException as error:
        error.add_note(f"scenario {number}")
        raise


def _run(rng: random.Random, events: Events) -> int:
    seed = rng.randint(0, 3)
    llm = random_llm(rng, seed)
    engine = llm._engine
    cases = random_cases(rng)
    jobs = [
        llm._jobs([ParsedPrompt(None, case.prompt)], [case.params], streamed=True, cache_salt=case.salt)[0]
        for case in cases
    ]
    seen: list[list[TextDelta]] = [[] for _ in jobs]
    watch = _Watch(llm, events)
    for tick in range(TICKS):
        for case, job in zip(cases, jobs, strict=True):
            if case.arrives == tick:
                engine.submit(job)
            if case.aborted == tick:
                engine.abort([job])
        watch.one_step()
        engine.check()
        for job, deltas in zip(jobs, seen, strict=True):
            deltas += job.deltas()
    while engine.unfinished:
        watch.one_step()
    engine.check()
    assert engine.scheduler.pool.free_pages == engine.scheduler.pool.usable_pages
    for serial, (case, job, deltas) in enumerate(zip(cases, jobs, seen, strict=True)):
        deltas += job.deltas()
        assert all(request.preemptions <= 1 for request in job.requests)
        events["preempted"] += job.metrics.preemptions
        path = (seed, serial + 1) if case.params.seed is None else (case.params.seed,)
        _compare(case, job, deltas, path, events)
    if llm.graphs is not None:
        events["padded"] += llm.graphs.steps
        events["ahead"] += llm.graphs.ahead
    events["guessed"] += engine.totals.guessed
    events["accepted"] += engine.totals.accepted
    events["rejected"] += engine.totals.guessed - engine.totals.accepted
    return sum(case.params.n for case in cases)


class _Watch:
    """Runs an engine step by step and notes what happens to it."""

    def __init__(self, llm: LLM, events: Events) -> None:
        self._engine = llm._engine
        self._events = events
        pool = self._engine.scheduler.pool
        emptied = pool.emptied

        def tell(page: int) -> None:
            events["evicted"] += 1
            emptied(page)  # type: ignore[misc]

        if emptied is not None:
            pool.emptied = tell

    def one_step(self) -> None:
        engine, taken = self._engine, []
        complete = engine._complete

        def watched(flight: Any, started: float) -> Any:
            chunks = flight.chunks
            self._look(chunks)
            taken.append(1)
            figures = complete(flight, started)
            self._events["stopped_within_guesses"] += any(
                chunk.draft and chunk.request.finished and len(chunk.request.ids) - before < chunk.size
                for chunk, before in zip(chunks, lengths, strict=True)
            )
            return figures

        lengths: list[int] = []
        self._lengths = lengths
        if engine.unfinished or engine._inbox:
            engine._complete = watched  # type: ignore[method-assign]  # a step hook would keep steps from running ahead
            engine.drive(lambda: bool(taken) or not (engine.unfinished or engine._inbox))
            engine._complete = complete  # type: ignore[method-assign]

    def _look(self, chunks: Sequence[Any]) -> None:
        events, scheduler = self._events, self._engine.scheduler
        self._lengths += [len(chunk.request.ids) for chunk in chunks]
        events["ended_on_the_way"] += any(chunk.request.finished for chunk in chunks)
        events["chunked"] += any(not chunk.samples for chunk in chunks)
        events["mixed_step"] += len({chunk.decodes for chunk in chunks}) > 1
        events["guessed_beside_prompt"] += any(c.draft for c in chunks) and not all(c.decodes for c in chunks)
        held = [page for request in scheduler.running for page in request.pages.ids]
        events["shared_page"] += len(held) > len(set(held))
        events["prefix_hit"] += any(chunk.request.cached for chunk in chunks)
        events["hit_after_preemption"] += any(
            chunk.request.preemptions and not chunk.decodes and chunk.request.num_computed for chunk in chunks
        )


def _compare(case: Case, job: Job, deltas: list[TextDelta], path: tuple[int, ...], events: Events) -> None:
    result = job.output()
    for output in result.outputs:
        slow = slow_generator.generate(
            repeating_logits,
            TOKENIZER,
            case.prompt,
            case.params,
            seed_path=path,
            max_model_len=CONTEXT,
            sample=output.index,
        )
        own = [delta for delta in deltas if delta.sample_index == output.index]
        assert "".join(own) == output.text
        assert [token for delta in own for token in delta.token_ids] == output.token_ids
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].stop_reason) == (output.finish_reason, output.stop_reason)
        if case.params.logprobs is not None:
            assert output.logprobs is not None
            _check_logprobs(case.prompt, output.token_ids, output.logprobs, case.params.logprobs)
        if _at_the_edge(output.token_ids, slow, case.params):
            events["at_the_edge"] += 1
            continue
        if output.finish_reason == "abort":
            events["aborted"] += 1
            assert case.aborted is not None
            assert output.token_ids == slow.ids[: len(output.token_ids)]
            continue
        kind = {str: "stop_string", int: "stop_id", type(None): "eos"}[type(output.stop_reason)]
        events[kind if output.finish_reason == "stop" else "length"] += 1
        assert output.token_ids == slow.ids
        assert output.text == slow.text
        assert (output.finish_reason, output.stop_reason) == (slow.finish_reason, slow.stop_reason)
    if case.params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
    elif result.outputs[0].finish_reason != "abort":
        events["prompt_scored"] += 1
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[0] is None
        _check_logprobs(case.prompt[:1], case.prompt[1:], result.prompt_logprobs[1:], case.params.prompt_logprobs)


def _at_the_edge(ids: Sequence[int], slow: slow_generator.Answer, params: SamplingParams) -> bool:
    """Whether the first id that differs was drawn where the rounding of a sum decides: then nobody is wrong."""
    first = next((i for i, (a, b) in enumerate(zip(ids, slow.ids, strict=False)) if a != b), None)
    return first is not None and slow_generator.doubtful(*slow.drawn[first], params)


def _check_logprobs(before: Sequence[int], ids: Sequence[int], found: Sequence[Any], top: int) -> None:
    """Against fp64: each token's own log-probability and rank, and the `top` most probable ones.

    Bound: fp32 logits of at most 16 in magnitude, a sum of 260 exponentials in fp32 and its logarithm: below
    260 * 2**-24 + 3 * 16 * 2**-24 < 2e-5.
    """
    assert len(found) == len(ids)
    for i, (token, entries) in enumerate(zip(ids, found, strict=True)):
        logits = repeating_logits([*before, *ids[:i]])[: TOKENIZER.vocab_size].astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert token in entries
        assert top <= len(entries) <= top + 1
        for other, entry in entries.items():
            assert abs(entry.logprob - exact[other]) < 2e-5
            assert entry.rank >= int((logits > logits[other]).sum()) + 1
        assert entries[token].rank == int((logits > logits[token]).sum()) + 1

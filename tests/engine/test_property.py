"""The best single test of the engine: whatever happens around a request, it gets what it would get alone, slowly."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.job import Job
from rapid_llm.engine.outputs import TextDelta
from rapid_llm.engine.prompts import ParsedPrompt

from . import slow_generator
from .mocks import EOS, VOCAB, MockConfig, MockDecoder, byte_tokenizer, random_logits

CONTEXT = 96
TOKENIZER = byte_tokenizer()
LOGITS = random_logits(likely=[*b"kbcz\xf0\x9f\xa6\x99", EOS], lift=4.0)
SCENARIOS = 60

Events = Counter[str]


@dataclass
class Case:
    """One request's part in a scenario: at which tick it arrives, and at which it is aborted."""

    prompt: list[int]
    params: SamplingParams
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
        min_tokens=min(rng.choice([0, 0, 3, 9]), max_tokens),
        stop=rng.choice([None, None, "kk", ["b", "bc", "cb"], "\U0001f999"]),
        stop_token_ids=rng.choice([None, None, [ord("z"), 7]]),
        include_stop_str_in_output=rng.random() < 0.5,
        ignore_eos=rng.random() < 0.6,
        seed=rng.choice([None, rng.randrange(-(2**63), 2**63)]),
        skip_special_tokens=rng.random() < 0.7,
    )


def random_case(rng: random.Random) -> Case:
    arrives = rng.randint(0, 25)
    return Case(
        prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
        params=random_params(rng),
        arrives=arrives,
        aborted=rng.choice([None, None, None, arrives + rng.randint(0, 25)]),
    )


def test_every_request_gets_what_it_gets_alone() -> None:
    """Catches any fault of paging, chunking, preemption, abort, batching, seeding, stopping or streaming that shows."""
    events: Events = Counter()
    for scenario in range(SCENARIOS):
        try:
            _run_scenario(random.Random(scenario), events)
        except BaseException as error:
            error.add_note(f"scenario {scenario}")
            raise
    # The scenarios must be ones in which the hard things happen, or the test could not fail.
    for event in ("preempted", "aborted", "stop_string", "stop_id", "eos", "length", "chunked", "mixed_step"):
        assert events[event] > 0, event


def _run_scenario(rng: random.Random, events: Events) -> None:
    seed = rng.randint(0, 3)
    llm = LLM.from_parts(
        MockDecoder(LOGITS, MockConfig(max_model_len=CONTEXT, num_layers=1)),
        TOKENIZER,
        kv_cache_tokens=rng.choice([96, 112, 160, 400]),
        max_batch_tokens=rng.choice([4, 5, 7, 16, 33, 200]),
        max_running=rng.randint(1, 4),
        seed=seed,
        threads=1,
        deterministic=rng.random() < 0.1,
    )
    engine = llm._engine
    cases = [random_case(rng) for _ in range(rng.randint(1, 6))]
    jobs = [llm._jobs([ParsedPrompt(None, case.prompt)], [case.params], streamed=True)[0] for case in cases]
    seen: list[list[TextDelta]] = [[] for _ in jobs]
    for tick in range(52):
        for case, job in zip(cases, jobs, strict=True):
            if case.arrives == tick:
                engine.submit(job)
            if case.aborted == tick:
                engine.abort([job])
        _one_step(llm, events)
        engine.check()
        for job, deltas in zip(jobs, seen, strict=True):
            deltas += job.deltas()
    engine.drive(lambda: all(job.finished for job in jobs))
    engine.check()
    assert engine.unfinished == 0
    assert engine.scheduler.pool.free_pages == engine.scheduler.pool.usable_pages
    for serial, (case, job, deltas) in enumerate(zip(cases, jobs, seen, strict=True)):
        deltas += job.deltas()
        assert all(request.preemptions <= 1 for request in job.requests)
        events["preempted"] += job.metrics.preemptions
        path = (seed, serial + 1) if case.params.seed is None else (case.params.seed,)
        _compare(case, job, deltas, path, events)


def _one_step(llm: LLM, events: Events) -> None:
    engine, taken = llm._engine, []

    def hook(chunks, compute):  # type: ignore[no-untyped-def]
        events["chunked"] += any(not chunk.samples for chunk in chunks)
        events["mixed_step"] += len({chunk.size > 1 for chunk in chunks}) > 1
        taken.append(1)
        return compute()

    if engine.unfinished or engine._inbox:
        engine.step_hook = hook
        engine.drive(lambda: bool(taken) or not (engine.unfinished or engine._inbox))
        engine.step_hook = None


def _compare(case: Case, job: Job, deltas: list[TextDelta], path: tuple[int, ...], events: Events) -> None:
    for output in job.output().outputs:
        slow = slow_generator.generate(
            LOGITS,
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

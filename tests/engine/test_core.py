"""The step loop: who may come in, and that nothing is left when everybody has gone."""

from __future__ import annotations

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.job import Job
from rapid_llm.engine.kv_pool import Pages
from rapid_llm.engine.prompts import ParsedPrompt

from .conftest import make_llm
from .mocks import random_logits

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2)


def job(llm: LLM, name: str, prompt: str = "abc") -> Job:
    (made,) = llm._jobs([ParsedPrompt(None, list(prompt.encode()))], [PARAMS])
    made.request_id = name
    return made


def finish(llm: LLM, *jobs: Job) -> list[list[int]]:
    llm._engine.drive(lambda: all(j.finished for j in jobs))
    return [output.token_ids for j in jobs for output in j.output().outputs]


def test_a_second_request_of_an_id_is_refused_and_the_first_goes_on() -> None:
    """E47. Catches a second request that takes the first one's place, and an id that is never free again."""
    llm = make_llm(random_logits())
    first, second = job(llm, "same"), job(llm, "same", "xyz")
    llm._engine.submit(first)
    for again in (second, first):
        with pytest.raises(ValueError, match="request_id='same' is in the engine already"):
            llm._engine.submit(again)
    got = finish(llm, first)
    want = [o.token_ids for o in make_llm(random_logits()).generate("abc", PARAMS)[0].outputs]
    assert got == want
    llm._engine.submit(second)
    assert len(finish(llm, second)[0]) == 12
    aborted = job(llm, "same")
    llm._engine.submit(aborted)
    llm._engine.abort([aborted])
    llm._engine.submit(job(llm, "same"))


def test_an_id_is_free_after_a_failed_step() -> None:
    """Catches ids of failed requests that stay taken."""
    llm = make_llm(random_logits())
    llm._decoder.fail_at = {1: MemoryError("no room")}
    llm._engine.submit(failed := job(llm, "same"))
    with pytest.raises(MemoryError):
        finish(llm, failed)
    llm._engine.submit(again := job(llm, "same"))
    assert len(finish(llm, again)) == 2


@pytest.mark.parametrize("how", ["run", "abort"])
def test_a_leaked_page_is_noticed_when_the_engine_falls_idle(how: str) -> None:
    """Catches an engine that loses pages in silence until no request fits any more."""
    llm = make_llm(random_logits())
    assert llm._engine.scheduler.pool.grow(Pages(), 5, 5)  # held by nobody
    llm._engine.submit(one := job(llm, "one"))
    act = finish if how == "run" else lambda llm, one: llm._engine.abort([one])
    with pytest.raises(RuntimeError, match="1 pages of the cache are held by no request"):
        act(llm, one)


def test_abort_at_every_step_leaves_the_others_alone() -> None:
    """E77, E81. Catches a place in the batch taken for an identity: the middle request goes, at any point."""
    want = finish(reference := make_llm(random_logits()), *_three(reference))
    for step in range(10):
        llm = make_llm(random_logits(), max_batch_tokens=8, max_running=8)
        first, middle, last = _three(llm)
        seen = iter(range(100))
        llm._engine.drive(lambda seen=seen, step=step: next(seen) >= 2 * step)  # asked twice a step
        llm._engine.abort([middle])
        assert finish(llm, first, last) == want[:2] + want[4:]
        llm._engine.check()


def _three(llm: LLM) -> list[Job]:
    jobs = [job(llm, name, name * 10) for name in "abc"]
    for one in jobs:
        llm._engine.submit(one)
    return jobs

"""One engine, several threads; and streams that die at a bad moment."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.core import EngineError

from .conftest import make_llm
from .mocks import random_logits

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAIT = 60


def alone(prompts: list[str]) -> list[list[int]]:
    llm = make_llm(random_logits())
    return [llm.generate(p, PARAMS)[0].outputs[0].token_ids for p in prompts]


def in_threads(count: int, work: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=WAIT) for future in [pool.submit(work, i) for i in range(count)]]


def test_threads_share_an_engine() -> None:
    """Catches a step that two threads run at once, and results that reach the wrong thread."""
    prompts = ["one", "second", "third one", "4", "fifth", "the sixth"]
    llm, start = make_llm(random_logits(), max_running=4), threading.Barrier(6)

    def work(i: int) -> list[Any]:
        start.wait(WAIT)
        if i % 2:
            return [llm.generate(prompts[i], PARAMS)[0].outputs[0].token_ids for _ in range(3)]
        return [[t for d in llm.stream(prompts[i], PARAMS) for t in d.token_ids] for _ in range(3)]

    results = in_threads(6, work)
    assert results == [[ids] * 3 for ids in alone(prompts)]
    assert llm._engine.unfinished == 0
    llm._engine.check()


def test_a_late_thread_joins_the_running_batch() -> None:
    """Catches a lock held for a whole call: the second thread's request must share steps with the first's."""
    llm, running, joined = make_llm(random_logits()), threading.Event(), threading.Event()
    forward = llm._decoder.forward

    def slow_forward(input_ids: Any, meta: Any, kv: Any) -> Any:
        running.set()
        if len(meta.seq_lens) > 1:
            joined.set()
        elif len(llm._decoder.steps) == 3:
            assert second_submitted.wait(WAIT)
        return forward(input_ids, meta, kv)

    second_submitted = threading.Event()
    submit = llm._engine.submit

    def telling_submit(job: Any) -> None:
        submit(job)
        if running.is_set():
            second_submitted.set()

    llm._decoder.forward, llm._engine.submit = slow_forward, telling_submit

    def work(i: int) -> Any:
        if i == 1:
            assert running.wait(WAIT)
        return llm.generate("ab"[i], PARAMS)[0].outputs[0].token_ids

    assert in_threads(2, work) == alone(["a", "b"])
    assert joined.is_set()


def test_a_failure_reaches_every_waiting_thread() -> None:
    """Catches threads that wait for ever for requests that a failed step has ended."""
    llm, start = make_llm(random_logits()), threading.Barrier(4)
    llm._decoder.fail_at = {6: MemoryError("no room")}

    def work(i: int) -> str:
        start.wait(WAIT)
        try:
            llm.generate(str(i), PARAMS)
        except MemoryError:
            return "raised"
        except EngineError as error:
            return str(error)
        return "finished"

    results = in_threads(4, work)
    assert results.count("raised") == 1
    assert all(result in ("raised", "finished") or "no room" in result for result in results)
    assert llm._engine.unfinished == 0
    assert llm.generate("0", PARAMS)[0].outputs[0].token_ids == alone(["0"])[0]


def _abandon_in_a_cycle(llm: LLM) -> None:
    stream = llm.stream("abandoned", PARAMS)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)


def test_a_stream_collected_inside_a_step_does_not_deadlock() -> None:
    """Catches a finaliser that waits for the very step it runs in."""
    llm = make_llm(random_logits())
    _abandon_in_a_cycle(llm)
    assert llm._engine.unfinished == 1
    forward = llm._decoder.forward

    def collecting_forward(*args: Any) -> Any:
        llm._decoder.forward = forward
        gc.collect()
        return forward(*args)

    llm._decoder.forward = collecting_forward
    done = threading.Thread(target=lambda: llm.generate("b", PARAMS), daemon=True)
    done.start()
    done.join(WAIT)
    assert not done.is_alive()
    assert llm._engine.unfinished == 0
    llm._engine.check()


def test_closing_from_another_thread_frees_the_request() -> None:
    """E83. Catches an abort that is lost when another thread drives the engine."""
    llm = make_llm(random_logits())
    stream = llm.stream("closed", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    closer = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
    forward = llm._decoder.forward

    def closing_forward(*args: Any) -> Any:
        if closer.ident is None:
            closer.start()
            closer.join(WAIT)
        return forward(*args)

    llm._decoder.forward = closing_forward
    llm.generate("b", PARAMS)
    assert not closer.is_alive()
    assert llm._engine.unfinished == 0
    llm._engine.check()


def test_no_step_without_work() -> None:
    """Catches a wait that could never end: it must be an error, and soon."""
    llm = make_llm(random_logits())
    with pytest.raises(EngineError, match="no request can go on"):
        llm._engine.drive(lambda: False)

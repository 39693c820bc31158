"""Scheduling, without a model: budget, order, preemption, refusal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rapid_llm.engine.kv_pool import KVPool
from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.prefix import PrefixCache
from rapid_llm.engine.request import Request
from rapid_llm.engine.scheduler import Chunk, Scheduler


def request(name: str, prompt: int, answer: int = 8) -> Request:
    return Request(name, 0, prompt, list(range(prompt)), SamplingParams(), key=0, max_len=prompt + answer)


def scheduler(pages: int = 64, page_size: int = 4, budget: int = 16, running: int = 8) -> Scheduler:
    return Scheduler(KVPool(pages + 1, page_size), max_batch_tokens=budget, max_running=running)


def step(s: Scheduler) -> list[tuple[str, int, bool]]:
    """Run one step as the engine does, every sampled token being 0; returns what was scheduled."""
    chunks = s.schedule()
    s.pool.check(r.pages for r in s.requests())
    told = [(chunk.request.request_id, chunk.size, chunk.samples) for chunk in chunks]
    for chunk in chunks:
        assert len(chunk.request.pages.ids) * s.pool.page_size >= chunk.request.num_computed + chunk.size
        s.commit(chunk)
        if chunk.samples:
            chunk.request.append(0)
            if chunk.request.finished:
                s.finish(chunk.request)
    return told


def test_a_long_prompt_is_chunked_and_does_not_hold_up_decodes() -> None:
    """Catches a prompt that takes the whole budget from a decoding request, and chunks that do not add up."""
    s = scheduler(budget=8)
    s.add(request("a", 3))
    assert step(s) == [("a", 3, True)]
    s.add(request("b", 18))
    assert step(s) == [("a", 1, True), ("b", 7, False)]
    assert step(s) == [("a", 1, True), ("b", 7, False)]
    assert step(s) == [("a", 1, True), ("b", 4, True)]
    assert step(s) == [("a", 1, True), ("b", 1, True)]


def test_several_prompts_share_one_step() -> None:
    """Catches a scheduler that prefills one request a step."""
    s = scheduler(budget=10)
    for name in "abc":
        s.add(request(name, 4))
    assert step(s) == [("a", 4, True), ("b", 4, True), ("c", 2, False)]


def test_max_running_holds_the_next_request_back() -> None:
    """Catches a limit that is not applied (the batch's buffers have that many rows)."""
    s = scheduler(running=2)
    for name in "abc":
        s.add(request(name, 2, answer=1))
    assert step(s) == [("a", 2, True), ("b", 2, True)]
    assert step(s) == [("c", 2, True)]


def test_never_fitting_request_is_refused_with_both_numbers_and_others_move() -> None:
    """E69. Catches a request that queues for pages that will never exist, and blocks those behind it."""
    s = scheduler(pages=4, page_size=4)
    with pytest.raises(ValueError, match=r"19 tokens .* 16"):
        s.add(request("big", 12))
    s.add(request("small", 4, answer=1))
    assert step(s) == [("small", 4, True)]


def test_a_request_that_exactly_fits_is_served() -> None:
    """Catches an off-by-one in the refusal: the last token of an answer never enters the cache."""
    s = scheduler(pages=4, page_size=4)
    s.add(request("a", 12, answer=5))
    while s.has_work:
        assert step(s)


def test_preemption_takes_the_youngest_and_is_bounded() -> None:
    """E70. Catches thrash: requests that cannot coexist must each be preempted once at most, and all must finish."""
    s = scheduler(pages=8, page_size=4, budget=32)
    requests = [request(name, 7, answer=20) for name in "abcd"]
    for r in requests:
        s.add(r)
    finished: list[str] = []
    for _ in range(400):
        if not s.has_work:
            break
        step(s)
        finished += [r.request_id for r in requests if r.finished and r.request_id not in finished]
    assert finished == ["a", "b", "c", "d"]
    assert s.preemptions >= 2
    assert max(r.preemptions for r in requests) == 1
    assert requests[0].preemptions == 0
    s.pool.check([])


def test_preempted_request_computes_everything_again() -> None:
    """Catches a counter that is kept when the pages are gone: attention would read another request's keys."""
    s = scheduler(pages=4, page_size=2, budget=32)
    a, b = request("a", 3, answer=6), request("b", 3, answer=6)
    s.add(a)
    s.add(b)
    while not b.preemptions:
        step(s)
    assert b.num_computed == 0
    assert not b.pages.ids
    assert len(b.ids) > b.prompt_len  # what was sampled is kept
    while s.has_work:
        step(s)
    assert len(b.ids) == 9


def test_nothing_overtakes_a_preempted_request() -> None:
    """Catches a younger request that slips into the pages an older one waits for."""
    s = scheduler(pages=6, page_size=2, budget=32)
    a, b, c = request("a", 5, answer=6), request("b", 3, answer=6), request("c", 1, answer=1)
    for r in (a, b):
        s.add(r)
    while not b.preemptions:
        step(s)
    s.add(c)
    order = []
    while s.has_work:
        order += [name for name, _, _ in step(s)]
    assert order.index("b") < order.index("c")


def test_abort_in_every_state_gives_the_pages_back() -> None:
    """E83. Catches a cancelled request that keeps its pages or its place."""
    s = scheduler(budget=4, running=4)
    decoding, midway, waiting = request("a", 2), request("b", 9), request("c", 9)
    for r in (decoding, midway, waiting):
        s.add(r)
    step(s)
    assert (decoding.remaining, midway.num_computed, waiting.num_computed) == (1, 2, 0)
    for r in (waiting, midway, decoding):
        s.finish(r, "abort")
        assert r.finish_reason == "abort"
        s.pool.check(q.pages for q in s.requests())
    assert not s.has_work
    assert s.pool.free_pages == s.pool.usable_pages


def test_budget_below_max_running_is_refused() -> None:
    """Catches a configuration in which a decoding request would be skipped without a word."""
    with pytest.raises(ValueError, match="max_batch_tokens=4 is below max_running=8"):
        scheduler(budget=4, running=8)


def test_a_blocked_prompt_is_looked_up_once_and_begins_when_pages_come_back() -> None:
    """Catches a lookup of the whole prompt in every step that it waits, and one that is never repeated."""
    pool = KVPool(7, 2)
    known = PrefixCache(pool)
    s = Scheduler(pool, max_batch_tokens=16, max_running=4, prefix=known)
    lookups: list[int] = []
    find = known.find
    known.find = lambda *args: lookups.append(len(args[1])) or find(*args)  # type: ignore[method-assign]
    first, second = request("a", 7, answer=5), request("b", 7, answer=2)
    for r in (first, second):
        s.add(r)
    names = []
    while s.has_work:
        names += [name for name, _, _ in step(s) if name not in names]
    assert names == ["a", "b"]
    assert lookups == [7, 7, 7]  # `a`; `b` beside it in vain; `b` when the pages of `a` came back
    assert second.cached == 6
    assert second.finished


def test_a_grid_is_for_one_request_at_a_time() -> None:
    """Catches chunks of fixed places beside others: a second prompt would begin before the first one is done."""
    with pytest.raises(ValueError, match="max_running=2: a grid needs 1"):
        Scheduler(KVPool(9, 2), max_batch_tokens=8, max_running=2, grid=4)
    for grid in (0, 9):
        with pytest.raises(ValueError, match=f"grid={grid}: use 1 to max_batch_tokens=8"):
            Scheduler(KVPool(9, 2), max_batch_tokens=8, max_running=1, grid=grid)


def test_chunk_fields() -> None:
    """Catches a reordering of the tuple that batch building unpacks."""
    assert Chunk._fields == ("request", "size", "samples", "draft")


def test_host_side_modules_import_no_torch() -> None:
    """Catches a torch import that would slow every process that only schedules, parses or reports."""
    modules = ("request", "scheduler", "kv_pool", "prefix", "speculation", "options", "outputs", "prompts", "clock")
    code = "import sys\n" + "".join(f"import rapid_llm.engine.{m}\n" for m in modules)
    code += "import rapid_llm; rapid_llm.SamplingParams\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

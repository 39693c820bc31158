"""The prefix cache: what is found, what is never mixed up, and that nothing it does shows in an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine import prefix as prefix_module
from rapid_llm.engine.kv_pool import KVPool, Pages
from rapid_llm.engine.options import DETERMINISTIC_CHUNK, PAGE_SIZE
from rapid_llm.engine.prefix import PrefixCache

from .conftest import make_llm
from .mocks import MockConfig, random_logits

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def answer(llm: LLM, ids: list[int], params: SamplingParams = GREEDY, **more: Any) -> list[int]:
    (output,) = llm.generate(ids, params, **more)
    return output.outputs[0].token_ids


def cold(ids: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return answer(make_llm(random_logits(), enable_prefix_caching=False), ids, params)


def hits(llm: LLM) -> int:
    """Tokens found in the cache since the last call; the mock checks that they are the right ones."""
    scheduler = llm._engine.scheduler
    found, scheduler.hit_tokens = scheduler.hit_tokens, 0
    llm._engine.check()
    assert scheduler.pool.free_pages == scheduler.pool.usable_pages
    return found


def cache(pages: int = 8, size: int = 2) -> tuple[KVPool, PrefixCache]:
    pool = KVPool(pages + 1, size)
    return pool, PrefixCache(pool)


def hold(pool: KVPool, known: PrefixCache, ids: list[int], salt: str | None = None) -> Pages:
    """Pages that hold `ids`, as a request has them that computed what it did not find."""
    pages = Pages()
    found = known.find(salt, ids, len(ids) - 1)
    known.share(pages, found)
    assert pool.grow(pages, len(ids), len(ids))
    known.learn(pages, salt, ids, len(ids))
    return pages


@pytest.mark.parametrize("length", [1, 2, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE, 5 * PAGE_SIZE + 3])
def test_same_prompt_twice_leaves_one_token_to_compute(length: int) -> None:
    """E62, E63. Catches a full hit that leaves nothing to run, and an off-by-one at a block's end."""
    llm, ids = make_llm(random_logits()), prompt(length)
    first = answer(llm, ids)
    assert hits(llm) == 0
    assert answer(llm, ids) == first == cold(ids)
    assert hits(llm) == (length - 1) // PAGE_SIZE * PAGE_SIZE


def test_an_answer_is_reused_by_the_next_turn() -> None:
    """Catches a cache of prompts alone: the second turn of a chat begins with the first one's answer."""
    llm, ids = make_llm(random_logits()), prompt(20)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    said = answer(llm, ids, params)
    hits(llm)
    turn = [*ids, *said, *prompt(5, 1)]
    assert answer(llm, turn) == cold(turn)
    assert hits(llm) == (20 + 29) // PAGE_SIZE * PAGE_SIZE  # the last token of an answer is never computed


def test_an_edited_history_is_not_found() -> None:
    """E74. Catches block keys that outlive the ids they were made from: the 16th token decides the block."""
    llm, base = make_llm(random_logits()), prompt(PAGE_SIZE - 1)
    for last in (7, 8, 7):
        ids = [*base, last, *prompt(3, 2)]
        assert answer(llm, ids) == cold(ids)
    assert hits(llm) == PAGE_SIZE  # the third time
    grown = [*base, 9]
    assert answer(llm, grown) == cold(grown)
    assert hits(llm) == 0


def test_a_block_is_found_only_behind_its_own_history() -> None:
    """Catches keys without the chain: equal ids in the second block, after different first blocks."""
    llm = make_llm(random_logits())
    tail = prompt(2 * PAGE_SIZE, 3)
    for seed in (4, 5):
        ids = prompt(PAGE_SIZE, seed) + tail
        assert answer(llm, ids) == cold(ids)
    assert hits(llm) == 0
    ids = tail[:PAGE_SIZE] + prompt(PAGE_SIZE, 4) + [1]
    assert answer(llm, ids) == cold(ids)
    assert hits(llm) == 0


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches trust in hashes: all ids are made to hash alike, and each history still finds only its own pages."""

    class Colliding(tuple):  # type: ignore[type-arg]
        def __hash__(self) -> int:
            return 1

    monkeypatch.setattr(prefix_module, "tuple", Colliding, raising=False)
    pool, known = cache(pages=12)
    held = {seed: hold(pool, known, prompt(6, seed)) for seed in range(3)}
    assert len({hash(block.ids) for block in known._blocks.values()}) == 1
    for seed, pages in held.items():
        assert [block.page for block in known.find(None, prompt(6, seed), 6)] == list(pages.ids)


def test_salts_share_no_block() -> None:
    """E73. Catches a salt that is ignored, or that is no part of the first block's key."""
    llm, ids = make_llm(random_logits()), prompt(40)
    first = answer(llm, ids, cache_salt="a")
    assert answer(llm, ids, cache_salt="b") == first
    assert answer(llm, ids) == first
    assert hits(llm) == 0
    assert answer(llm, ids, cache_salt="b") == first
    assert "".join(llm.stream(ids, GREEDY, cache_salt="a")) == "".join(llm.stream(ids, GREEDY))
    assert hits(llm) == 3 * 32
    for wrong in ("", 5):
        with pytest.raises(ValueError, match="cache_salt="):
            llm.generate(ids, GREEDY, cache_salt=wrong)  # type: ignore[arg-type]


def test_two_equal_prompts_in_one_batch_then_a_third() -> None:
    """E66. Catches a copy whose page is freed although the table still points to it, or that replaces the known one."""
    llm, ids = make_llm(random_logits()), prompt(50)
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in (2, 30)]
    both = [o.outputs[0].token_ids for o in llm.generate([ids, ids], params)]
    assert hits(llm) == 0
    assert both[1] == cold(ids, params[1])
    assert both[0] == both[1][:2]
    assert answer(llm, ids, params[1]) == both[1]
    assert hits(llm) == 48


def test_a_prompt_joins_one_that_still_runs() -> None:
    """Catches a page that is given up while a second request still reads it."""
    llm, ids = make_llm(random_logits()), prompt(40)
    stream = llm.stream(ids, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    begun = [*next(stream).token_ids]
    assert answer(llm, [*ids, 5]) == cold([*ids, 5])
    assert llm._engine.scheduler.hit_tokens == 32
    begun += [token for delta in stream for token in delta.token_ids]
    assert begun == cold(ids, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    hits(llm)


def test_abort_in_the_middle_of_a_prompt_then_again() -> None:
    """E67. Catches blocks that are known before they are computed, and pages of an aborted prompt that stay held."""
    llm, ids = make_llm(random_logits(), max_batch_tokens=20, max_running=4), prompt(100)
    (job,) = llm._jobs([llm_prompt(ids)], [GREEDY])
    llm._engine.submit(job)
    steps = iter(range(10))
    llm._engine.drive(lambda: next(steps) >= 3)  # asked twice a step: two chunks, 40 tokens
    assert 0 < job.requests[0].num_computed < 100
    computed = job.requests[0].num_computed
    llm._engine.abort([job])
    assert hits(llm) == 0
    assert answer(llm, ids) == cold(ids)
    assert hits(llm) == computed // PAGE_SIZE * PAGE_SIZE


def llm_prompt(ids: list[int]) -> Any:
    from rapid_llm.engine.prompts import ParsedPrompt

    return ParsedPrompt(None, ids)


def test_preempted_requests_find_their_own_pages() -> None:
    """E65, E71. Catches a preemption that leaves stale pages or doubles tokens: 4 long requests, a pool of 8 blocks."""
    llm = make_llm(random_logits(), kv_cache_tokens=8 * PAGE_SIZE)
    prompts = [prompt(20, seed) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [cold(ids, params) for ids in prompts]
    assert llm._engine.scheduler.preemptions > 0
    assert hits(llm) > 0
    assert max(o.metrics.preemptions for o in outputs if o.metrics) == 1


def test_the_least_recently_used_page_goes_first() -> None:
    """Catches eviction in another order, of pages in use, or of a sequence's beginning before its end."""
    pool, known = cache(pages=8, size=2)
    a, b = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]
    for ids in (a, b):
        pool.release(hold(pool, known, ids))
    assert (len(known), pool.kept_pages, pool.free_pages) == (5, 5, 8)
    pool.release(hold(pool, known, [*a, 0]))  # used again, so `b` is the older one now
    big = Pages()
    assert pool.grow(big, 8, 8)  # 3 pages were empty; one is emptied
    assert len(known.find(None, [*b, 0], 4)) == 1
    assert len(known.find(None, [*a, 0], 6)) == 3
    held = hold(pool, known, [*b[:2], 0])
    assert len(known.find(None, [*a, 0], 6)) == 2  # its end went first
    assert pool.grow(big, 2 * 7, 14) is False
    assert pool.grow(big, 2 * 5, 10)
    assert len(known.find(None, [*b, 0], 4)) == 1  # held
    assert len(known.find(None, [*a, 0], 6)) == 1
    for pages in (big, held):
        pool.release(pages)
    pool.check([])
    known.check()


def test_pages_given_back_are_as_new() -> None:
    """Catches a holder that is used again and takes its first block for one behind those that it had."""
    pool, known = cache()
    pages = hold(pool, known, [1, 2, 3, 4])
    pool.release(pages)
    pool.reset()
    known.clear()
    assert pool.grow(pages, 4, 4)
    known.learn(pages, None, [5, 6, 7, 8], 4)
    assert [block.page for block in known.find(None, [5, 6, 7, 8], 4)] == list(pages.ids)
    assert known.find(None, [7, 8], 2) == []


def test_a_page_is_emptied_only_when_no_empty_one_is_left() -> None:
    """Catches a cache that gives up contents while there is room."""
    pool, known = cache(pages=6, size=2)
    pool.release(hold(pool, known, [1, 2, 3, 4]))
    other = Pages()
    assert pool.grow(other, 8, 8)
    assert len(known) == 2
    pool.check([other])


def test_pages_and_blocks_are_conserved_under_random_use() -> None:
    """Catches a lost or doubled page, a block at another's page, and a hit whose ids are not those asked for."""
    rng = random.Random(1)
    pool, known = cache(pages=10, size=2)
    content: dict[int, tuple[int, ...]] = {}
    held: list[Pages] = []
    for _ in range(1500):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
            found = known.find(None, ids, len(ids) - 1)
            for i, block in enumerate(found):
                assert content[block.page] == tuple(ids[: 2 * i + 2])
            need = pool.pages_for(len(ids)) - len(found) + known.idle(found)
            if need <= pool.free_pages:
                pages = Pages()
                known.share(pages, found)
                assert pool.grow(pages, len(ids), 8)
                for i in range(len(found), len(pages.ids)):
                    content[pages.ids[i]] = tuple(ids[: 2 * i + 2])
                known.learn(pages, None, ids, len(ids))
                held.append(pages)
        pool.check(held)
        known.check()


def test_a_failed_step_leaves_nothing_to_be_found() -> None:
    """Catches blocks that point to pages which a broken step may have left half written."""
    llm, ids = make_llm(random_logits()), prompt(40)
    want = answer(llm, ids)
    llm._decoder.fail_at = {len(llm._decoder.steps) + 1: MemoryError("no room")}
    with pytest.raises(MemoryError):
        llm.generate(ids, GREEDY)
    hits(llm)
    assert answer(llm, ids) == want
    assert hits(llm) == 0


def test_off_finds_nothing() -> None:
    """Catches an option that is accepted and ignored."""
    llm, ids = make_llm(random_logits(), enable_prefix_caching=False), prompt(40)
    assert answer(llm, ids) == answer(llm, ids)
    assert hits(llm) == 0
    assert llm._engine.scheduler.pool.kept_pages == 0


def test_metrics_tell_what_was_found() -> None:
    """Catches a count of hits that is never filled in."""
    llm, ids = make_llm(random_logits()), prompt(40)
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    found = [llm.generate(ids, params)[0].metrics for _ in range(2)]
    assert [m.cached_tokens for m in found if m] == [0, 64]


def chunks(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[tuple[int, int]], list[int]]:
    """(start, end) of what each step computes for a prompt, and the answer."""
    seen = []

    def hook(chunks: Any, compute: Any) -> None:
        seen.extend((chunk.request.num_computed, chunk.request.num_computed + chunk.size) for chunk in chunks)
        compute()

    llm._engine.step_hook = hook
    try:
        said = answer(llm, ids, params)
    finally:
        llm._engine.step_hook = None
    return seen, said


def test_deterministic_mode_computes_warm_what_it_computes_cold() -> None:
    """E57. Catches a hit that moves the places at which a prompt is cut, or that reuses what decode steps wrote.

    Rows may round differently for other numbers of tokens. So each page must come from a step of the same tokens as
    in a cold engine, and the steps behind a hit must be those that a cold engine makes there.
    """
    size = DETERMINISTIC_CHUNK["cpu"]
    config = MockConfig(max_model_len=4 * size)
    first = prompt(2 * size + 40)
    llm = make_llm(random_logits(), config, deterministic=True)
    said = answer(llm, first, SamplingParams(temperature=0, max_tokens=size, ignore_eos=True))
    for second in (first, [*first, *said, 3, 4], first[: 2 * size], first[: 2 * size + 1], first[:size]):
        fresh = make_llm(random_logits(), config, deterministic=True)
        cold_steps, want = chunks(fresh, second, GREEDY)
        hits(llm)
        warm_steps, said_again = chunks(llm, second, GREEDY)
        assert said_again == want
        hit = hits(llm)
        assert hit == min((len(second) - 1) // size, 2) * size
        assert warm_steps == [c for c in cold_steps if c[0] >= hit]


@pytest.mark.parametrize(("budget", "size"), [(5, 4), (16, 16), (50, 48), (1, 1)])
def test_chunks_of_deterministic_mode_end_at_fixed_places(budget: int, size: int) -> None:
    """Catches chunks that are cut by the budget of a step instead of by their places."""
    llm = make_llm(random_logits(), deterministic=True, max_batch_tokens=budget, max_running=1)
    for _ in range(2):
        starts = [start for start, _ in chunks(llm, prompt(70), SamplingParams(max_tokens=1))[0]]
        assert starts == list(range(starts[0], 70, size))
    assert starts[0] == 69 // max(size, PAGE_SIZE) * max(size, PAGE_SIZE)

"""The page allocator: conservation of pages, consecutive pages, and the checks that would catch a leak."""

from __future__ import annotations

import random

import pytest

from rapid_llm.engine.kv_pool import NULL_PAGE, KVPool, Pages


def test_pages_are_conserved_under_random_use() -> None:
    """Catches a page that is leaked, handed out twice, or lost with its reservation."""
    rng = random.Random(0)
    for num_pages in (2, 3, 9, 40):
        pool = KVPool(num_pages, 4)
        held: list[Pages] = []
        for _ in range(600):
            if held and rng.random() < 0.3:
                pool.release(held.pop(rng.randrange(len(held))))
            else:
                if not held or rng.random() < 0.4:
                    held.append(Pages())
                pages = rng.choice(held)
                tokens = rng.randrange(1, 4 * num_pages)
                need = max(pool.pages_for(tokens) - len(pages.ids), 0)
                before, free = list(pages.ids), pool.free_pages
                grown = pool.grow(pages, tokens, tokens + rng.randrange(20))
                assert grown == (need <= free)
                assert list(pages.ids[: len(before)]) == before
                assert pool.free_pages == free - (need if grown else 0)
            pool.check(held)
        for pages in held:
            pool.release(pages)
        pool.check([])
        assert pool.free_pages == pool.usable_pages


def test_two_growing_holders_keep_consecutive_pages() -> None:
    """Catches an allocator that takes the lowest free page: the two sequences would interleave and need a gather."""
    pool = KVPool(41, 16)
    a, b, gone = Pages(), Pages(), Pages()
    assert pool.grow(gone, 1, 640)  # reserved everything, and must leave nothing reserved
    pool.release(gone)
    for tokens in range(1, 161):
        assert pool.grow(a, tokens, 160)
        assert pool.grow(b, tokens, 160)
    for pages in (a, b):
        assert list(pages.ids) == list(range(pages.ids[0], pages.ids[0] + 10))


def test_reservations_never_refuse_a_free_page() -> None:
    """Catches a reservation that blocks: everything is reserved by `a`, and `b` must still get the last pages."""
    pool = KVPool(9, 1)
    a, b = Pages(), Pages()
    assert pool.grow(a, 1, 8)
    assert pool.grow(b, 7, 7)
    assert not pool.grow(a, 2, 8)
    pool.release(b)
    assert pool.grow(a, 8, 8)
    pool.check([a])


def test_the_null_page_is_never_handed_out() -> None:
    """Catches an off-by-one that would let padding overwrite a request's first page."""
    pool = KVPool(5, 2)
    pages = Pages()
    assert pool.grow(pages, 8, 8)
    assert NULL_PAGE not in pages.ids
    assert not pool.grow(pages, 9, 9)


def test_check_sees_a_leak_and_a_double_holder() -> None:
    """Catches a `check` that cannot fail."""
    pool = KVPool(5, 1)
    pages = Pages()
    assert pool.grow(pages, 2, 2)
    with pytest.raises(RuntimeError, match="leaked pages"):
        pool.check([])
    with pytest.raises(RuntimeError, match="held by 2 and counted 1"):
        pool.check([pages, pages])
    pages.ids.append(pages.ids[0])
    with pytest.raises(RuntimeError, match="held twice by one holder"):
        pool.check([pages])


def test_a_page_cannot_be_given_back_twice() -> None:
    """Catches a double release, after which two requests would share a page."""
    pool = KVPool(5, 1)
    pages, copy = Pages(), Pages()
    assert pool.grow(pages, 2, 2)
    copy.ids = pages.ids
    pool.release(pages)
    with pytest.raises(RuntimeError, match="not held"):
        pool.release(copy)


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (4, 0)])
def test_impossible_pools_are_refused(num_pages: int, page_size: int) -> None:
    """Catches a pool that could hold nothing and would hang its first request."""
    with pytest.raises(ValueError, match=r"num_pages|page_size"):
        KVPool(num_pages, page_size)

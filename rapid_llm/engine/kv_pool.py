"""Which page of the key/value cache belongs to whom. Invariant: every page but 0 is either free or held exactly once.

Page 0 is the null page: padding may write there and no request ever holds it. A holder's pages are handed out next to
each other wherever there is room, because attention over one unbroken run needs no gather: a first allocation
reserves the run that the holder may grow into. Reservations are soft. When nothing else is left, anyone's reserved
page is taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_HELD: Final = 0
_FREE: Final = 1
_RESERVED: Final = 2

NULL_PAGE: Final = 0


@dataclass(eq=False, slots=True)
class Pages:
    """The pages of one holder, in the order of its tokens (int32, as the block table wants them)."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    reserved_until: int = 0
    """End of the run reserved behind the last page; meaningless without pages."""


class KVPool:
    """A fixed number of pages. Not thread-safe: the engine's lock covers it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: the null page and at least one more are needed")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: use 1 or more")
        self.page_size = page_size
        self.num_pages = num_pages
        self._state = bytearray()
        self._free = 0
        self.reset()

    @property
    def usable_pages(self) -> int:
        """Pages that one holder could have if it were alone."""
        return self.num_pages - 1

    @property
    def usable_tokens(self) -> int:
        return self.usable_pages * self.page_size

    @property
    def free_pages(self) -> int:
        return self._free

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def grow(self, pages: Pages, tokens: int, expected_tokens: int) -> bool:
        """Extend `pages` to hold `tokens` tokens; False, and nothing changed, if too few pages are free.

        expected_tokens: what the holder may grow to, for the reservation.
        """
        need = self.pages_for(tokens) - len(pages.ids)
        if need <= 0:
            return True
        if need > self._free:
            return False
        state, ids = self._state, pages.ids
        expected = max(self.pages_for(expected_tokens) - len(ids), need)
        for _ in range(need):
            page = ids[-1] + 1 if ids else self.num_pages
            if page >= self.num_pages or state[page] == _HELD:
                page = self._find_run(pages, expected)
            state[page] = _HELD
            ids.append(page)
            expected -= 1
        self._free -= need
        return True

    def release(self, pages: Pages) -> None:
        """Give back all of `pages`, and its reservation."""
        state, ids = self._state, pages.ids
        if ids:
            self._unreserve(ids[-1] + 1, pages.reserved_until)
        for page in ids:
            if state[page] != _HELD or page == NULL_PAGE:
                raise RuntimeError(f"page {page} is given back but not held: the pool's bookkeeping is broken")
            state[page] = _FREE
        self._free += len(ids)
        pages.ids = array("i")
        pages.reserved_until = 0

    def reset(self) -> None:
        """Take every page back, whoever holds it. Holders must be forgotten with it."""
        self._state = bytearray([_FREE]) * self.num_pages
        self._state[NULL_PAGE] = _HELD
        self._free = self.num_pages - 1

    def check(self, holders: Iterable[Pages]) -> None:
        """Raise `RuntimeError` unless every page is free or held by exactly one of `holders`. For tests."""
        held = [page for pages in holders for page in pages.ids]
        if len(set(held)) != len(held):
            raise RuntimeError(f"a page is held twice: {sorted(held)}")
        if NULL_PAGE in held:
            raise RuntimeError("the null page is held")
        actual = {page for page in range(1, self.num_pages) if self._state[page] == _HELD}
        if actual != set(held):
            raise RuntimeError(f"leaked pages {sorted(actual - set(held))}, lost pages {sorted(set(held) - actual)}")
        if self._free != self.usable_pages - len(held):
            raise RuntimeError(f"{self._free} pages are counted free, {self.usable_pages - len(held)} are")

    def _find_run(self, pages: Pages, expected: int) -> int:
        """The first page of a free run for `expected` more pages, which is reserved; of a shorter run if need be."""
        if pages.ids:
            self._unreserve(pages.ids[-1] + 1, pages.reserved_until)
        length = min(expected, self._free)
        while length > 0:
            page = self._state.find(bytes([_FREE]) * length)
            if page >= 0:
                self._state[page : page + length] = bytes([_RESERVED]) * length
                pages.reserved_until = page + length
                return page
            length //= 2
        page = self._state.find(_RESERVED)
        pages.reserved_until = page + 1
        return page

    def _unreserve(self, start: int, end: int) -> None:
        for page in range(start, end):
            if self._state[page] == _RESERVED:
                self._state[page] = _FREE

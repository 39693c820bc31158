"""Which page of the key/value cache belongs to whom. Invariant: a page's count is the number of its holders.

Page 0 is the null page: padding may write there and no request ever holds it. A holder's pages are handed out next to
each other wherever there is room, because attention over one unbroken run needs no gather: a first allocation
reserves the run that the holder may grow into. Reservations are soft. When nothing else is left, anyone's reserved
page is taken.

Several holders may share a page whose contents are final. Such a page can be kept once nobody holds it: it counts as
free, may be shared again, and is emptied, least recently used first, only when no empty page is left.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_HELD: Final = 0
_FREE: Final = 1
_RESERVED: Final = 2
_KEPT: Final = 3

NULL_PAGE: Final = 0


@dataclass(eq=False, slots=True)
class Pages:
    """The pages of one holder, in the order of its tokens (int32, as the block table wants them).

    blocks, last: how many of them, from the first on, the prefix cache knows, and what it knows of the last of these.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    reserved_until: int = 0
    """End of the run reserved behind the last page; meaningless without pages."""
    blocks: int = 0
    last: Any = None


class KVPool:
    """A fixed number of pages. Not thread-safe: the engine's lock covers it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: the null page and at least one more are needed")
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: use 1 or more")
        self.page_size = page_size
        self.num_pages = num_pages
        self.emptied: Callable[[int], None] | None = None
        """Told of each kept page whose contents are given up."""
        self._state = bytearray()
        self._count = array("i")
        self._keep = bytearray()
        self._kept: OrderedDict[int, None] = OrderedDict()
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
        """Pages that nobody holds, those with kept contents among them."""
        return self._free

    @property
    def kept_pages(self) -> int:
        """Pages that nobody holds and whose contents are kept."""
        return len(self._kept)

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
        for _ in range(need - (self._free - len(self._kept))):
            self._empty_one()
        state, ids, count = self._state, pages.ids, self._count
        expected = max(self.pages_for(expected_tokens) - len(ids), need)
        for _ in range(need):
            page = ids[-1] + 1 if ids else self.num_pages
            # A reserved page behind the last one is this holder's own only up to the end of its reservation.
            if page >= self.num_pages or not (
                state[page] == _FREE or (state[page] == _RESERVED and page < pages.reserved_until)
            ):
                page = self._find_run(pages, expected)
            state[page] = _HELD
            count[page] = 1
            ids.append(page)
            expected -= 1
        self._free -= need
        return True

    def share(self, pages: Pages, ids: Sequence[int]) -> None:
        """Make `pages`, which must be empty, a holder of `ids`: pages with final contents, held by others or kept."""
        for page in ids:
            if self._state[page] == _KEPT:
                del self._kept[page]
                self._state[page] = _HELD
                self._free -= 1
            elif self._state[page] != _HELD or page == NULL_PAGE:
                raise RuntimeError(f"page {page} is shared but empty: the pool's bookkeeping is broken")
            self._count[page] += 1
        pages.ids.extend(ids)

    def keep(self, page: int) -> None:
        """Keep the contents of a held page once nobody holds it."""
        self._keep[page] = 1

    def is_kept(self, page: int) -> bool:
        """Whether nobody holds `page` and its contents are kept."""
        return self._state[page] == _KEPT

    def release(self, pages: Pages) -> None:
        """Give back all of `pages`, and its reservation."""
        state, ids, count = self._state, pages.ids, self._count
        if ids:
            self._unreserve(ids[-1] + 1, pages.reserved_until)
        for page in reversed(ids):  # the end of a sequence is of use only with its beginning, so it goes first
            if state[page] != _HELD or page == NULL_PAGE:
                raise RuntimeError(f"page {page} is given back but not held: the pool's bookkeeping is broken")
            count[page] -= 1
            if count[page] == 0:
                self._free += 1
                if self._keep[page]:
                    state[page] = _KEPT
                    self._kept[page] = None
                else:
                    state[page] = _FREE
        pages.ids = array("i")
        pages.reserved_until = 0
        pages.blocks = 0
        pages.last = None

    def reset(self) -> None:
        """Take every page back, whoever holds it, and keep nothing. Holders must be forgotten with it."""
        self._state = bytearray([_FREE]) * self.num_pages
        self._state[NULL_PAGE] = _HELD
        self._count = array("i", bytes(4 * self.num_pages))
        self._keep = bytearray(self.num_pages)
        self._kept = OrderedDict()
        self._free = self.num_pages - 1

    def check(self, holders: Iterable[Pages]) -> None:
        """Raise `RuntimeError` unless every page has as many holders among `holders` as are counted. For tests."""
        held: Counter[int] = Counter()
        for pages in holders:
            if len(set(pages.ids)) != len(pages.ids):
                raise RuntimeError(f"a page is held twice by one holder: {sorted(pages.ids)}")
            held.update(pages.ids)
        if NULL_PAGE in held:
            raise RuntimeError("the null page is held")
        actual = {page for page in range(1, self.num_pages) if self._state[page] == _HELD}
        if actual != set(held):
            raise RuntimeError(f"leaked pages {sorted(actual - set(held))}, lost pages {sorted(set(held) - actual)}")
        for page in range(1, self.num_pages):
            if self._count[page] != held[page]:
                raise RuntimeError(f"page {page} is held by {held[page]} and counted {self._count[page]} times")
        if set(self._kept) != {page for page in range(self.num_pages) if self._state[page] == _KEPT}:
            raise RuntimeError(f"the kept pages are not those listed: {sorted(self._kept)}")
        if self._free != self.usable_pages - len(held):
            raise RuntimeError(f"{self._free} pages are counted free, {self.usable_pages - len(held)} are")

    def _empty_one(self) -> None:
        """Give up the contents of the kept page that was used the longest time ago."""
        page, _ = self._kept.popitem(last=False)
        self._state[page] = _FREE
        self._keep[page] = 0
        if self.emptied is not None:
            self.emptied(page)

    def _find_run(self, pages: Pages, expected: int) -> int:
        """The first page of a free run for `expected` more pages, which is reserved; of a shorter run if need be."""
        if pages.ids:
            self._unreserve(pages.ids[-1] + 1, pages.reserved_until)
        length = min(expected, self._free - len(self._kept))
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

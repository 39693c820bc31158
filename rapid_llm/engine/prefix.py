"""Which pages already hold what a new request would compute. Invariant: a block is found by its ids, never by a digest.

A block is one full page of tokens, and its key is the block before it with its own token ids: a dict hashes the key to
find a candidate and compares the real ids before it answers, so equal hashes cannot mix up two histories. The block
before a first block is the salt, so requests of different salts share nothing. Blocks are final once they are known:
a holder only writes behind them.

Copies are not merged: where two requests computed the same block side by side, the first one's page is known and the
second one's is its own, until it gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .kv_pool import KVPool, Pages


@dataclass(eq=False, slots=True)
class Block:
    """page: where it is. before: the block before it in its history, or the salt. ids: its tokens."""

    page: int
    before: Block | str | None
    ids: tuple[int, ...]


class PrefixCache:
    """The blocks of one pool. granularity: hits are a multiple of so many tokens, itself a multiple of a page."""

    def __init__(self, pool: KVPool, granularity: int | None = None) -> None:
        self._pool = pool
        self._size = pool.page_size
        self.granularity = self._size if granularity is None else granularity
        if self.granularity < 1 or self.granularity % self._size:
            raise ValueError(f"granularity={self.granularity} is not a multiple of the page size {self._size}")
        self._blocks: dict[tuple[Block | str | None, tuple[int, ...]], Block] = {}
        self._by_page: list[Block | None] = [None] * pool.num_pages
        pool.emptied = self._forget

    def __len__(self) -> int:
        """Blocks that a request could hit."""
        return len(self._blocks)

    def find(self, salt: str | None, ids: Sequence[int], limit: int) -> list[Block]:
        """The longest known beginning of `ids`, of at most `limit` tokens."""
        size, found = self._size, []
        before: Block | str | None = salt
        for start in range(0, limit - limit % self.granularity, size):
            block = self._blocks.get((before, tuple(ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            before = block
        del found[len(found) - len(found) % (self.granularity // size) :]
        return found

    def idle(self, blocks: Sequence[Block]) -> int:
        """How many of `blocks` nobody holds: sharing these takes free pages."""
        return sum(self._pool.is_kept(block.page) for block in blocks)

    def share(self, pages: Pages, blocks: Sequence[Block]) -> None:
        """Make `pages`, which must be empty, a holder of `blocks`, which `find` has just found."""
        if blocks:
            self._pool.share(pages, [block.page for block in blocks])
            pages.blocks, pages.last = len(blocks), blocks[-1]

    def learn(self, pages: Pages, salt: str | None, ids: Sequence[int], computed: int) -> None:
        """Note the full blocks of `pages`, whose first `computed` tokens, those of `ids`, are in the cache for good."""
        size = self._size
        for index in range(pages.blocks, computed // size):
            before: Block | str | None = salt if index == 0 else pages.last
            tokens = tuple(ids[index * size : (index + 1) * size])
            block = self._blocks.get((before, tokens))
            if block is None:
                page = pages.ids[index]
                block = self._blocks[before, tokens] = self._by_page[page] = Block(page, before, tokens)
                self._pool.keep(page)
            pages.blocks, pages.last = index + 1, block

    def clear(self) -> None:
        """Forget every block; for a pool that has been reset."""
        self._blocks.clear()
        self._by_page = [None] * self._pool.num_pages

    def check(self) -> None:
        """Raise `RuntimeError` unless every kept page is a known block's, each block at its own page. For tests."""
        for key, block in self._blocks.items():
            if self._by_page[block.page] is not block or key != (block.before, block.ids):
                raise RuntimeError(f"the block of page {block.page} is not where it is looked up")
        kept = sum(self._pool.is_kept(block.page) for block in self._blocks.values())
        if kept != self._pool.kept_pages:
            raise RuntimeError(f"{self._pool.kept_pages} pages are kept and {kept} of them known")

    def _forget(self, page: int) -> None:
        block = self._by_page[page]
        if block is not None:
            del self._blocks[block.before, block.ids]
            self._by_page[page] = None

"""Copies of one call's arguments, and the proof that a loop over them finds them out of the cache.

Cold means: between two uses of a copy, at least five times the last cache is read from other memory. What is counted
are distinct bytes that the declared work reads, in the order of the loop that really runs; written bytes and scratch do
not count, and neither does anything twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from .errors import ChangedInputError, DegenerateInputError
from .storages import Arguments, copy_arguments, storage_pairs, storages_of, tensors, unique_bytes, vary

CACHE_MULTIPLE: Final = 5
LONGEST: Final = 8
VARIANTS: Final = 3
"""Sets of values that copies take in turn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a block of calls runs. order: the copy that each call uses. flush_bytes: read from other memory before the
    block, outside of the timed window. reuse_bytes: the fewest distinct bytes read between two uses of a copy."""

    order: tuple[int, ...]
    copies: int
    flush_bytes: int
    reuse_bytes: int
    cache_bytes: int

    @property
    def cold(self) -> bool:
        return self.reuse_bytes >= CACHE_MULTIPLE * self.cache_bytes

    @property
    def label(self) -> str:
        return "cold" if self.cold else "warm"

    def json(self) -> dict[str, Any]:
        record = asdict(self)
        del record["order"]
        return {**record, "calls": len(self.order), "label": self.label}


def reuse_bytes(order: Sequence[int], read_bytes: int, flush_bytes: int) -> int:
    """The fewest distinct bytes read between two uses of a copy, when `order` runs again and again with a flush of
    `flush_bytes` before each run. Other copies count once each."""
    calls = len(order)
    least: float = math.inf
    last: dict[int, int] = {}
    for at, copy in enumerate([*order, *order]):
        if copy in last:
            between = [*order, *order][last[copy] + 1 : at]
            crossed = flush_bytes if last[copy] < calls <= at else 0
            least = min(least, len(set(between)) * read_bytes + crossed)
        last[copy] = at
    return 0 if math.isinf(least) else int(least)


def plan(
    *,
    read_bytes: int,
    set_bytes: int,
    cache_bytes: int,
    budget_bytes: int,
    seconds_a_call: float,
    block_seconds: float,
    max_copies: int,
    cold: bool = True,
    once: bool = False,
) -> Plan:
    """The plan for a call that reads `read_bytes` of a set of arguments of `set_bytes`.

    As many copies as rotation alone needs, if they fit; else as many as fit, each used once, behind a flush. once: each
    copy is used once in a block in any case, for calls that change their arguments. Without `cold`, one copy. A block
    is kept within `LONGEST` times `block_seconds`.
    """
    timely = int(LONGEST * block_seconds / max(seconds_a_call, 1e-9))
    fits = max(min(max_copies, budget_bytes // max(set_bytes, 1), timely), 1)
    wanted = 1 + math.ceil(CACHE_MULTIPLE * cache_bytes / max(read_bytes, 1))
    enough = math.ceil(block_seconds / max(seconds_a_call, 1e-9))
    if not cold:
        copies = min(fits, max(enough, 1)) if once else 1
        order = tuple(range(copies)) * (1 if once else min(max(enough, 1), max_copies))
        return Plan(order, copies, 0, reuse_bytes(order[: 4 * copies], read_bytes, 0), cache_bytes)
    if wanted <= fits and not once:
        order = tuple(range(wanted)) * min(max(math.ceil(enough / wanted), 1), max(max_copies // wanted, 1))
        return Plan(order, wanted, 0, reuse_bytes(order[: 2 * wanted], read_bytes, 0), cache_bytes)
    copies = min(fits, max(wanted, 1), max(enough, 8))
    flush = CACHE_MULTIPLE * cache_bytes
    order = tuple(range(copies))
    return Plan(order, copies, flush, reuse_bytes(order, read_bytes, flush), cache_bytes)


class Rotation:
    """The copies of `arguments` that a plan uses, filled from `VARIANTS` sets of values.

    mutated: keys of the arguments that the call changes. adapt: turns a set into the form that the function takes (a
    packed weight, say); checks still see the plain one. judges: by check, one for each set. Raises
    `DegenerateInputError` if the values cannot be varied: then a result that was remembered could not be told from one
    that was computed.
    """

    def __init__(
        self,
        arguments: Arguments,
        mutated: Sequence[int | str] = (),
        adapt: Callable[[Arguments], Arguments] | None = None,
    ) -> None:
        self.masters = [copy_arguments(arguments) for _ in range(VARIANTS)]
        changed = [vary(master, step) for step, master in enumerate(self.masters) if step]
        self.sources = self.masters if adapt is None else [adapt(master) for master in self.masters]
        if not any(changed) and any(True for _ in tensors(arguments)):
            raise DegenerateInputError(
                "the arguments cannot be varied: no tensor of numbers has two different rows; use larger inputs"
            )
        self.set_bytes = unique_bytes(self.sources[0])
        self.epoch = 0
        self.copies: list[Arguments] = []
        self.judges: dict[Any, list[Any]] = {}
        self._mutated = tuple(mutated)

    def allocate(self, count: int) -> None:
        """Exactly `count` copies, filled for the present epoch."""
        del self.copies[count:]
        while len(self.copies) < count:
            self.copies.append(copy_arguments(self.sources[self.variant(len(self.copies))]))

    def variant(self, copy: int) -> int:
        """Which set of values a copy has at present."""
        return (copy + self.epoch) % VARIANTS

    def refill(self, epoch: int) -> None:
        """Give every copy the values of `epoch`, in the memory that it has."""
        self.epoch = epoch
        for index, copy in enumerate(self.copies):
            for _, mine, master in storage_pairs(copy, self.sources[self.variant(index)]):
                mine.copy_(master)

    def restore(self) -> None:
        """Undo what calls did to the arguments that they change."""
        if not self._mutated:
            return
        for index, copy in enumerate(self.copies):
            keep = storages_of(copy, copy) - storages_of(copy, self._mutated)
            for _, mine, master in storage_pairs(copy, self.sources[self.variant(index)], skip=keep):
                mine.copy_(master)

    def refuse_changed(self, name: str) -> None:
        """Raise `ChangedInputError` if an argument that is only read has changed in any copy."""
        import torch

        for index, copy in enumerate(self.copies):
            skip = storages_of(copy, self._mutated)
            for at, mine, master in storage_pairs(copy, self.sources[self.variant(index)], skip=skip):
                if not torch.equal(mine, master):
                    count = int((mine != master).sum())
                    raise ChangedInputError(f"{name}: {count} bytes of {at} changed, which the call only reads")

"""The smallest set of rows that accounts for a difference, in few model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(candidates: Sequence[T], suspected: int, explains: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A set of `candidates` that `explains`, of which every member is needed.

    `explains` is monotone: a superset of a set that explains does too, and all candidates together do. The first
    `suspected` of them are asked first, by themselves. One guilty candidate of n is found in one call if it is the one
    suspected, else in at most log2(n) + 2.
    """
    rest = list(candidates)
    if 0 < suspected < len(rest) and explains(tuple(rest[:suspected])):
        rest = rest[:suspected]
    found: list[T] = []
    while rest:
        low, high = 1, len(rest)  # the shortest prefix that explains, together with what is found, ends in the next one
        while low < high:
            middle = (low + high) // 2
            if explains((*found, *rest[:middle])):
                high = middle
            else:
                low = middle + 1
        found.append(rest[low - 1])
        rest = rest[: low - 1]
        if not rest or explains(tuple(found)):
            break
    return tuple(found)

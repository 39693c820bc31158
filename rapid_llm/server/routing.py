"""Which replica answers a request: the one that knows most of its beginning, unless it has too much to do.

A replica that answered a request has the keys and values of its prompt in its prefix cache for a while, and a request
that begins alike is cheaper there. What a replica knows is guessed from what was sent to it: nobody is asked. A wrong
guess costs the computation of a prompt that another replica knew, and nothing else.

Invariant: a choice depends on what is passed and what was noted before, on no clock and no chance.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

BLOCK: Final = 256
"""Bytes of a request's beginning that are known or not known together: some 64 tokens of English, 4 pages of cache."""

KNOWN_BLOCKS: Final = 16_384
"""Blocks that a replica is taken to know, the last used of those that were sent to it: 4 MiB of text."""

MOST_AHEAD: Final = 4
"""By how many requests the preferred replica may be busier than the least busy one."""


def opening(body: Mapping[str, Any]) -> bytes:
    """The beginning that a request of the API shares with others, the same for all that continue one conversation.

    A salt comes first, for requests of different salts share nothing; then tools, which templates put in front; then
    each message, or the prompt: a text, or ids, or the first of several.
    """
    parts: list[Any] = [body.get("cache_salt"), body.get("tools")]
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        parts += messages
    elif isinstance(prompt, str):
        return _text(parts) + prompt.encode("utf-8", "surrogatepass")
    elif isinstance(prompt, Sequence) and prompt:
        parts += [prompt[0]] if isinstance(prompt[0], str) else _ids(prompt)
    return _text(parts)


def blocks_of(text: bytes) -> tuple[bytes, ...]:
    """A name for the text up to the end of each whole block of `BLOCK` bytes: equal names, equal beginnings."""
    names, digest = [], hashlib.blake2b(digest_size=16)
    for end in range(BLOCK, len(text) + 1, BLOCK):
        digest.update(text[end - BLOCK : end])
        names.append(digest.digest())
    return tuple(names)


def choose(
    matches: Sequence[int], loads: Sequence[int | None], turn: int = 0, *, most_ahead: int = MOST_AHEAD
) -> int | None:
    """The replica to send a request to; None where none is there.

    matches: for each replica, how many blocks of the request's beginning it knows. loads: requests that it has in
    progress, None for one that is not there. Of the replicas that are at most `most_ahead` requests busier than the
    least busy one, the longest match wins, then the lower load; of equals, the first from number `turn` on.
    """
    there = [load for load in loads if load is not None]
    if not there:
        return None
    limit, count = min(there) + most_ahead, len(loads)
    best: tuple[int, int, int] | None = None
    chosen = None
    for index, (match, load) in enumerate(zip(matches, loads, strict=True)):
        if load is None or load > limit:
            continue
        rank = (-match, load, (index - turn) % count)
        if best is None or rank < best:
            best, chosen = rank, index
    return chosen


class Router:
    """Chooses among `count` replicas, and remembers. Not thread-safe."""

    def __init__(self, count: int, *, known_blocks: int = KNOWN_BLOCKS, most_ahead: int = MOST_AHEAD) -> None:
        for name, value, least in (
            ("count", count, 1),
            ("known_blocks", known_blocks, 1),
            ("most_ahead", most_ahead, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: use an integer of {least} or more")
        self.loads = [0] * count
        """Requests in progress."""
        self.down: set[int] = set()
        """Replicas that are not there."""
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        self._known_blocks = known_blocks
        self._most_ahead = most_ahead
        self._turn = 0

    def begin(self, text: bytes) -> int | None:
        """The replica for a request that begins with `text`, which counts as in progress until `end`."""
        names = blocks_of(text)
        loads = [None if i in self.down else load for i, load in enumerate(self.loads)]
        matches = [self._match(known, names) for known in self._known]
        index = choose(matches, loads, self._turn, most_ahead=self._most_ahead)
        if index is None:
            return None
        self._turn = (index + 1) % len(self.loads)
        self.loads[index] += 1
        self._note(self._known[index], names)
        return index

    def end(self, index: int) -> None:
        """A request of that replica is over."""
        if self.loads[index] <= 0:
            raise RuntimeError(f"replica {index} has no request in progress that could end")
        self.loads[index] -= 1

    def lost(self, index: int) -> None:
        """That replica is gone, and with it all that it knew; `found` brings it back."""
        self.down.add(index)
        self._known[index].clear()

    def found(self, index: int) -> None:
        """That replica is there."""
        self.down.discard(index)

    def _match(self, known: Mapping[bytes, None], names: Iterable[bytes]) -> int:
        count = 0
        for name in names:
            if name not in known:
                break
            count += 1
        return count

    def _note(self, known: OrderedDict[bytes, None], names: Sequence[bytes]) -> None:
        for name in reversed(names):  # the beginning last: it is the last to be forgotten
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._known_blocks:
            known.popitem(last=False)


def _ids(prompt: Sequence[Any]) -> list[Any]:
    first = prompt[0]
    return list(first) if isinstance(first, Sequence) else list(prompt)


def _text(parts: Iterable[Any]) -> bytes:
    return "\n".join(json.dumps(part, sort_keys=True) for part in parts).encode() + b"\n"

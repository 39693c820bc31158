"""Which replica a request goes to: the policy alone, without replicas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from rapid_llm.server.routing import BLOCK, MOST_AHEAD, Router, blocks_of, choose, opening


def text(name: str, blocks: int) -> bytes:
    return (name * BLOCK).encode()[:BLOCK] * blocks


def test_the_longest_match_wins_while_its_replica_is_not_too_busy() -> None:
    """Catches: a cache that is passed over, and one replica that gets everything because it knows everything."""
    assert choose([0, 3, 2], [0, 0, 0]) == 1
    assert choose([0, 3, 2], [0, MOST_AHEAD, 0]) == 1
    assert choose([0, 3, 2], [0, MOST_AHEAD + 1, 0]) == 2
    assert choose([0, 3, 2], [1, MOST_AHEAD + 1, 1]) == 1
    assert choose([0, 3, 2], [0, 9, 9]) == 0
    assert choose([0, 3, 2], [2, 0, 3], most_ahead=0) == 1
    assert choose([0, 3, 2], [0, 1, 0], most_ahead=0) == 2


def test_equals_are_told_by_load_then_by_turn() -> None:
    """Catches: requests without a match that all go to the first replica."""
    assert choose([1, 1, 1], [2, 1, 2]) == 1
    assert [choose([0, 0, 0], [0, 0, 0], turn) for turn in (0, 1, 2)] == [0, 1, 2]
    assert choose([0, 0, 0], [0, 1, 0], 1) == 2


def test_a_replica_that_is_not_there_gets_nothing() -> None:
    """Catches: a request for a dead replica because it knew the prompt, or because its load is the least."""
    assert choose([9, 0], [None, 7]) == 1
    assert choose([0, 0], [None, None]) is None
    router = Router(2)
    first = router.begin(text("a", 4))
    assert first == 0
    router.end(0)
    router.lost(0)
    assert [router.begin(text("a", 4)) for _ in range(2)] == [1, 1]
    router.lost(1)
    assert router.begin(b"") is None
    router.found(0)
    assert router.begin(text("a", 4)) == 0


def test_conversations_stay_where_they_are_and_spread_over_replicas() -> None:
    """Catches: turns of one conversation on different replicas, conversations that are all on one."""
    router = Router(3)
    homes: dict[str, list[int | None]] = {}
    for blocks in range(1, 5):
        for name in "abcdef":
            index = router.begin(text(name, blocks))
            assert index is not None
            homes.setdefault(name, []).append(index)
            router.end(index)
    assert all(len(set(where)) == 1 for where in homes.values())
    assert Counter(where[0] for where in homes.values()) == {0: 2, 1: 2, 2: 2}
    assert router.loads == [0, 0, 0]


def test_a_popular_beginning_spreads_once_its_replica_is_busy() -> None:
    """Catches: a load cap that counts requests which are over, or that never lets go of one replica."""
    router = Router(2)
    chosen = [router.begin(text("a", 2)) for _ in range(12)]
    assert chosen[: MOST_AHEAD + 1] == [0] * (MOST_AHEAD + 1)
    assert max(router.loads) - min(router.loads) <= MOST_AHEAD + 1
    assert set(chosen) == {0, 1}


def test_what_is_known_is_bounded_and_forgotten_from_the_end() -> None:
    """Catches: memory that grows with every request, and beginnings that are forgotten before what follows them."""
    router = Router(2, known_blocks=6)
    router.begin(text("a", 4))  # replica 0
    router.begin(text("b", 1))  # replica 1
    router.begin(text("a", 4))  # 0 again, which makes it the last used
    for name in "cd":
        router._note(router._known[0], blocks_of(text(name, 2)))
    assert len(router._known[0]) == 6
    assert router._match(router._known[0], blocks_of(text("a", 4))) == 2
    assert router._match(router._known[0], blocks_of(text("d", 2))) == 2


def test_blocks_name_beginnings() -> None:
    """Catches: a block that matches whatever came before it, and a tail that counts as a block."""
    one, other = blocks_of(text("a", 1) + text("b", 1)), blocks_of(text("c", 1) + text("b", 1))
    assert len(one) == 2
    assert not set(one) & set(other)
    assert blocks_of(text("a", 1)[:-1]) == ()
    assert blocks_of(text("a", 1) + b"x") == one[:1]


def test_what_continues_a_conversation_begins_with_it() -> None:
    """Catches: an opening that ends with what closes a list, so that no turn ever matches the one before."""
    messages = [{"role": "user", "content": "hi" * BLOCK}, {"role": "assistant", "content": "yes"}]
    before = opening({"messages": messages})
    after = opening({"messages": [*messages, {"role": "user", "content": "why?"}], "max_tokens": 7})
    assert after.startswith(before)
    assert opening({"messages": messages, "cache_salt": "s"})[:BLOCK] != before[:BLOCK]
    assert opening({"messages": messages, "tools": [{"type": "function"}]})[:BLOCK] != before[:BLOCK]
    assert opening({"prompt": "ab"}) + b"c" == opening({"prompt": "abc"})
    assert opening({"prompt": [1, 2, 3]}) == opening({"prompt": [[1, 2, 3], [4]]})
    assert opening({"prompt": ["ab", "c"]}) != opening({"prompt": ["abc"]})
    for odd in ({}, {"prompt": None}, {"prompt": []}, {"prompt": "\ud83d"}, {"messages": "x"}, {"messages": [None]}):
        assert isinstance(opening(odd), bytes)


def test_choices_are_the_same_in_every_process() -> None:
    """Catches: names of blocks by Python's own hash, which differs from process to process."""
    code = (
        "import json; from rapid_llm.server.routing import blocks_of, opening; "
        "print(json.dumps([n.hex() for n in blocks_of(opening({'prompt': 'a' * 600}))]))"
    )
    seeds = ({**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2"))
    runs = [subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True) for env in seeds]
    assert runs[0].stdout == runs[1].stdout
    assert len(json.loads(runs[0].stdout)) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [({"count": 0}, "count=0"), ({"count": 2, "most_ahead": -1}, "most_ahead=-1"), ({"count": True}, "count=True")],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, int], said: str) -> None:
    """Catches: a router without replicas, and an end of a request that never began."""
    with pytest.raises(ValueError, match=said):
        Router(**options)
    with pytest.raises(RuntimeError, match="replica 0 has no request"):
        Router(1).end(0)

"""The detokeniser: bytes that arrive in pieces, and stop strings found in what they make."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.text.detok import Detokenizer
from rapid_llm.engine.text.tokenizer import Tokenizer

from .tiny import END, FIRST_BYTE, tokenizer


class Words:
    """A vocabulary given as texts; those in brackets are control tokens."""

    def __init__(self, *texts: str | bytes) -> None:
        self.texts = [t.encode() if isinstance(t, str) else t for t in texts]

    def token_bytes(self, token_id: int) -> bytes:
        return self.texts[token_id]

    def is_control(self, token_id: int) -> bool:
        return self.texts[token_id].startswith(b"[")


def run(detok: Detokenizer, ids: list[int]) -> list[str]:
    """Deltas of all ids up to a stop, and of the end."""
    deltas = []
    for token in ids:
        deltas.append(detok.push(token))
        if detok.stop_reason is not None:
            break
    deltas.append(detok.finish())
    assert "".join(deltas) == detok.text
    return deltas


def said(words: list[str], **options: object) -> tuple[list[str], str | None]:
    """Deltas and stop reason for these words, each one token."""
    detok = Detokenizer(Words(*words), **options)  # type: ignore[arg-type]
    return run(detok, list(range(len(words)))), detok.stop_reason


def broken_tokens(tok: Tokenizer) -> list[int]:
    """Ids whose bytes are not UTF-8 on their own."""
    return [
        t for t in range(tok.vocab_size) if tok.token_bytes(t).decode(errors="ignore").encode() != tok.token_bytes(t)
    ]


@pytest.mark.model
@pytest.mark.parametrize(("ids", "char"), [([10813, 121, 250], "\U0001fae0"), ([180, 139, 246], "\u9f9c")])
def test_a_character_in_three_tokens(smollm2: Tokenizer, ids: list[int], char: str) -> None:
    """E1: catches replacement characters in a stream."""
    assert run(Detokenizer(smollm2), ids) == ["", "", char, ""]


@pytest.mark.model
def test_interleaved_sequences(smollm2: Tokenizer) -> None:
    """E2: catches state shared between sequences."""
    first, second = Detokenizer(smollm2), Detokenizer(smollm2)
    for one, two in zip([10813, 121, 250], [180, 139, 246], strict=True):
        first.push(one)
        second.push(two)
    assert (first.finish(), first.text) == ("", "\U0001fae0")
    assert (second.finish(), second.text) == ("", "\u9f9c")


@pytest.mark.model
def test_each_token_that_is_not_utf8(smollm2: Tokenizer) -> None:
    """E3, E5: catches an exception, or text that JSON cannot hold, for a byte token alone and before an `a`."""
    letter = smollm2.encode("a")
    count = 0
    for token in broken_tokens(smollm2):
        count += 1
        for ids in ([token], [token, *letter]):
            text = "".join(run(Detokenizer(smollm2), ids))
            assert text == b"".join(map(smollm2.token_bytes, ids)).decode(errors="replace")
            text.encode()
    assert count == 313


@pytest.mark.model
@pytest.mark.parametrize("skip", [True, False])
def test_one_by_one_is_all_at_once(smollm2: Tokenizer, skip: bool) -> None:
    """E9: catches anything that depends on how ids are grouped; 1,000 random lists, half of them of broken tokens."""
    rng = random.Random(9)
    broken = broken_tokens(smollm2)
    for round_ in range(1000):
        pool = broken if round_ % 2 else range(smollm2.vocab_size)
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 40))]
        deltas = run(Detokenizer(smollm2, skip_special_tokens=skip), ids)
        assert "".join(deltas) == smollm2.decode(ids, skip_special_tokens=skip)
        held = Detokenizer(smollm2, stop=["\x00never"], skip_special_tokens=skip)
        run(held, ids)
        assert held.text == "".join(deltas)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=24), st.lists(st.integers(1, 4), max_size=24))
def test_any_bytes_in_any_pieces(data: bytes, sizes: list[int]) -> None:
    """Catches an incremental decoder whose pieces differ from one decoding of all bytes (maximal subparts)."""
    pieces = []
    rest = data
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    pieces.append(rest)
    deltas = run(Detokenizer(Words(*pieces), skip_special_tokens=False), list(range(len(pieces))))
    assert "".join(deltas) == data.decode(errors="replace")


def test_half_a_character_at_the_end_comes_once_it_is_final() -> None:
    """Catches a lost tail, and U+FFFD sent while the character could still be completed."""
    detok = Detokenizer(tokenizer())
    assert [detok.push(FIRST_BYTE + b) for b in b"a\xf0\x9f"] == ["a", "", ""]
    assert detok.finish() == "\ufffd"


@pytest.mark.model
def test_stop_over_four_tokens(smollm2: Tokenizer) -> None:
    """E10: catches a stop string that leaks because no single token holds it."""
    detok = Detokenizer(smollm2, stop=["\n\nUser:"])
    assert run(detok, [198, 198, 11126, 42]) == [""] * 5
    assert detok.stop_reason == "\n\nUser:"


def test_holds_only_what_may_become_a_stop() -> None:
    """E11: catches a fixed hold-back of the stop's length, and a tail lost at the end."""
    assert said(["xa", "b", "d", "ab"], stop=["abc"]) == (["x", "", "abd", "", "ab"], None)


def test_text_behind_a_stop_is_cut() -> None:
    """Catches the rest of the stop's own token in the text."""
    assert said(["hi a", "bc tail", "more"], stop=["abc"]) == (["hi ", "", ""], "abc")


def test_include_stop() -> None:
    """Catches a stop string shown in part or twice, and what follows it in the same token."""
    assert said(["hi a", "bc tail"], stop=["abc"], include_stop=True) == (["hi ", "abc", ""], "abc")


@pytest.mark.parametrize(
    ("words", "stop", "text", "reason"),
    [
        (["abc"], ["b", "abc"], "a", "b"),  # completed first
        (["a", "b", "c"], ["b", "abc"], "a", "b"),
        (["xabc"], ["bc", "abc"], "x", "abc"),  # completed by the same character: the longer
        (["aaab"], ["aab"], "a", "aab"),  # overlapping with its own beginning
        (["a", "ba", "b", "ac"], ["abac"], "ab", "abac"),
        (["ab", "ab"], ["abc"], "abab", None),
        (["日", "本", "語"], ["本語"], "日", "本語"),
    ],
)
def test_which_stop(words: list[str], stop: list[str], text: str, reason: str | None) -> None:
    """Catches a result that depends on the order of stops or on how text was cut into tokens."""
    for order in (stop, stop[::-1]):
        deltas, found = said(words, stop=order)
        assert ("".join(deltas), found) == (text, reason)


def test_stop_in_bytes_of_a_split_character() -> None:
    """Catches matching on tokens or on undecoded bytes."""
    detok = Detokenizer(tokenizer(), stop=["é!"])
    assert run(detok, [FIRST_BYTE + b for b in "aé!b".encode()]) == ["a", "", "", "", ""]


@pytest.mark.parametrize("include", [False, True])
def test_stop_named_like_a_control_token(include: bool) -> None:
    """E14: catches a hidden control token that never matches, so that generation runs on."""
    deltas, reason = said(["hi", "[end]", "more"], stop=["[end]"], include_stop=include)
    assert ("".join(deltas), reason) == ("hi[end]" if include else "hi", "[end]")


def test_stop_over_hidden_tokens() -> None:
    """Catches a stop that a hidden token breaks: in the shown text it stands whole, and with names spelled out too."""
    assert said(["a", "[x]", "b", "c"], stop=["ab"])[1] == "ab"
    assert said(["a", "[x]", "b", "c"], stop=["a[x]b"]) == (["", "", "", ""], "a[x]b")
    assert said(["a", "[x]", "c"], stop=["a[x]b"]) == (["", "", "ac", ""], None)


def test_hidden_and_shown_control_tokens() -> None:
    """E15: catches text cut by the length of a control token that was not shown."""
    assert said(["END", "[eos]"]) == (["END", "", ""], None)
    assert said(["END", "[eos]"], skip_special_tokens=False) == (["END", "[eos]", ""], None)


def test_the_stop_token_itself() -> None:
    """E15: catches `:` in the text after stop_token_ids=[its id], and its absence where it is to be included."""
    vocabulary = Words("END", ":", "[eos]")
    for token, include, shown in ((1, False, ""), (1, True, ":"), (2, True, ""), (2, False, "")):
        detok = Detokenizer(vocabulary, include_stop=include)
        assert detok.push(0) + detok.push_stop_token(token) + detok.finish() == "END" + shown


def test_min_tokens() -> None:
    """Catches a stop that counts too early, one that is missed later, and text held for a stop that did not count."""
    assert said(["a", "a", "a", "b"], stop=["a"], min_tokens=2) == (["a", "a", "", ""], "a")
    assert said(["ab", "ab"], stop=["ab"], min_tokens=1) == (["ab", "", ""], "ab")
    assert said(["a", "b", "c"], stop=["ab"], min_tokens=1) == (["", "", ""], "ab")
    assert said(["a", "b", "c"], stop=["ab"], min_tokens=2) == (["", "ab", "c", ""], None)


def test_nothing_after_a_stop() -> None:
    """Catches text that comes out of pushes after the end, as a caller that runs ahead makes them."""
    detok = Detokenizer(Words("ab", "x"), stop=["b"])
    assert (detok.push(0), detok.push(1), detok.finish(), detok.text) == ("a", "", "", "a")


def test_options_come_from_the_parameters() -> None:
    """Catches a parameter that is accepted and not handed on."""
    params = SamplingParams(stop="b", min_tokens=1, include_stop_str_in_output=True, skip_special_tokens=False)
    detok = Detokenizer.of(Words("b", "[x]", "ab"), params)
    assert run(detok, [0, 1, 2]) == ["b", "[x]", "ab", ""]
    assert detok.stop_reason == "b"
    hidden = Detokenizer.of(tokenizer(), SamplingParams())
    assert hidden.push(END) == ""


TEXTS = ("a", "b", "ab", "ba", "<", ">", "b>", "[a]", "[")


def slow(words: list[str], stops: list[str]) -> tuple[str, str | None]:
    """What stops mean, written without any automaton: look at every prefix of the characters."""
    chars = [(c, not word.startswith("[")) for word in words for c in word]
    for end in range(1, len(chars) + 1):
        shown_at = [i for i in range(end) if chars[i][1]]
        full, shown = "".join(c for c, _ in chars[:end]), "".join(chars[i][0] for i in shown_at)
        found = [(end - len(s), s) for s in stops if full.endswith(s)]
        if chars[end - 1][1]:
            found += [(shown_at[len(shown) - len(s)], s) for s in stops if shown.endswith(s)]
        if found:
            start, stop = min(found)
            return "".join(c for c, is_shown in chars[:start] if is_shown), stop
    return "".join(c for c, is_shown in chars if is_shown), None


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(st.sampled_from(TEXTS), max_size=9),
    st.lists(st.text("ab<>[]", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_against_a_slow_search(words: list[str], stops: list[str]) -> None:
    """Catches any error of the automata, of positions in the two streams, or of what is held back."""
    deltas, reason = said(words, stop=stops)
    assert ("".join(deltas), reason) == slow(words, stops)

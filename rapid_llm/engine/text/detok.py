"""Token ids to text, one by one, with stop strings.

A token is bytes and may end inside a character, so bytes go through an incremental UTF-8 decoder: the pieces that come
out join to exactly what decoding all bytes at once gives, whatever the order of calls, and never hold half a character.
Bytes that cannot be UTF-8 become U+FFFD, those of an unfinished character only when the sequence ends.

Text is held back only while it may still turn into a stop string: as long as the longest ending that begins one. Each
stop string has a Knuth-Morris-Pratt automaton whose state is that length, so a character costs constant time, and a
stop counts from the character that completes it, however the text was cut into tokens.

Control tokens that are not shown still take part: a stop string may name one (`<|im_end|>`). They are matched in a
second stream, the text with control tokens spelled out, which exists from the first hidden token on. A stop found in
either ends the sequence, so neither the shown text nor the full one ever runs past it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from rapid_llm.engine.params import SamplingParams


class Vocabulary(Protocol):
    """What is asked of a tokenizer here."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""

    def is_control(self, token_id: int) -> bool:
        """Whether the token is left out of the text by `skip_special_tokens`."""


class _Matcher:
    """One stop string. `state` is the length of the longest ending of the text so far that begins `pattern`."""

    __slots__ = ("fall", "pattern", "state")

    def __init__(self, pattern: str, fall: list[int] | None = None, state: int = 0) -> None:
        self.pattern = pattern
        self.fall = _fall_table(pattern) if fall is None else fall
        self.state = state

    def step(self, char: str) -> bool:
        """Take one character; True if it completes the pattern, whose longest proper border is then the state."""
        state, pattern = self.state, self.pattern
        while state and pattern[state] != char:
            state = self.fall[state - 1]
        if pattern[state] == char:
            state += 1
        complete = state == len(pattern)
        self.state = self.fall[state - 1] if complete else state
        return complete

    def copy(self) -> _Matcher:
        return _Matcher(self.pattern, self.fall, self.state)


def _fall_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    border = 0
    for i in range(1, len(pattern)):
        while border and pattern[border] != pattern[i]:
            border = table[border - 1]
        if pattern[border] == pattern[i]:
            border += 1
        table[i] = border
    return table


class Detokenizer:
    """The text of one output sequence, as its tokens arrive.

    stop: strings that end the text; the one completed first wins, of two completed by the same character the longer.
    min_tokens: a stop string completed within this many first tokens does not count. include_stop: leave the stop
    string, or the text of the stop token, in the text. skip_special_tokens: control tokens leave no text.

    After each `push`, `stop_reason` is the stop string found, or None; once it is set, nothing more comes out.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._shown = [_Matcher(s) for s in stop]
        self._full: list[_Matcher] = []
        self._held = ""
        self._is_shown: list[bool] = []  # one flag for each held character, kept from the first hidden token on
        self._pieces: list[str] = []
        self._tokens = 0
        self.stop_reason: str | None = None

    @classmethod
    def of(cls, vocabulary: Vocabulary, params: SamplingParams) -> Detokenizer:
        """A detokenizer for one sequence of a request."""
        return cls(
            vocabulary,
            stop=params.stop_strings,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    @property
    def text(self) -> str:
        """Everything that has come out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now certain, often empty. The token may set `stop_reason`."""
        self._tokens += 1
        if self.stop_reason is not None:
            return ""
        data = self._vocabulary.token_bytes(token_id)
        if not (self._skip_special and self._vocabulary.is_control(token_id)):
            return self._emit(self._take(self._decoder.decode(data), shown=True))
        if not self._shown:
            return ""
        if not self._full:
            self._full = [m.copy() for m in self._shown]
            self._is_shown = [True] * len(self._held)
        return self._emit(self._take(data.decode(errors="replace"), shown=False))

    def push_stop_token(self, token_id: int) -> str:
        """Take the token that ended the sequence (EOS, or one of `stop_token_ids`): its text shows only if included."""
        return self.push(token_id) if self._include_stop else ""

    def finish(self) -> str:
        """End the sequence: returns what was held back, with an unfinished character as U+FFFD."""
        if self.stop_reason is not None:
            return ""
        text = self._take(self._decoder.decode(b"", final=True), shown=True)
        if self.stop_reason is None:
            text += self._release(0)
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _take(self, text: str, *, shown: bool) -> str:
        """Run `text` through the matchers; returns what may be shown now."""
        if not self._shown:
            return text
        armed = self._tokens > self._min_tokens
        before = len(self._held)
        self._held += text
        if self._full:
            self._is_shown += [shown] * len(text)
        for end, char in enumerate(text, before + 1):
            found = [(end - len(m.pattern), m.pattern) for m in self._full if m.step(char)]
            if shown:
                found += [(self._back(len(m.pattern), end), m.pattern) for m in self._shown if m.step(char)]
            if found and armed:
                start, self.stop_reason = min(found)
                self._held, self._is_shown = self._held[:start], self._is_shown[:start]
                return self._release(0) + (self.stop_reason if self._include_stop else "")
        return self._release(self._hold())

    def _hold(self) -> int:
        """How many held characters may still belong to a stop string."""
        longest = max(m.state for m in self._shown)
        hold = len(self._held) - self._back(longest, len(self._held))
        return max([hold, *(m.state for m in self._full)])

    def _back(self, count: int, end: int) -> int:
        """The position where the last `count` shown characters before `end` begin."""
        if not self._full:
            return end - count
        position = end
        while count:
            position -= 1
            count -= self._is_shown[position]
        return position

    def _release(self, keep: int) -> str:
        """Let go of all held text but the last `keep` characters; returns the part that is shown."""
        cut = len(self._held) - keep
        text = self._held[:cut]
        if self._full:
            text = "".join(c for c, is_shown in zip(text, self._is_shown, strict=False) if is_shown)
            self._is_shown = self._is_shown[cut:]
        self._held = self._held[cut:]
        return text

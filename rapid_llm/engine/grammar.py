"""From what an answer must look like to the tokens that may come next, by the library llguidance.

A structure is compiled once for a tokenizer and kept; each sequence walks its own copy. Invariant: a `Constraint` has
taken exactly the tokens of its sequence's output. The library is imported with the first structured request, and
whatever is wrong with the structure is found before the request runs.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from rapid_llm.kernels.registry.forking import Lock

from .checks import ParameterError
from .structured import FIELD, StructuredOutput

INSTALL: Final = "pip install 'llguidance>=1.9,<2'"
MAX_KEPT: Final = 64
"""Compiled structures of one tokenizer; the one that was used longest ago goes first."""

_JSON: Final = {"whitespace_pattern": r"[ \n\t]{0,32}"}
"""Between a JSON document's parts. Bounded, or a small model may write blanks for ever."""

_log = logging.getLogger(__name__)


class GrammarVocabulary(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_ids(self) -> Iterable[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_control(self, token_id: int) -> bool: ...
    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]: ...


class Constraint:
    """Where one sequence is in its structure.

    ends: ids of end tokens. complete: the structure is whole and nothing may follow it. error: why the structure cannot
    be followed any further (a limit of the library's), None while it can; then no token is allowed.
    """

    __slots__ = ("_matcher", "ends", "error", "words")

    def __init__(self, matcher: Any, words: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self.words = words
        self.ends = ends
        self.error: str | None = None

    @property
    def complete(self) -> bool:
        return self.error is None and bool(self._matcher.is_stopped())

    def copy(self) -> Constraint:
        """The same place, for another sequence."""
        return Constraint(self._matcher.deep_copy(), self.words, self.ends)

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next: (words,) int32, contiguous; bit i % 32 of word i // 32 is token i."""
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._note_error()
        if self.error is not None:
            row[:] = 0

    def allowed(self) -> list[int]:
        """Ids of the tokens that may come next."""
        row = np.zeros(self.words, dtype=np.int32)
        self.fill(row)
        return [int(token) for token in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]

    def may_go_on(self) -> bool:
        """Whether any token but an end may come next. The library notices some ends late: `complete` is False then."""
        return not self.ends.issuperset(self.allowed())

    def advance(self, token: int) -> None:
        """Take the next token of the output, which must be one of the allowed."""
        if self.error is None and not self._matcher.consume_token(token):
            self._note_error()
            self.error = self.error or f"token {token} does not fit the structure"

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens. Raises `ValueError` if there are not so many, or after an error."""
        if self.error is not None or not self._matcher.rollback(count):
            raise ValueError(f"cannot take back {count} tokens: {self.error or self._matcher.get_error()}")

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = f"the structure cannot be followed: {_first_line(self._matcher.get_error())}"


class Grammars:
    """The compiled structures of one tokenizer. Safe to use from several threads."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Constraint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, structure: StructuredOutput) -> Constraint:
        """The beginning of `structure`; compiled if it is new.

        Raises `ParameterError` for a structure that the library cannot read or that no text but the empty one fits,
        and where the library is not installed.
        """
        key = (structure.form, structure.source)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = self._compile(structure)
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return found.copy()

    def _compile(self, structure: StructuredOutput) -> Constraint:
        library = _library(structure)
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(library, self._vocabulary, structure)
        field, source = f"{FIELD}.{structure.form}", structure.source
        try:
            grammar = _READERS[structure.form](library, source)
        except Exception as error:  # the converter of GBNF raises what it likes
            raise ParameterError(field, source, f"one that can be read: {_first_line(str(error))}") from error
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ParameterError(field, source, f"one that can be read: {_first_line(matcher.get_error())}")
        for warning in matcher.get_grammar_warnings():
            _log.warning("%s: %s", field, warning)
        ends = frozenset(self._vocabulary.end_ids)
        constraint = Constraint(matcher, (self._vocabulary.vocab_size + 31) // 32, ends)
        goes_on = constraint.may_go_on()
        if constraint.error is not None:
            raise ParameterError(field, source, f"one that some text fits; {constraint.error}")
        if not goes_on:
            raise ParameterError(field, source, "one that some text fits; only the empty one does here")
        return constraint


def _gbnf(library: Any, source: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return str(library.LLMatcher.grammar_from_lark(any_to_lark(source)))


def _json(library: Any, source: str) -> str:
    return str(library.LLMatcher.grammar_from_json_schema(source, overrides=_JSON))


_READERS: Final[dict[str, Callable[[Any, str], str]]] = {
    "json_schema": _json,
    "json_object": _json,
    "regex": lambda library, source: str(library.LLMatcher.grammar_from_regex(source)),
    "choices": lambda library, source: str(library.grammar_from("choice", source)),
    "grammar": _gbnf,
}
"""Form -> the library's own notation."""


class _Words:
    """A vocabulary in the shape in which the library reads one.

    Where the structure leaves one text alone, the library asks for the tokens that the tokenizer makes of it, and
    allows no others: a model knows those best.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: GrammarVocabulary, ends: list[int]) -> None:
        ids = range(vocabulary.vocab_size)
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.tokens = [vocabulary.token_bytes(token) for token in ids]
        self.special_token_ids = [token for token in ids if vocabulary.is_control(token)]
        special = frozenset(self.special_token_ids)
        self._ids = {word: token for token, word in enumerate(self.tokens) if word and token not in special}
        self._longest = max(map(len, self._ids), default=0)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids = self._encode(data.decode(errors="replace"), parse_special=False, add_bos=False)
        # a tokenizer may put a blank in front, or leave out what it has no token for; bytes may be half a character
        return ids if b"".join(self.tokens[token] for token in ids) == data else self._cut(data)

    def _cut(self, data: bytes) -> list[int]:
        """The longest token that fits, then the next; as far as there is one."""
        ids, begin = [], 0
        while begin < len(data):
            sizes = range(min(self._longest, len(data) - begin), 0, -1)
            size = next((n for n in sizes if data[begin : begin + n] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[begin : begin + size]])
            begin += size
        return ids


def _tokenizer(library: Any, vocabulary: GrammarVocabulary, structure: StructuredOutput) -> Any:
    ends = sorted(token for token in vocabulary.end_ids if token < vocabulary.vocab_size)
    if not ends:
        raise ParameterError(FIELD, structure, "None: this model's tokenizer names no token that ends an answer")
    return library.LLTokenizer(_Words(vocabulary, ends), n_vocab=vocabulary.vocab_size, eos_token=ends)


def _library(structure: StructuredOutput) -> Any:
    try:
        import llguidance
    except ImportError as error:
        what = f"None, or install the library that structured output needs: {INSTALL}"
        raise ParameterError(FIELD, structure, what) from error
    return llguidance


def _first_line(text: str) -> str:
    """The part of the library's message that is about the source; a dump of its state may follow."""
    lines = [line.strip() for line in text.split("<state>")[0].splitlines() if line.strip()]
    said = " ".join(lines)
    return said if len(said) <= 300 else said[:297] + "..."

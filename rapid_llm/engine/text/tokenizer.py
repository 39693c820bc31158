"""Text to token ids and back, from the vocabulary of a model's file or folder.

Control tokens (`<|im_end|>` and its kind) are cut out of the text here, before the encoder sees it, and the encoder is
built without them. So whether text may become a control token is decided at one place, and text that must not (the
content of a chat message) cannot become one by any route.

Tokens are bytes: one token may hold half a character. Whoever turns ids into text one by one uses `detok`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from rapid_llm.models.errors import ModelError

BYTE_LEVEL: Final = "bytes"
"""Spelling of GPT-2's kind: each character of a token's text stands for a byte."""

SPACES: Final = "spaces"
"""Spelling of SentencePiece's kind: plain text, U+2581 for a space, `<0x0A>` for a byte."""

_WHITE: Final = re.compile(r"\s+")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class UnsupportedTokenizerError(ModelError):
    """The tokenizer is of a kind that is not read; the text names the key and the known values."""


def byte_symbols() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = MappingProxyType(byte_symbols())


def require_text(text: object, what: str = "text") -> str:
    """`text` itself if it is a str that UTF-8 can hold; a lone surrogate (half of a broken JSON escape) is an error."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}: {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds a lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, which is not "
            "text; send the whole character, or replace it"
        ) from None
    return text


class Tokenizer:
    """A byte-pair tokenizer, of GPT-2's kind or SentencePiece's.

    backend: encodes plain text, and knows no control token. tokens: the text of every id as the file holds it. control:
    ids of control tokens (never made from ordinary text, not shown in output). bos_id, eos_id: None where the file
    names none. end_ids: ids that end an answer (EOS, end of turn, end of message). add_bos: a prompt starts with BOS.
    chat_template: Jinja source, or None. spelling: `BYTE_LEVEL` or `SPACES`. strips: control tokens that swallow the
    white space (before, behind) them. later: encodes text behind a control token, where that differs from the first.

    Bytes that the vocabulary has no token for (a few control characters, in SmolLM2's) leave no id, as in the
    implementation that the model was trained with.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        tokens: Sequence[str],
        control: Iterable[int],
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        spelling: str = BYTE_LEVEL,
        strips: Mapping[int, tuple[bool, bool]] = MappingProxyType({}),
        later: tokenizers.Tokenizer | None = None,
    ) -> None:
        self._backend = backend
        self._later = backend if later is None else later
        self.tokens = tokens
        self.control = frozenset(control)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.end_ids = frozenset(end_ids)
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.spelling = spelling
        self._strips = strips
        self._bytes: dict[int, bytes] = {}
        self._control_ids = {tokens[i]: i for i in sorted(self.control)}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata (key -> value). Raises `MetadataError` or `UnsupportedTokenizerError`."""
        from .gguf_vocab import build

        return build(metadata)

    @classmethod
    def from_folder(cls, folder: Path, *, limit: int | None = None) -> Tokenizer:
        """Build from a folder's `tokenizer.json` and the files beside it.

        limit: rows of the model's embedding table. Added tokens beyond are left out, aloud: no row is theirs. Raises
        `MetadataError` or `UnsupportedTokenizerError`, with the file and the key.
        """
        from .folder_vocab import build

        return build(folder, limit)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; valid ids are 0 to this, exclusive."""
        return len(self.tokens)

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The text of every control token, longest first; empty texts left out."""
        return tuple(sorted(filter(None, self._control_ids), key=len, reverse=True))

    @cached_property
    def _control_pattern(self) -> str:
        return "|".join(map(re.escape, self.control_texts))

    def encode(
        self, text: str, *, parse_special: bool = True, add_bos: bool | None = None, mark: str = ""
    ) -> list[int]:
        """Token ids of `text`, str to list of int.

        parse_special: text that spells a control token becomes that token. add_bos: put BOS in front unless the text
        starts with it already, so that there is never a second one; None does as the file says. mark: a character that
        forbids the control token spelled right behind it, and is then taken out (see `chat`).

        Raises `TypeError` for anything but str, `ValueError` for a lone surrogate.
        """
        require_text(text, "prompt")
        ids: list[int] = []
        backend = self._backend
        for part in self._parts(text, parse_special, mark):
            if isinstance(part, int):
                ids.append(part)
                backend = self._later
            elif part:
                ids += backend.encode(part, add_special_tokens=False).ids
                backend = self._later
        add_bos = self.add_bos if add_bos is None else add_bos
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _parts(self, text: str, parse_special: bool, mark: str) -> Iterable[str | int]:
        """Plain stretches and control ids of `text`, in order."""
        start = 0
        if parse_special and self.control_texts:
            allowed = f"(?<!{re.escape(mark)})" if mark else ""
            for match in re.finditer(f"{allowed}(?:{self._control_pattern})", text):  # compiled once: `re` caches
                token, plain = self._control_ids[match[0]], text[start : match.start()]
                before, behind = self._strips.get(token, (False, False))
                yield _without(plain.rstrip() if before else plain, mark)
                yield token
                start = match.end()
                if behind and (spaces := _WHITE.match(text, start)):
                    start = spaces.end()
        yield _without(text[start:], mark)

    def check_ids(self, ids: Iterable[int], what: str = "prompt") -> list[int]:
        """`ids` as a list of int; raises `ValueError` naming the first that is no id of this vocabulary."""
        checked: list[int] = []
        for position, token in enumerate(ids):
            is_int = isinstance(token, Integral) and not isinstance(token, bool)
            if not is_int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{what}: {token!r:.40} at position {position} is not a token id; "
                    f"ids are integers from 0 to {self.vocab_size - 1}"
                )
            checked.append(int(token))
        return checked

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a control token."""
        return token_id in self.control

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a control token's are its name in UTF-8."""
        found = self._bytes.get(token_id)
        if found is None:
            self.check_ids((token_id,), "token")
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self.tokens[token_id]
        if token_id in self.control:
            return token.encode()
        if self.spelling == SPACES:
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes.fromhex(match[1])
            return token.replace("\u2581", " ").encode()
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:  # a token that was added as plain text, outside the byte alphabet
            return token.encode()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, all at once. Bytes that are not UTF-8 become U+FFFD; control tokens can be left out.

        It is the text that continues another: the space that SentencePiece puts before a whole text stays.
        """
        shown = (i for i in self.check_ids(ids, "ids") if not (skip_special_tokens and i in self.control))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "") if mark else text

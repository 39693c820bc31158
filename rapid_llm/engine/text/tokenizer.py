"""Text to token ids and back, from the vocabulary inside a GGUF file.

Control tokens (`<|im_end|>` and its kind) are cut out of the text here, before the byte-pair encoder sees it, and the
encoder is built without them. So whether text may become a control token is decided at one place, and text that must
not (the content of a chat message) cannot become one by any route.

Tokens are bytes: one token may hold half a character. Whoever turns ids into text one by one uses `detok`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from rapid_llm.models.errors import MetadataError, ModelError

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4


class UnsupportedTokenizerError(ModelError):
    """The file's tokenizer is of a kind that is not read; the text names the metadata key and the known values."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into words before merges apply, and what comes with it.

    split: pattern of words; None is GPT-2's own. digits: every digit (Unicode N) is a word. ignore_merges: a word that
    is a token as a whole is that token. add_bos: whether a prompt starts with BOS where the file does not say. nfc: the
    text is brought into Unicode's NFC form first.
    """

    split: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> Any:
        """The `tokenizers` object."""
        steps: list[Any] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.split is not None:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(self.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.split is None))
        return pre_tokenizers.Sequence(steps)


def _words(digits: str) -> str:
    """The pattern that Llama 3 and Qwen 2 share but for the number of digits in a word."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(split=_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(split=_words(r"\p{N}"), nfc=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {
        "gpt-2": _GPT2,
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": _SINGLE_DIGITS,
        "llama-bpe": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }
)
"""`tokenizer.ggml.pre` -> recipe. A name that is missing is an error: a wrong guess gives wrong ids in silence."""


def _byte_symbols() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF: Final = MappingProxyType(_byte_symbols())


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
    """A byte-level BPE tokenizer.

    tokens: the text of every id as the file holds it. control: ids of control tokens (never made from ordinary text,
    not shown in output). bos_id, eos_id: None where the file names none. end_ids: ids that end an answer (EOS, end of
    turn, end of message). add_bos: a prompt starts with BOS. chat_template: Jinja source, or None.

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
    ) -> None:
        self._backend = backend
        self.tokens = tokens
        self.control = frozenset(control)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.end_ids = frozenset(end_ids)
        self.add_bos = add_bos
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}
        self._control_ids = {tokens[i]: i for i in sorted(self.control)}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata (key -> value). Raises `MetadataError` or `UnsupportedTokenizerError`."""
        pre = _recipe(metadata)
        tokens, kinds = _vocabulary(metadata)
        control = [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
        special = frozenset(control)
        vocab = {token: i for i, token in enumerate(tokens) if i not in special}
        backend = tokenizers.Tokenizer(_bpe(vocab, metadata, pre))
        backend.pre_tokenizer = pre.build()
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        defined = [AddedToken(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == USER_DEFINED]
        backend.add_tokens(defined)
        ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
        return cls(
            backend,
            tokens,
            control,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            end_ids=[i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None],
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

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
        for part in self._parts(text, parse_special, mark):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self._backend.encode(part, add_special_tokens=False).ids
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
                yield _without(text[start : match.start()], mark)
                yield self._control_ids[match[0]]
                start = match.end()
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
        if token_id not in self.control:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:  # a token that was added as plain text, outside the byte alphabet
                pass
        return token.encode()

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, all at once. Bytes that are not UTF-8 become U+FFFD; control tokens can be left out."""
        shown = (i for i in self.check_ids(ids, "ids") if not (skip_special_tokens and i in self.control))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "") if mark else text


def _recipe(metadata: Mapping[str, Any]) -> PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.model={model!r} is not supported; known: 'gpt2' (byte-level BPE)"
        )
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.pre={name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}. A file without it was "
            "made by an old converter: convert the model again"
        )
    return PRE_TOKENIZERS[name]


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[int]]:
    tokens, kinds = _array(metadata, "tokens"), _array(metadata, "token_type")
    if len(tokens) != len(kinds):
        raise MetadataError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise MetadataError(f"tokenizer.ggml.tokens holds {twice!r} more than once")
    return tokens, kinds


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None or len(value) == 0:
        raise MetadataError(f"{key} is missing or empty; the file holds no usable vocabulary")
    return tuple(value)


def _bpe(vocab: dict[str, int], metadata: Mapping[str, Any], pre: PreTokenizer) -> Any:
    merges = [tuple(pair.split(" ", 1)) for pair in _array(metadata, "merges")]
    wrong = next((pair for pair in merges if len(pair) != 2), None)
    if wrong is not None:
        raise MetadataError(f"tokenizer.ggml.merges holds {wrong[0]!r}, which is not two tokens with a space between")
    try:
        return models.BPE(vocab, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise MetadataError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not 0 <= value < count:
        raise MetadataError(f"{key}={value} is outside the vocabulary of {count} tokens")
    return value

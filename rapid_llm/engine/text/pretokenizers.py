"""How text is cut into words before merges apply: one recipe for each name that a GGUF file may give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import pre_tokenizers


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


_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(split=_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(split=_words(r"\p{N}"), nfc=True)
_TEKKEN = PreTokenizer(split=_TEKKEN_WORDS, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {
        "gpt-2": _GPT2,
        "smollm": _SINGLE_DIGITS,
        "starcoder": _SINGLE_DIGITS,
        "refact": _SINGLE_DIGITS,
        "command-r": _SINGLE_DIGITS,
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _TEKKEN,
    }
)
"""`tokenizer.ggml.pre` -> recipe. A name that is missing is an error: a wrong guess gives wrong ids in silence."""

"""A tokenizer from a GGUF file's metadata: byte-level BPE (`gpt2`) and SentencePiece's BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models, normalizers

from rapid_llm.models.errors import MetadataError

from .pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .tokenizer import BYTE_LEVEL, SPACES, Tokenizer, UnsupportedTokenizerError

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

SPACE: Final = "\u2581"
"""What stands for a space in SentencePiece's vocabularies."""

_NO_STRIP: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Control tokens of Phi-3 that keep the white space behind them; its others swallow it, which GGUF cannot say."""


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """See `Tokenizer.from_gguf`."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedTokenizerError(
            f"tokenizer.ggml.model={model!r} is not supported; known: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        )
    pre = _recipe(metadata) if model == "gpt2" else PreTokenizer(add_bos=True)
    tokens, kinds = _vocabulary(metadata)
    control = [i for i, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN)]
    if model == "gpt2":
        backend = _byte_level(tokens, frozenset(control), metadata, pre)
    else:
        backend = _sentencepiece(tokens, kinds, metadata)
    backend.add_tokens(
        [AddedToken(tokens[i], normalized=False) for i, kind in enumerate(kinds) if kind == USER_DEFINED]
    )
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    return Tokenizer(
        backend,
        tokens,
        control,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        end_ids=[i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None],
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos)),
        chat_template=metadata.get("tokenizer.chat_template"),
        spelling=BYTE_LEVEL if model == "gpt2" else SPACES,
        strips=_strips(metadata, tokens, kinds),
    )


def _recipe(metadata: Mapping[str, Any]) -> PreTokenizer:
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


def _byte_level(tokens: Sequence[str], control: frozenset[int], metadata: Mapping[str, Any], pre: PreTokenizer) -> Any:
    vocab = {token: i for i, token in enumerate(tokens) if i not in control}
    merges = [tuple(pair.split(" ", 1)) for pair in _array(metadata, "merges")]
    wrong = next((pair for pair in merges if len(pair) != 2), None)
    if wrong is not None:
        raise MetadataError(f"tokenizer.ggml.merges holds {wrong[0]!r}, which is not two tokens with a space between")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the library raises bare Exception
        raise MetadataError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend.pre_tokenizer = pre.build()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(tokens: Sequence[str], kinds: Sequence[int], metadata: Mapping[str, Any]) -> Any:
    """SentencePiece merges the pair whose piece has the highest score; a rank for each pair says the same.

    What no piece covers is spelled in byte tokens. Pieces that may not come out of text take part in no merge.
    """
    scores = _array(metadata, "scores")
    if len(scores) != len(tokens):
        raise MetadataError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {t: i for i, (t, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind not in (CONTROL, UNUSED)}
    mergeable = {t: scores[i] for t, i in vocab.items() if kinds[i] == NORMAL}
    pairs = [
        (score, piece[:at], piece[at:])
        for piece, score in mergeable.items()
        for at in range(1, len(piece))
        if piece[:at] in mergeable and piece[at:] in mergeable
    ]
    pairs.sort(key=lambda pair: -pair[0])
    unknown = next((tokens[i] for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
    model = models.BPE(vocab, [(a, b) for _, a, b in pairs], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise UnsupportedTokenizerError(
            "tokenizer.ggml.remove_extra_whitespaces=True is not supported: text would not come back as it was written"
        )
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _strips(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> dict[int, tuple[bool, bool]]:
    if metadata.get("general.architecture") != "phi3" or metadata.get("tokenizer.ggml.model") != "llama":
        return {}
    return {i: (False, True) for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] not in _NO_STRIP}


def _token_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not 0 <= value < count:
        raise MetadataError(f"{key}={value} is outside the vocabulary of {count} tokens")
    return value

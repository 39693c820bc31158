"""A tokenizer from a model's folder: `tokenizer.json`, and what the files beside it say of its special tokens.

`tokenizer.json` states how text is normalised, cut and merged, and is followed to the letter, but for one thing:
special tokens are taken out of the encoder, and so is BOS. `Tokenizer` places them itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from rapid_llm.models.errors import MetadataError
from rapid_llm.models.shards import read_json

from .tokenizer import BYTE_LEVEL, SPACES, Tokenizer, UnsupportedTokenizerError

MAIN: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
GENERATION: Final = "generation_config.json"
MODEL: Final = "config.json"
TEMPLATE: Final = "chat_template.jinja"

_log = logging.getLogger(__name__)
_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def build(folder: Path, limit: int | None = None) -> Tokenizer:
    """See `Tokenizer.from_folder`."""
    path = folder / MAIN
    if not path.is_file():
        raise UnsupportedTokenizerError(
            f"{folder} holds no {MAIN}; transformers makes one: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data, config = read_json(path), _optional(folder / CONFIG)
    added = _added(path, data, config)
    if limit is not None and (beyond := [token["content"] for i, token in added.items() if i >= limit]):
        _log.warning("%s: left out, for the model has no rows for them: %s", path, ", ".join(beyond))
        added = {i: token for i, token in added.items() if i < limit}
    tokens = _tokens(path, data, added)
    if limit is not None and len(tokens) > limit:
        raise MetadataError(f"{path} has {len(tokens)} tokens and the model {limit} rows: they are not of one model")
    ids = {text: i for i, text in enumerate(tokens) if text}
    special = {token["content"] for token in added.values() if token.get("special")} | set(_named(config))
    missing = sorted(text for text in special if text not in ids)
    control = [ids[text] for text in special if text in ids] + [i for i, text in enumerate(tokens) if not text]
    if missing and {_text(config.get(role)) for role in ("bos_token", "eos_token")} & set(missing):
        raise MetadataError(f"{folder / CONFIG} names {missing[0]!r}, which is no token of {path}")
    bos, eos = (ids.get(_text(config.get(role)) or "") for role in ("bos_token", "eos_token"))
    backend, later = _encoders(path, data, added, frozenset(control), tokens)
    return Tokenizer(
        backend,
        tokens,
        control,
        bos_id=bos,
        eos_id=eos,
        end_ids=_end_ids(folder, eos, len(tokens)),
        add_bos=_adds_bos(data, config, None if bos is None else tokens[bos]),
        chat_template=_template(folder, config),
        spelling=_spelling(path, data),
        strips={
            ids[t["content"]]: (bool(t.get("lstrip")), bool(t.get("rstrip")))
            for t in added.values()
            if t["content"] in special and (t.get("lstrip") or t.get("rstrip"))
        },
        later=later,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _added(path: Path, data: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Added tokens by id; where both files describe one, `tokenizer_config.json` has the last word."""
    stated = config.get("added_tokens_decoder", {})
    try:
        added = {int(token["id"]): dict(token) for token in data.get("added_tokens", [])}
        for key, token in stated.items():
            added[int(key)] = {**dict(token), "id": int(key)}
        for token in added.values():
            if not isinstance(token["content"], str) or not token["content"]:
                raise MetadataError(f"{path}: an added token has the content {token['content']!r}")
            if token.get("single_word"):
                raise UnsupportedTokenizerError(f"{path}: added token {token['content']!r} has single_word set")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, MetadataError | UnsupportedTokenizerError):
            raise
        raise MetadataError(f"{path}: the added tokens cannot be read: {type(error).__name__}: {error}") from error
    return added


def _tokens(path: Path, data: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The text of every id; ids that no token has are empty."""
    model = data.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or kind not in ("BPE", None) or not isinstance(model.get("vocab"), dict):
        raise UnsupportedTokenizerError(f"{path}: a tokenizer of type {kind!r} is not supported; known: BPE")
    by_id = {i: text for text, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    wrong = next((i for i in by_id if type(i) is not int or i < 0), None)
    if not by_id or wrong is not None:
        raise MetadataError(f"{path}: the vocabulary is empty or has the id {wrong!r}")
    size = max(by_id) + 1
    if size > 4 * len(by_id) + 65_536:
        raise MetadataError(f"{path}: the id {size - 1} is out of all proportion to {len(by_id)} tokens")
    return [by_id.get(i, "") for i in range(size)]


def _encoders(
    path: Path,
    data: Mapping[str, Any],
    added: Mapping[int, Mapping[str, Any]],
    control: frozenset[int],
    tokens: list[str],
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer | None]:
    """The encoder without control tokens, and the one for text behind one, where a prefix makes a difference."""
    model = dict(data["model"])
    unknown = model.get("unk_token")
    hidden = {tokens[i] for i in control} - {unknown}
    plain = {i: token for i, token in added.items() if i not in control}
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in hidden} | {
        token["content"]: i for i, token in plain.items()
    }
    if hidden and "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _allowed(pair, hidden | {unknown})]
    kept = {**data, "model": model, "added_tokens": [{**_FLAGS, **token} for _, token in sorted(plain.items())]}
    kept |= {"post_processor": None, "truncation": None, "padding": None}
    first = _load(path, kept)
    unprefixed = _without_prefix(kept.get("pre_tokenizer"))
    return first, None if unprefixed is None else _load(path, {**kept, "pre_tokenizer": unprefixed})


_FLAGS: Final = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def _allowed(pair: Any, hidden: set[str | None]) -> bool:
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return not hidden.intersection((left, right, left + right))


def _load(path: Path, data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises bare Exception
        raise MetadataError(f"{path} cannot be read as a tokenizer: {error}") from error


def _without_prefix(step: Any) -> Any:
    """The pre-tokenizer for text that doesn't start the prompt; None where it is the same.

    Metaspace with `first` puts a space before text at the start alone, and each stretch is encoded by itself here.
    """
    if not isinstance(step, dict):
        return None
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return {**step, "prepend_scheme": "never"}
    changed = [_without_prefix(inner) for inner in step.get("pretokenizers", ())]
    if not any(changed):
        return None
    return {**step, "pretokenizers": [new or old for new, old in zip(changed, step["pretokenizers"], strict=True)]}


def _spelling(path: Path, data: Mapping[str, Any]) -> str:
    kinds = {step.get("type") for step in _steps(data.get("decoder"), "decoders")}
    if "ByteLevel" in kinds:
        return BYTE_LEVEL
    if kinds & {"ByteFallback", "Metaspace"}:
        return SPACES
    raise UnsupportedTokenizerError(
        f"{path}: the decoder {sorted(map(str, kinds))} is not supported; known: ByteLevel, ByteFallback, Metaspace"
    )


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """A step and, where it is a sequence, its own steps."""
    if isinstance(step, dict):
        yield step
        for part in step.get(inner, ()):
            yield from _steps(part, inner)


def _adds_bos(data: Mapping[str, Any], config: Mapping[str, Any], bos: str | None) -> bool:
    """As `tokenizer_config.json` says, else whether the post-processor's template starts with BOS."""
    stated = config.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    for step in _steps(data.get("post_processor"), "processors"):
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and single and isinstance(single[0], dict):
            first = single[0].get("SpecialToken")
            return bos is not None and isinstance(first, dict) and first.get("id") == bos
    return False


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    """Every token that `tokenizer_config.json` gives a special part."""
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or ()
    listed: Iterable[Any] = more.values() if isinstance(more, dict) else more
    for value in (*(config.get(role) for role in _ROLES), *listed):
        if text := _text(value):
            yield text


def _text(value: Any) -> str | None:
    """A token given as text or as an object with its text."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _end_ids(folder: Path, eos: int | None, count: int) -> list[int]:
    """EOS of the tokenizer, and every id that the generation's and the model's configuration name."""
    found = {} if eos is None else {eos: None}
    for name in (GENERATION, MODEL):
        stated = _optional(folder / name).get("eos_token_id")
        for token in stated if isinstance(stated, list) else [] if stated is None else [stated]:
            if type(token) is not int or not 0 <= token < count:
                raise MetadataError(f"{folder / name}: eos_token_id={token!r} is no id of the {count} tokens")
            found[token] = None
    return list(found)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja`, else the text or the one named `default` in `tokenizer_config.json`."""
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stated = config.get("chat_template")
    if isinstance(stated, list):
        named = {t.get("name"): t.get("template") for t in stated if isinstance(t, dict)}
        stated = named.get("default")
    if stated is not None and not isinstance(stated, str):
        raise MetadataError(f"{folder / CONFIG}: chat_template is {stated!r:.60}, not text")
    return stated or None

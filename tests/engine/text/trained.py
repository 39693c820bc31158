"""Tiny tokenizers of each family's kind, trained here by the `tokenizers` package, as folders and as GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from .tiny import CHATML

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and it's the dog's 12345th day of rest.\n\n"
    "Naïve café owners (in São Paulo) can't say why; they'll ask \"who's there?\" and wait...\n"
    "def add(a, b):\n    return a + b  # adds 2 numbers\n\tx = add(1, 22)\r\n"
    "Быстрая лиса прыгает. 敏捷的棕色狐狸 跳过了懒狗。 🙂🙃 end END End theTheTHE\n"
) * 3

TEXTS = (
    "",
    " ",
    "hello the dog",
    "  two  spaces\n\n\n and\ttabs \r\n",
    "it's THE DOG'S 12345 3.14 x=add(1,22)",
    "naïve cafe\u0301 São 🙂🙃🫠 \ufffd 敏捷狐",
    "ends with space ",
    "\u2581under\u2581 the",
    "zq\x00\x07",
    "camelCase HTTPServer Über",
)
"""Texts with what tells pre-tokenizers apart, and with what the vocabulary lacks."""

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def special(text: str, **flags: Any) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def bos_first(made: tokenizers.Tokenizer) -> None:
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )


def byte_level(kind: str) -> tokenizers.Tokenizer:
    """As published for llama-bpe, qwen2 and smollm: their normaliser, words and flags over a vocabulary of 400."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")]
    if kind == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        words = LLAMA3_WORDS if kind == "llama-bpe" else QWEN2_WORDS
        steps.insert(0, pre_tokenizers.Split(Regex(words), "isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([CORPUS], trainer)
    made.add_special_tokens([special(text) for text in SPECIALS])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    if kind == "llama-bpe":
        bos_first(made)
    return made


def sentencepiece(prefix: str) -> tokenizers.Tokenizer:
    """As published for Llama 2 (prefix `always`), Mistral (`first`) and Gemma (`never`): BPE with byte fallback."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "\u2581")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("(?=\u2581)"), "isolated")
    learner.train_from_iterator([CORPUS.replace("🙂🙃", "")], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    heads = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {text: i for i, text in enumerate([*heads, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    if prefix == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = (
            normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix == "always" else replace
        )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([special(text) for text in ("<unk>", *SPECIALS)])
    made.add_tokens([AddedToken("<think>", normalized=False)])
    bos_first(made)
    return made


def folder(path: Path, made: tokenizers.Tokenizer, files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A model's folder around `made`; config: changes to `tokenizer_config.json`; files: more JSON files."""
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    stated = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHATML, **config}
    (path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))
    for name, data in (files or {}).items():
        (path / name).write_text(json.dumps(data))
    return path


def gguf_metadata(made: tokenizers.Tokenizer, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for `made`: kinds of tokens, and merges or, for SentencePiece, scores."""
    data = json.loads(made.to_str())
    by_id = {i: text for text, i in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, 1)
    for token in data["added_tokens"]:
        by_id[token["id"]] = token["content"]
        kinds[token["id"]] = 2 if token["content"] == "<unk>" else 3 if token["special"] else 4
    tokens = [by_id[i] for i in range(len(by_id))]
    found: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.chat_template": CHATML,
    }
    if data["model"]["byte_fallback"]:
        kinds |= {i: 6 for i, text in by_id.items() if text.startswith("<0x")}
        rank = {a + b: -float(r) for r, (a, b) in enumerate(data["model"]["merges"], 1)}
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [rank.get(t, -1e6) for t in tokens]}
    else:
        merges = [" ".join(pair) for pair in data["model"]["merges"]]
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    found["tokenizer.ggml.token_type"] = [kinds[i] for i in range(len(tokens))]
    return {**found, **changes}

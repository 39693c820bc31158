"""A tiny tokenizer in the form of a GGUF file's metadata: all 256 bytes, a few merges, two control tokens."""

from __future__ import annotations

from typing import Any

from rapid_llm.engine.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END, THINK = 0, 1, 2
FIRST_BYTE = 3


def byte_symbol(byte: int) -> str:
    """GPT-2's character for a byte, by its original rule: a byte that prints stands for itself, others follow 255."""
    prints = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    return chr(byte) if byte in prints else chr(256 + [b for b in range(256) if b not in prints].index(byte))


def metadata(**changes: Any) -> dict[str, Any]:
    """Metadata whose keys under `tokenizer.` can be changed: `metadata(ggml_pre="x")`; None takes a key out."""
    bytes_ = [byte_symbol(b) for b in range(256)]
    merges = ["h i", "Ġ Ġ", "Ġ hi", "1 2"]
    words = [m.replace(" ", "") for m in merges]
    tokens = ["<|im_start|>", "<|im_end|>", "<think>", *bytes_, *words]
    made: dict[str, Any] = {
        "ggml_model": "gpt2",
        "ggml_pre": "smollm",
        "ggml_tokens": tokens,
        "ggml_token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
        "ggml_merges": merges,
        "ggml_bos_token_id": START,
        "ggml_eos_token_id": END,
        "ggml_add_bos_token": False,
        "chat_template": CHATML,
        **changes,
    }
    return {"tokenizer." + k.replace("ggml_", "ggml."): v for k, v in made.items() if v is not None}


def tokenizer(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(**changes))

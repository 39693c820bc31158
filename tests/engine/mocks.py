"""A decoder without weights and a tokenizer of bytes: the engine's own behaviour, with no model file.

The mock keeps a sequence's token ids and positions in the key/value cache and reads them back through the block table,
so a wrong slot, page, position or length changes its logits, or is caught where it happens.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rapid_llm.engine.text.tokenizer import Tokenizer
from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

LogitsOf = Callable[[Sequence[int]], np.ndarray]

BOS, EOS = 256, 257
VOCAB = 260

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class MockConfig:
    vocab_size: int = VOCAB
    max_model_len: int = 256
    num_layers: int = 2
    num_kv_heads: int = 1
    head_dim: int = 1


class MockDecoder:
    """logits_of: ids of a sequence so far -> logits of the next token, at most config.vocab_size of them."""

    device = torch.device("cpu")
    activation_dtype = kv_dtype = torch.float32
    observed = False

    def __init__(self, logits_of: LogitsOf, config: MockConfig | None = None) -> None:
        self.config = MockConfig() if config is None else config
        self.logits_of = logits_of
        self.steps: list[AttentionMetadata] = []
        self.fail_at: dict[int, BaseException] = {}
        self._histories: list[list[int]] = []

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        self.steps.append(meta)
        if len(self.steps) - 1 in self.fail_at:
            raise self.fail_at[len(self.steps) - 1]
        tokens, sequences = len(input_ids), len(meta.seq_lens)
        assert len(kv) == self.config.num_layers
        assert meta.positions.shape == meta.slot_mapping.shape == (tokens,)
        assert meta.cu_seqlens_q.shape == (sequences + 1,)
        assert meta.cu_seqlens_q[0] == 0
        assert meta.cu_seqlens_q[-1] == tokens
        assert meta.decode == (tokens == sequences)
        slots, real = meta.slot_mapping.numpy(), sequences
        if meta.decode:  # rows of padding come last, have no length and belong on the null page
            real = int((meta.seq_lens > 0).sum())
            assert (meta.seq_lens[:real] > 0).all()
            assert (slots[real:] == 0).all(), "padding is written to a slot that may be a request's"
            assert meta.positions[real:].tolist() == [0] * (sequences - real), "padding has positions of an old batch"
        living = slots[: tokens - (sequences - real)]
        assert len(set(living.tolist())) == len(living), "two tokens share a slot"
        for k_cache, v_cache in kv:
            assert living.min() >= k_cache.shape[1], "a token is written to the null page"
            where = (slots // k_cache.shape[1], slots % k_cache.shape[1], 0, 0)
            k_cache.numpy()[where], v_cache.numpy()[where] = input_ids.numpy(), meta.positions.numpy()
        self._histories = []
        for k_cache, v_cache in kv:
            histories = self._read(meta, k_cache, v_cache)
            assert self._histories in ([], histories), "layers differ"
            self._histories = histories
        return torch.arange(tokens, dtype=torch.float32).unsqueeze(1)

    def _read(self, meta: AttentionMetadata, k_cache: Tensor, v_cache: Tensor) -> list[list[int]]:
        """What each token sees: the ids up to its own, from the cache."""
        page_size, histories = k_cache.shape[1], []
        offsets = meta.cu_seqlens_q.tolist()
        all_keys, all_positions = k_cache.numpy()[..., 0, 0], v_cache.numpy()[..., 0, 0]
        for i, length in enumerate(meta.seq_lens.tolist()):
            pages = meta.block_table[i, : -(-length // page_size)].numpy()
            keys = all_keys[pages].reshape(-1)[:length].astype(int).tolist()
            positions = all_positions[pages].reshape(-1)[:length].astype(int).tolist()
            assert positions == list(range(length)), "the block table leads to another sequence's slots"
            for position in meta.positions[offsets[i] : offsets[i + 1]].tolist():
                assert position < length or length == 0
                histories.append(keys[: position + 1])
        return histories

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), self.config.vocab_size), 1e9)  # padding must never win
        for row, index in enumerate(hidden[:, 0].long().tolist()):
            values = self.logits_of(self._histories[index])
            logits.numpy()[row, : len(values)] = values
        return logits

    def bindings(self) -> list[tuple[str, str, object]]:
        return []

    def handles(self, tokens: int) -> list[object]:
        return []

    def memory(self) -> dict[str, int]:
        return {"weights_dense": 0}

    def observe(self, observer: object) -> None:
        pass


def random_logits(vocab: int = VOCAB, spread: float = 3.0, likely: Sequence[int] = (), lift: float = 5.0) -> LogitsOf:
    """Logits that look random and depend on every id of the history and their order; those of `likely` are lifted."""

    @functools.lru_cache(maxsize=20_000)
    def known(digest: bytes) -> np.ndarray:
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        logits = generator.standard_normal(vocab, dtype=np.float32) * np.float32(spread)
        logits[list(likely)] += np.float32(lift)
        logits.flags.writeable = False
        return logits

    def logits_of(history: Sequence[int]) -> np.ndarray:
        return known(hashlib.blake2b(np.array(history, dtype=np.int32).tobytes(), digest_size=16).digest())

    return logits_of


def scripted(answers: Mapping[tuple[int, ...], Sequence[int]], vocab: int = VOCAB) -> LogitsOf:
    """Logits under which each prompt is answered with its ids, whatever is sampled on the way; then with EOS."""

    def logits_of(history: Sequence[int]) -> np.ndarray:
        for prompt, answer in answers.items():
            if tuple(history[: len(prompt)]) == prompt:
                done = len(history) - len(prompt)
                wanted = answer[done] if done < len(answer) else EOS
                logits = np.full(vocab, -30.0, dtype=np.float32)
                logits[wanted] = 0.0
                return logits
        raise AssertionError(f"no script for {list(history)}")

    return logits_of


def byte_tokenizer(*, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Token i is byte i; then BOS, EOS, another control token, and one merge, which the format demands."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbol = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    space = symbol[0x20]
    tokens = [symbol[b] for b in range(256)] + ["<|im_start|>", "<|im_end|>", "<|other|>", space + space]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3, 1],
            "tokenizer.ggml.merges": [f"{space} {space}"],
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.ggml.add_bos_token": add_bos,
            "tokenizer.chat_template": chat_template,
        }
    )

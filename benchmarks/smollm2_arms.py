"""The ways to run SmolLM2 that `benchmarks.smollm2_cpu` compares: this package at two dtypes, `transformers` at two.

Every arm decodes greedily from token ids, one sequence, and computes logits of the last position only. transformers
runs a plain loop over its model with a growing cache, which is faster than its `generate`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.bench import Arm


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


class Ours:
    """This package at one `dtype`."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        self.name = f"rapid_llm {dtype}"
        self.llm = LLM(path, dtype=dtype, device="cpu", threads=threads, max_model_len=1024, kv_cache_tokens=4096)

    def ids(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """`tokens` greedy ids after `prompt`."""
        return list(self.llm.generate(list(prompt), greedy(tokens))[0].outputs[0].token_ids)

    def prefill(self, prompts: Prompts) -> Arm:
        """One run computes a fresh prompt and its first token."""
        return Arm(self.name, lambda ids: self.ids(ids, 1), prompts.next, units=prompts.length)

    def decode(self, prompts: Prompts, tokens: int) -> Arm:
        """One run computes `tokens` tokens one by one; the prompt and the first token are setup."""

        def begin() -> Any:
            for _ in range(5):  # a first token that ends inside a character comes together with the second
                stream = self.llm.stream(prompts.next(), greedy(tokens + 1))
                if len(next(stream).token_ids) == 1:
                    return stream
            raise RuntimeError(f"{self.name}: no prompt's first delta holds exactly one token")

        def rest(stream: Any) -> None:
            seen = sum(len(delta.token_ids) for delta in stream)
            if seen != tokens:
                raise RuntimeError(f"{self.name}: {seen} tokens came, {tokens} were asked for")

        return Arm(self.name, rest, begin, units=tokens)


class Peer:
    """Hugging Face transformers, weights dequantised from the same file to one dtype."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self.model = model.to(dtype).eval()
        # Its name changed within version 5.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @classmethod
    def load(cls, path: Path) -> list[Peer]:
        """float32 and bfloat16. Raises `ImportError` naming the extra if transformers cannot read the file."""
        try:
            import accelerate
            import gguf
            import transformers
        except ImportError as error:
            raise ImportError(f"{error}: the comparison needs 'pip install rapid-llm[bench]'") from error
        del accelerate, gguf  # transformers needs both to read GGUF, and says so only in a long traceback
        os.environ.setdefault("TQDM_DISABLE", "1")
        transformers.utils.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
        )
        return [cls(model, torch.float32), cls(copy.deepcopy(model), torch.bfloat16)]

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """The cache after `prompt`, and the next id."""
        done = self.model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        return done.past_key_values, done.logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def go_on(self, state: tuple[Any, torch.Tensor], tokens: int) -> list[int]:
        """`tokens` more ids after those in `state`."""
        cache, token = state
        ids = []
        for _ in range(tokens):
            done = self.model(token, **{self._cache: cache}, use_cache=True, logits_to_keep=1)
            token = done.logits[:, -1].argmax(-1, keepdim=True)
            ids.append(int(token))
        return ids

    def ids(self, prompt: Sequence[int], tokens: int) -> list[int]:
        state = self.begin(prompt)
        return [int(state[1]), *self.go_on(state, tokens - 1)]

    def prefill(self, prompts: Prompts) -> Arm:
        return Arm(self.name, self.begin, prompts.next, units=prompts.length)

    def decode(self, prompts: Prompts, tokens: int) -> Arm:
        return Arm(self.name, lambda state: self.go_on(state, tokens), lambda: self.begin(prompts.next()), units=tokens)


class Prompts:
    """Prompts of one length that all differ from their first token on, so that no cache of prefixes can help."""

    def __init__(self, ids: Sequence[int], length: int) -> None:
        if not 0 < length <= len(ids):
            raise ValueError(f"length={length}: the text has {len(ids)} tokens")
        self.length = length
        self._ids = list(ids)
        self._turn = 0

    def next(self) -> list[int]:
        self._turn = (self._turn + 1) % len(self._ids)
        return (self._ids[self._turn :] + self._ids[: self._turn])[: self.length]

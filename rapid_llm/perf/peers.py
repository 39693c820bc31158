"""transformers as an arm: the same shape with random weights, or the same folder, run eagerly step by step.

It is given every chance: attention by torch's own fused function, logits of the last position alone, prompts' keys and
values computed once, no generation loop but the least one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rapid_llm.bench.host import quiet

from .arms import Prompts
from .cases import Case

NAME: Final = "transformers"
CHUNK: Final = 8192
"""Tokens of a prefill pass over the prompts of a batch, for the sake of memory."""


@dataclass(slots=True)
class TransformersArm:
    """model: a causal language model of transformers, on its device."""

    model: Any
    name: str = NAME
    _cache: Any = None
    _first: Any = None

    def ready(self, case: Case, prompts: Prompts) -> None:
        import torch

        if case.kind == "decode":
            self._first, self._cache = self._prefill(torch.tensor([list(ids) for ids in prompts]))
        self.run(case, prompts, -1)

    def run(self, case: Case, prompts: Prompts, round_number: int) -> float:
        import torch

        from rapid_llm.engine.clock import now

        if case.kind == "prefill":
            ids = torch.tensor([list(p) for p in prompts])
            with quiet():
                start = now()
                first, _ = self._prefill(ids)
                first.tolist()
                return now() - start
        token, cache = self._first, self._cache
        if added := cache.get_seq_length() - case.context:
            cache.crop(-added)
        token.tolist()  # the device is idle behind this
        with quiet(), torch.inference_mode():
            start = now()
            for _ in range(case.tokens):
                token = self._step(token[:, None], cache)
                token.tolist()
            return now() - start

    def end(self, case: Case) -> None:
        self._cache = self._first = None

    @property
    def _keyword(self) -> str:
        """What the installed version calls the cache of keys and values."""
        known = inspect.signature(self.model.forward).parameters
        return "cache" if "cache" in known else "past_key_values"

    def _prefill(self, ids: Any) -> tuple[Any, Any]:
        """The first token of each prompt, and their cache."""
        import torch
        from transformers import DynamicCache

        ids, cache, token = ids.to(self.model.device), DynamicCache(), None
        width = max(1, CHUNK // ids.shape[0])
        with torch.inference_mode():
            for start in range(0, ids.shape[1], width):
                token = self._step(ids[:, start : start + width], cache)
        return token, cache

    def _step(self, ids: Any, cache: Any) -> Any:
        found = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._keyword: cache})
        return found.logits[:, -1].argmax(-1)


def transformers_arm(
    stated: Mapping[str, Any] | None, folder: str | None, *, device: Any, dtype: Any, seed: int = 0
) -> TransformersArm:
    """stated: what a config.json says, for random weights; else the folder whose weights are read. Raises `ImportError`
    where transformers is not installed, with what installs it."""
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers is not installed; pip install 'rapid-llm[bench]'") from None
    import torch

    chosen: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if stated is None:
        return TransformersArm(transformers.AutoModelForCausalLM.from_pretrained(folder, **chosen).to(device).eval())
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**stated)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    return TransformersArm(model.eval())

"""transformers as an arm."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rapid_llm.perf.cases import Case
from rapid_llm.perf.peers import transformers_arm

from .support import STATED, TINY


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a bare ModuleNotFoundError, which says nothing of the extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"rapid-llm\[bench\]"):
        transformers_arm(STATED, None, device="cpu", dtype=torch.float32)


def test_it_computes_the_case_and_nothing_else() -> None:
    """Catches: a decode run that computes its prompts again, that goes on from the last round's cache, or that makes
    another number of steps; a prefill without its first token."""
    pytest.importorskip("transformers")
    arm = transformers_arm(STATED, None, device="cpu", dtype=torch.float32)
    assert sum(p.numel() for p in arm.model.parameters()) == 320 * 64 * 2 + 2 * (64 * 64 * 3 + 3 * 64 * 96 + 128) + 64
    assert TINY.hidden_size == arm.model.config.hidden_size
    seen: list[tuple[int, int, int]] = []

    def watch(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen.append((*kwargs["input_ids"].shape, cache.get_seq_length()))

    case, prompts = Case("decode", 2, 9, 3), [[5] * 9, [6] * 9]
    arm.model.register_forward_pre_hook(watch, with_kwargs=True)
    arm.ready(case, prompts)
    assert seen == [(2, 9, 0), *((2, 1, 9 + i) for i in range(3))]
    for number in range(2):
        seen.clear()
        assert arm.run(case, prompts, number) > 0
        assert seen == [(2, 1, 9 + i) for i in range(3)]
    arm.end(case)
    seen.clear()
    assert arm.run(Case("prefill", 1, 7), [[4] * 7], 0) > 0
    assert seen == [(1, 7, 0)]

"""Engines around the mock decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rapid_llm import LLM

from .mocks import LogitsOf, MockConfig, MockDecoder, byte_tokenizer


def make_llm(logits_of: LogitsOf, config: MockConfig | None = None, *, tokenizer: Any = None, **options: Any) -> LLM:
    """An engine with a small cache and one thread (the mock has no work for two) unless told otherwise."""
    options.setdefault("kv_cache_tokens", 2048)
    options.setdefault("threads", 1)
    return LLM.from_parts(
        MockDecoder(logits_of, config), byte_tokenizer() if tokenizer is None else tokenizer, **options
    )


@pytest.fixture(autouse=True)
def _keep_threads() -> Iterator[None]:
    """Torch's threads are the process's: later tests get back what they had."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

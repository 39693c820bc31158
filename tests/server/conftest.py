"""Servers around the mock decoder, one for each module that asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from rapid_llm import LLM
from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache
from tests.engine.mocks import LogitsOf, MockConfig, MockDecoder, byte_tokenizer, random_logits

if TYPE_CHECKING:
    from .live import Live  # not before a test module has: the extra `serve` may be missing, which skips those

LETTERS = range(ord("a"), ord("z") + 1)


class HeldDecoder(MockDecoder):
    """Steps wait while `gate` is closed. `entered` is set by each step that has begun."""

    def __init__(self, logits_of: LogitsOf, config: MockConfig | None = None) -> None:
        super().__init__(logits_of, config)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def forward(self, input_ids: Tensor, meta: AttentionMetadata, kv: KVCache) -> Tensor:
        self.entered.set()
        assert self.gate.wait(20)
        return super().forward(input_ids, meta, kv)


def mock_llm(logits_of: LogitsOf | None = None, **options: object) -> LLM:
    """An engine of bytes that says letters."""
    decoder = HeldDecoder(random_logits(likely=LETTERS, lift=16.0) if logits_of is None else logits_of)
    return LLM.from_parts(decoder, byte_tokenizer(), **{"threads": 1, "kv_cache_tokens": 2048, **options})


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server that the module's tests share, and leave idle."""
    from .live import live, until

    threads = torch.get_num_threads()
    with live(mock_llm(), max_body_bytes=100_000, max_concurrent_requests=64) as found:
        yield found
        until(found.idle)
        found.engine.check()
    torch.set_num_threads(threads)

"""How much of a device a load made use of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rapid_llm.engine.options import EngineOptions
from rapid_llm.engine.random_llm import random_parts
from rapid_llm.models.shapes import shape_config
from rapid_llm.perf.capacity import needs_of_shape, share
from rapid_llm.perf.needs import StepNeeds

from .support import LIMITS, TINY

CPU = torch.device("cpu")


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_shape_are_those_of_its_decoder(quantization: str | None, tied: bool) -> None:
    """Catches: an embedding that counts beside a head of its own, weights of the wrong size, a cache of another one."""
    options = EngineOptions(dtype="float32", device="cpu", quantization=quantization, threads=1)
    config = replace(TINY, tie_word_embeddings=tied)
    decoder, _ = random_parts(config, options)
    found = needs_of_shape(config, options, CPU)
    assert found.weight_bytes(1) == decoder.weight_bytes(1)
    assert found.kv_bytes == 2 * 2 * 2 * 16 * 4
    shared = needs_of_shape(config, replace(options, tensor_parallel=2), CPU)
    assert sum(shared.weight_bytes(1)) == sum(found.weight_bytes(1)) // 2
    assert shared.decode(1, 8, 1).flops == found.decode(1, 8, 1).flops / 2


def test_experts_count_apart() -> None:
    """Catches: every expert in the bytes of every step."""
    config = shape_config("mixtral-8x7b")
    every, experts = needs_of_shape(config, EngineOptions(dtype="bfloat16"), CPU).weight_bytes(1)
    assert experts == 2 * 32 * 8 * 3 * 4096 * 14336
    assert every + experts == pytest.approx(2 * (46_702_792_704 - 32_000 * 4096), rel=1e-4)


def test_the_least_time_over_the_time_that_passed() -> None:
    """Catches: prompts that cost nothing, steps of one request each, a first token that is counted twice."""
    needs = StepNeeds(TINY, lambda tokens: (1_000_000, 0), kv_bytes=0.0, row_bytes=0.0)
    limits = replace(LIMITS, bytes_per_second=1e6, flops_per_second=1e30)
    found = {"completed": 10, "seconds": 100.0, "concurrency": 4.0, "output_tokens_per_second": 2.1}
    assert share(needs, limits, found, 5, 3) == pytest.approx((210 - 10) / 4 * 1.0 / 100)
    slow = replace(limits, bytes_per_second=1e30, flops_per_second=needs.prefill(1, 5).flops)
    step = needs.decode(4, 6, 1).flops / slow.flops_per_second
    assert share(needs, slow, found, 5, 3) == pytest.approx((10 + 50 * step) / 100)
    assert share(needs, limits, {**found, "completed": 0}, 5, 3) == 0.0

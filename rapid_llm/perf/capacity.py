"""How much of a device a load made use of: the least time that its tokens take, over the time that passed.

For a shape, whose bytes follow from its configuration. The least time is that of the prompts' arithmetic, and of decode
steps as large as the requests in flight, each bound by memory or by arithmetic. A server that waits for arrivals has a
low share without being slow; one that is behind them shows what it is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .limits import Limits
from .needs import StepNeeds

if TYPE_CHECKING:
    from rapid_llm.engine.options import EngineOptions
    from rapid_llm.models.config import ModelConfig


def needs_of_shape(config: ModelConfig, options: EngineOptions, device: Any) -> StepNeeds:
    """What the steps of random weights of `config` need, of each device, without making them."""
    from rapid_llm.engine.kv_memory import bytes_per_token, cache_dtype
    from rapid_llm.models.decoder import activation_dtype
    from rapid_llm.models.random_weights import weight_bytes
    from rapid_llm.models.shapes import matrices

    dtype, ranks = activation_dtype(options.dtype, device), options.tensor_parallel
    row = config.hidden_size * dtype.itemsize
    experts = dtype.itemsize * sum(n * r * c for name, n, r, c in matrices(config) if name.startswith("experts."))
    own = 0 if config.tie_word_embeddings else config.vocab_size * row  # of which a step reads a few rows
    every = weight_bytes(config, dtype, quantization=options.quantization) - own - experts
    kv = bytes_per_token(config, cache_dtype(options.kv_cache_dtype) or dtype)
    return StepNeeds(config, lambda tokens: (every // ranks, experts // ranks), kv / ranks, row, ranks)


def share(needs: StepNeeds, limits: Limits, found: Mapping[str, Any], prompt_tokens: int, output_tokens: int) -> float:
    """The share of `limits` that one run's figures (`traffic.figures`) come to; 0 where nothing was completed."""
    done, seconds = found["completed"], found["seconds"]
    if not done or seconds <= 0:
        return 0.0
    batch = max(1, round(found["concurrency"]))
    later = max(found["output_tokens_per_second"] * seconds - done, 0.0)  # first tokens come with their prompts
    prompts = done * needs.prefill(1, prompt_tokens).flops / limits.flops_per_second
    step, _ = limits.seconds(needs.decode(batch, prompt_tokens + output_tokens // 2, 1))
    return float((prompts + later / batch * step) / seconds)

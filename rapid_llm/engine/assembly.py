"""The parts of an engine, sized for a model, its options and the memory: the same on every rank."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from rapid_llm.models.attention_metadata import KVCache
from rapid_llm.models.parallel import Ranks
from rapid_llm.platform import default_threads

from .batch import BatchBuilder
from .decode_graphs import DecodeGraphs
from .kv_memory import allocate
from .kv_pool import KVPool
from .options import BATCH_TOKENS, DETERMINISTIC_CHUNK, PAGE_SIZE, EngineOptions
from .prefix import PrefixCache
from .runner import Model
from .scheduler import Scheduler
from .speculation import NgramDrafter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits that the parts are made for. num_pages: of the cache, the null page included. tokens, sequences, rows: of
    one step, the last of logits. max_pages: of one sequence. vocab_size: ids that may be sampled."""

    num_pages: int
    tokens: int
    sequences: int
    rows: int
    max_pages: int
    vocab_size: int


class Parts(NamedTuple):
    """What runs steps, but for the model and the sampler. graphs: None where every step runs call by call."""

    kv: KVCache
    builder: BatchBuilder
    graphs: DecodeGraphs | None


def assemble(model: Model, sizes: Sizes, options: EngineOptions, ranks: Ranks | None = None) -> Parts:
    """Allocate the cache and the buffers of steps on the model's device. ranks: what the model is computed by."""
    device = model.device
    kv = allocate(model.config, sizes.num_pages, model.kv_dtype, device)
    builder = BatchBuilder(
        max_tokens=sizes.tokens,
        max_sequences=sizes.sequences,
        max_rows=sizes.rows,
        max_pages=sizes.max_pages,
        page_size=PAGE_SIZE,
        device=device,
    )
    graphs = None
    if options.cuda_graphs == "padded" or (options.cuda_graphs == "auto" and device.type == "cuda"):
        graphs = DecodeGraphs(
            model,
            kv,
            max_sequences=sizes.sequences,
            max_pages=sizes.max_pages,
            page_size=PAGE_SIZE,
            captures=options.cuda_graphs == "auto",
            agree=bool if ranks is None else partial(ranks.all_agree, device=device),
        )
    return Parts(kv, builder, graphs)


def context_of(asked: int | None, trained: int) -> int:
    """The longest sequence to serve, in tokens; raises `ValueError` for more than the model was trained for."""
    if asked is None:
        return trained
    if asked > trained:
        raise ValueError(f"max_model_len={asked} exceeds the {trained} tokens that this model was trained for")
    return asked


def affordable(options: EngineOptions, context: int, tokens: int) -> int:
    """The context that a cache sized by the free memory can hold: shortened, aloud, unless it was asked for."""
    if tokens >= context:
        return context
    if options.max_model_len is not None:
        raise ValueError(
            f"max_model_len={context} needs a key/value cache of as many tokens and the free memory holds {tokens}: "
            "lower max_model_len, free memory, or set kv_cache_tokens"
        )
    _log.warning("the free memory holds %d tokens of key/value cache: the context is that, not %d", tokens, context)
    return tokens


def scheduler_of(pool: KVPool, options: EngineOptions, device_type: str) -> Scheduler:
    """What plans the steps, as the options have it."""
    max_running = 1 if options.deterministic else options.max_running
    budget = options.max_batch_tokens
    if budget is None:
        budget = max(BATCH_TOKENS[device_type], max_running)
    grid = _grid(min(budget, DETERMINISTIC_CHUNK[device_type])) if options.deterministic else None
    prefix = PrefixCache(pool, grid and max(grid, PAGE_SIZE)) if options.enable_prefix_caching else None
    drafter = None if options.speculation is None else NgramDrafter(options.speculation)
    return Scheduler(pool, max_batch_tokens=budget, max_running=max_running, prefix=prefix, drafter=drafter, grid=grid)


def _grid(most: int) -> int:
    """The largest chunk of at most `most` tokens that is a multiple of a page, or of which a page is a multiple."""
    if most >= PAGE_SIZE:
        return most // PAGE_SIZE * PAGE_SIZE
    return max(size for size in range(1, most + 1) if PAGE_SIZE % size == 0)


def use_threads(options: EngineOptions, device: torch.device) -> None:
    """Torch's threads are the process's; a GPU engine leaves them alone unless asked."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    elif device.type == "cpu":  # ranks share it
        torch.set_num_threads(max(default_threads() // options.tensor_parallel, 1))


def graphs_line(graphs: DecodeGraphs | None) -> str:
    """What `explain()` says of decode steps of fixed size."""
    if graphs is None:
        return "off"
    report = graphs.report
    parts = [f"{report.steps} steps, batches {sorted(report.captured)}"]
    parts += [f"{count} steps call by call: {reason}" for reason, count in report.eager.most_common()]
    parts += [f"never for a batch of {size}: {reason}" for size, reason in sorted(report.refused.items())]
    return "; ".join(parts)

"""Steps of every kind that an engine can make, for the sake of the kernels that they launch.

Invariant: no request's memory is touched. Every token goes to the null page of the cache, which belongs to nobody, and
what is computed is thrown away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from rapid_llm.models.attention_metadata import AttentionMetadata, KVCache

from .prompt_logprobs import rows_at_a_time
from .runner import Model
from .sampler import Sampler


def step_sizes(most: int) -> list[int]:
    """Token counts up to `most` that kernels may tell apart: each small one, then around powers of two and between.

    Tiles are chosen by powers of two, and Triton compiles anew for a number that is 1, and for a multiple of 16.
    """
    sizes = {*range(1, 34), most - 1, most}
    power = 32
    while power < most:
        sizes |= {power - 1, power, power + 1, power + 16, power + power // 2, power + power // 2 + 1}
        power *= 2
    return sorted(size for size in sizes if 1 <= size <= most)


def steps(
    model: Model,
    kv: KVCache,
    sampler: Sampler | None,
    *,
    max_tokens: int,
    max_sequences: int,
    max_rows: int | None = None,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what it is, a function that makes it): prefill with the logits of prompts, decode with sampling, and where there
    are guesses (max_rows, of logits, exceeds max_sequences) their verification, at every size that may matter.
    Without a sampler nothing is sampled."""
    for tokens in step_sizes(max_tokens):
        yield f"a prefill step of {tokens} tokens", partial(_step, model, kv, None, tokens, 1)
    for count in step_sizes(max_sequences):
        yield f"a decode step of {count} requests", partial(_step, model, kv, sampler, count, count)
    for count in step_sizes(max_rows or 0):
        if count > max_sequences:
            yield f"a step that verifies {count} rows", partial(_step, model, kv, sampler, count, 1)


def _step(model: Model, kv: KVCache, sampler: Sampler | None, tokens: int, sequences: int) -> None:
    """One pass over `tokens` in as many sequences, the first of which has all that are left over."""
    device, page_size = model.device, kv[0][0].shape[1]
    bounds = [0, *range(tokens - sequences + 1, tokens + 1)]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    last, width = model.config.max_model_len - 1, -(-min(sizes[0], model.config.max_model_len) // page_size)
    positions = [min(i, last) for size in sizes for i in range(size)]
    meta = AttentionMetadata(
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([min(size, last + 1) for size in sizes], dtype=torch.int32, device=device),
        block_table=torch.zeros(sequences, width, dtype=torch.int32, device=device),
        decode=tokens == sequences,
    )
    with torch.inference_mode():
        hidden = model.forward(torch.zeros(tokens, dtype=torch.int64, device=device), meta, kv)
        if sampler is not None:
            sampler.rehearse(model.compute_logits(hidden))
        else:
            model.compute_logits(hidden[: rows_at_a_time(model.config.vocab_size)])

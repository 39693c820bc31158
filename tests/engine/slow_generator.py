"""The obvious way to generate: one request, the whole history through the model for each token, all text decoded anew.

It shares with the engine only the definition of a request's random numbers. What it returns is what any engine, with
any batching, chunking or preemption, must return for that request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.sampler import request_key, uniform
from rapid_llm.engine.text.tokenizer import Tokenizer

from .mocks import LogitsOf


class Answer(NamedTuple):
    ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    drawn: list[tuple[np.ndarray, float]]
    """What each id was drawn from: logits and random number."""


ROUNDING = 4e-5
"""Relative, over what 260 additions and a few other operations in fp32 can lose: (260 + 32) * 2**-24 < 2e-5."""


def penalised(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """As docs/sampling.md has it, one token of the vocabulary after the other."""
    result = logits.copy()
    for token in {*prompt, *output} if params.repetition_penalty != 1 else ():
        if token < len(result):
            divide = result[token] > 0
            factor = np.float32(params.repetition_penalty)
            result[token] = result[token] / factor if divide else result[token] * factor
    addends = dict(params.logit_bias or ())
    for token in set(output) if params.presence_penalty or params.frequency_penalty else ():
        addend = addends.get(token, 0.0) - params.presence_penalty
        addends[token] = addend - params.frequency_penalty * list(output).count(token)
    for token, addend in addends.items():
        result[token] += np.float32(addend)
    return result


def choose(logits: np.ndarray, params: SamplingParams, draw: float) -> int:
    """The token that the op `sample` is documented to give, in plain numpy."""
    if params.temperature == 0 or params.top_p == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float32) / np.float32(params.temperature)
    weights = np.exp(scaled - scaled.max())
    probabilities = (weights / weights.sum()).astype(np.float32)
    keep = np.ones(len(logits), dtype=bool)
    if 0 < params.top_k < len(logits):
        keep &= scaled >= np.sort(scaled)[-params.top_k]
    if params.top_p < 1:
        mass = np.where(keep, probabilities, 0)
        order = np.argsort(-mass, kind="stable")
        reached = np.cumsum(mass[order]) / mass.sum()
        last = order[np.argmax(reached >= params.top_p)] if (reached >= params.top_p).any() else order[-1]
        keep &= probabilities >= probabilities[last]
    keep &= probabilities >= params.min_p * probabilities.max()
    cumulative = np.cumsum(np.where(keep, probabilities, 0))
    return int(np.argmax(cumulative > draw * cumulative[-1]))


def doubtful(logits: np.ndarray, draw: float, params: SamplingParams) -> bool:
    """Whether another order of additions in fp32 could draw another token: the number, or a limit, is at the edge."""
    found = set()
    for up in (1 - ROUNDING, 1.0, 1 + ROUNDING):
        for p in (1 - ROUNDING, 1.0, 1 + ROUNDING):
            near = replace(params, top_p=min(params.top_p * p, 1.0), min_p=min(params.min_p * p, 1.0))
            found.add(choose(logits.astype(np.float64), near, draw * up))
    return len(found) > 1


def generate(
    logits_of: LogitsOf,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed_path: tuple[int, ...],
    max_model_len: int,
    sample: int = 0,
) -> Answer:
    """seed_path: what `request_key` is made from. sample: which of the `n`."""
    key = request_key(request_key(*seed_path), sample)
    ends = set(params.stop_ids) | (set() if params.ignore_eos else set(tokenizer.end_ids))
    ids: list[int] = []
    drawn: list[tuple[np.ndarray, float]] = []
    while True:
        logits = np.array(logits_of([*prompt, *ids]), dtype=np.float32)[: tokenizer.vocab_size]
        logits = penalised(logits, params, prompt, ids)
        if len(ids) < params.min_tokens:
            logits[list(ends)] = -np.inf
        drawn.append((logits, uniform(key, len(ids))))
        token = choose(logits, params, drawn[-1][1])
        ids.append(token)
        if token in ends and len(ids) > params.min_tokens:
            shown = ids if params.include_stop_str_in_output else ids[:-1]
            text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
            return Answer(ids, text, "stop", token if token in params.stop_ids else None, drawn)
        full = len(prompt) + len(ids) >= max_model_len
        full = full or (params.max_tokens is not None and len(ids) >= params.max_tokens)
        if not full and not params.stop_strings:
            continue
        text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        unarmed = tokenizer.decode(ids[: params.min_tokens], skip_special_tokens=params.skip_special_tokens)
        if found := first_stop(text, params.stop_strings, after=len(unarmed)):
            start, stop = found
            shown_stop = stop if params.include_stop_str_in_output else ""
            return Answer(ids, text[:start] + shown_stop, "stop", stop, drawn)
        if full:
            return Answer(ids, text, "length", None, drawn)


def first_stop(text: str, stops: Iterable[str], *, after: int) -> tuple[int, str] | None:
    """(start, string) of the stop string completed first behind `after`; of several that end together, the longest."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop

"""Native `sample`: Triton on CUDA (`_search`), numpy on CPU, PyTorch where a GPU has no Triton.

On CPU greedy rows cost one pass over the logits; the other rows are taken one by one, each sorting no more than the
tokens that can survive its filters. top_k and top_p compare logits, so that tokens are tied exactly where their logits
are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rapid_llm.kernels.ops.arguments import check_tensor, check_written
from rapid_llm.kernels.ops.sampling._search import launch_sample
from rapid_llm.kernels.ops.triton_support import attempt, use_triton
from rapid_llm.kernels.registry import ArgumentError

Array = npt.NDArray[Any]

_OP = "sample"
_CHUNK = 256
_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_INTEGERS = frozenset((torch.int32, torch.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id per row of logits, by inverse transform sampling. See `rapid_llm.kernels.sample`."""
    _check(logits, temperature, top_k, top_p, min_p, uniform)
    rows, vocab = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    else:
        check_tensor(_OP, "out", out, torch.empty(0, dtype=torch.int64, device=logits.device), (rows,))
        check_written(_OP, "out", out)
    if rows == 0 or vocab == 0:
        return out.fill_(-1)
    arguments = (logits, temperature, top_k, top_p, min_p, uniform, out)
    if use_triton(_OP, logits) and attempt(_OP, launch_sample, *arguments):
        return out
    return _sample_on_device(*arguments) if logits.is_cuda else _sample_on_cpu(*arguments)


def _check(logits: torch.Tensor, *parameters: torch.Tensor) -> None:
    if logits.ndim != 2 or logits.dtype not in _DTYPES:
        raise ArgumentError(
            f"{_OP}: logits must be (rows, vocab) in float32, float16 or bfloat16, "
            f"got {tuple(logits.shape)} in {logits.dtype}"
        )
    shape, device = logits.shape[:1], logits.device
    for name, tensor in zip(("temperature", "top_k", "top_p", "min_p", "uniform"), parameters, strict=True):
        if tensor.shape != shape or tensor.device != device:
            where = "CUDA device" if logits.is_cuda else "device"
            raise ArgumentError(
                f"{_OP}: {name} must be ({shape[0]},) on the same {where} as logits, {device}: "
                f"got {tuple(tensor.shape)} on {tensor.device}"
            )
        if name == "top_k" and tensor.dtype not in _INTEGERS:
            raise ArgumentError(f"{_OP}: top_k has dtype {tensor.dtype}; use int32")
        if name != "top_k" and tensor.dtype != torch.float32:
            raise ArgumentError(f"{_OP}: {name} has dtype {tensor.dtype}; use float32")


def _sample_on_cpu(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    table = logits.detach().float().numpy()  # numpy finds maxima and sorts with vector instructions; torch does not
    ids = table.argmax(1)  # the first maximum, or the first NaN
    tops = table[np.arange(len(ids)), ids].tolist()
    tokens = ids.tolist()
    temperatures = temperature.tolist()
    filters: list[tuple[int, float, float, float]] = []
    if any(heat > 0 for heat in temperatures):
        filters = list(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), uniform.tolist(), strict=True))
    for row, (top, heat) in enumerate(zip(tops, temperatures, strict=True)):
        if not math.isfinite(top):  # NaN or +inf somewhere, or -inf everywhere
            tokens[row] = -1
        elif heat > 0:
            tokens[row] = _sample_row(table[row], top, heat, *filters[row])
    return out.copy_(torch.tensor(tokens, dtype=torch.int64))


def _sample_row(
    logits: Array, top: float, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token of one row whose maximum `top` is finite; temperature > 0."""
    vocab = len(logits)
    by_count = 0 < top_k < vocab
    if not by_count and not top_p < 1 and not min_p > 0:
        return _draw_from_many(_weights(logits, top, temperature), uniform)
    mass = 0.0
    if by_count:
        floor = float(np.partition(logits, vocab - top_k)[vocab - top_k])
    elif top_p < 1:  # what lies below this floor cannot make up the mass that top_p leaves out
        mass = float(_weights(logits, top, temperature).sum(dtype=np.float64))
        floor = min(top, top + temperature * math.log((1 - top_p) * mass / vocab / 2))
    else:
        floor = top + temperature * math.log(min(min_p, 1.0)) - 1e-6 * abs(top)
    ids = np.flatnonzero(logits >= np.float32(floor))
    values = logits[ids]
    weights = _weights(values, top, temperature)
    if top_p < 1:
        down = np.sort(values)[::-1]
        running = _weights(down, top, temperature).cumsum(dtype=np.float64)
        target = top_p * (float(running[-1]) if by_count else mass)
        last = min(int(running.searchsorted(target)), len(running) - 1)
        weights[values < down[last]] = 0.0
    if min_p > 0:
        weights[weights < min(min_p, 1.0)] = 0.0
    running = weights.cumsum(dtype=np.float64)
    return int(ids[_first_beyond(running, uniform * float(running[-1]))])


def _weights(logits: Array, top: float, temperature: float) -> Array:
    """Probabilities relative to the most probable token."""
    weights = logits - np.float32(top)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, weight 0
        np.divide(weights, np.float32(temperature), out=weights)
    return np.exp(weights, out=weights)


def _draw_from_many(weights: Array, uniform: float) -> int:
    """The first index whose running sum exceeds uniform times the whole, by chunks of the sum first."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK)).cumsum(dtype=np.float64)
    target = uniform * float(sums[-1])
    chunk = _first_beyond(sums, target)
    begin = chunk * _CHUNK
    running = weights[begin : begin + _CHUNK].cumsum(dtype=np.float64)
    return begin + _first_beyond(running, target - (float(sums[chunk - 1]) if chunk else 0.0))


def _first_beyond(running: Array, target: float) -> int:
    """The first index of a running sum above target; where rounding leaves none, the last index that adds to it."""
    found = int(running.searchsorted(target, side="right"))
    return found if found < len(running) else int(running.searchsorted(running[-1]))


def _sample_on_device(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Without Triton and without a look at a value: every row is sorted."""
    vocab = logits.shape[1]
    x = logits.double()
    top, greedy = x.max(1, keepdim=True)
    heat = torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    weights = ((x - top) / heat).exp()
    down, order = x.sort(1, descending=True)
    weights_down = weights.gather(1, order)
    count = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None]
    kept = down >= down.gather(1, count - 1)
    running = weights_down.masked_fill(~kept, 0.0).cumsum(1)
    nucleus = (running < top_p.double()[:, None] * running[:, -1:]).sum(1, keepdim=True).clamp(max=vocab - 1)
    bound = torch.where(top_p[:, None] < 1, down.gather(1, nucleus), -math.inf)
    bound = torch.maximum(bound, down.gather(1, count - 1))
    weights = weights.masked_fill((x < bound) | (weights < min_p.clamp(max=1.0)[:, None]), 0.0)
    running = weights.cumsum(1)
    beyond = (running > uniform.double()[:, None] * running[:, -1:]) & (weights > 0)
    token = beyond.to(torch.uint8).argmax(1)
    token = torch.where(temperature > 0, token, greedy.squeeze(1))
    return out.copy_(token.masked_fill(~top.squeeze(1).isfinite(), -1))

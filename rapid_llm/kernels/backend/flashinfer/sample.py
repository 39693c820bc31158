"""`flashinfer/sample`: flashinfer finds the top_k and top_p borders; the draw is the op's own.

flashinfer's samplers draw their numbers inside the kernel, so none of them can answer for a given `uniform`. Its two
filters are deterministic, keep ties, and are the costly part: they replace the sort.
"""

from __future__ import annotations

from typing import Final

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._calls import deliver, first_use, on_device
from rapid_llm.kernels.ops.arguments import check_tensor, check_written
from rapid_llm.kernels.registry import ArgumentError

_top_k_mask = LIBRARY.function("top_k")
_top_p_renorm = LIBRARY.function("top_p")

LEAST: Final = 1e-30
"""Stands for a top_p of 0, which flashinfer does not take: the most probable token alone reaches it."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


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
    if out is not None:
        check_tensor("sample", "out", out, torch.empty(0, dtype=torch.int64, device=logits.device), (rows,))
        check_written("sample", "out", out)
    if rows == 0 or vocab == 0:
        return deliver(torch.full((rows,), -1, dtype=torch.int64, device=logits.device), out)
    first_use("sample")
    values = logits.float()
    top, greedy = values.max(1, keepdim=True)
    usable = top.isfinite()
    # NaN would keep flashinfer's search for a border from ending.
    values = torch.where(usable, values, 0.0).contiguous()
    top = torch.where(usable, top, 0.0)
    with on_device(logits):
        count = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).int()
        kept = _top_k_mask(values, count) > float("-inf")
        heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
        weights = torch.where(kept, ((values - top) / heat).exp(), 0.0)
        shares = weights / weights.sum(1, keepdim=True)
        inside = _top_p_renorm(shares, top_p.clamp(LEAST, 1.0).contiguous(), is_deterministic=True) > 0
    kept = (inside | (top_p >= 1)[:, None]) & (weights >= min_p.clamp(max=1.0)[:, None])
    weights = torch.where(kept, weights, 0.0)
    running = weights.double().cumsum(1)
    beyond = (running > uniform.double()[:, None] * running[:, -1:]) & (weights > 0)
    drawn = beyond.to(torch.uint8).argmax(1)  # the first of the largest
    token = torch.where(temperature > 0, drawn, greedy.squeeze(1))
    return deliver(token.masked_fill(~usable.squeeze(1), -1), out)


def _check(logits: torch.Tensor, *parameters: torch.Tensor) -> None:
    if logits.ndim != 2 or logits.dtype not in _DTYPES:
        raise ArgumentError(
            "sample: logits must be (rows, vocab) in float32, float16 or bfloat16, "
            f"got {tuple(logits.shape)} in {logits.dtype}"
        )
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    for name, tensor in zip(names, parameters, strict=True):
        if tensor.shape != logits.shape[:1] or tensor.device != logits.device:
            raise ArgumentError(
                f"sample: {name} must be ({logits.shape[0]},) on the same CUDA device as logits, {logits.device}: "
                f"got {tuple(tensor.shape)} on {tensor.device}"
            )
        wanted = (torch.int32, torch.int64) if name == "top_k" else (torch.float32,)
        if tensor.dtype not in wanted:
            raise ArgumentError(f"sample: {name} has dtype {tensor.dtype}; use {wanted[0]}")

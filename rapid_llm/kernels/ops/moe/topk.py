"""Native `moe.topk`: a program a token on CUDA, a stable sort on the CPU.

Experts are ranked by their logits as whole numbers in the same order, so that equal logits can be told apart by id and
an expert that is taken already sinks below every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from rapid_llm.kernels.ops.arguments import token_strides
from rapid_llm.kernels.ops.tile_policy import next_power_of_2, resolve_tiles, tiles, warps_for
from rapid_llm.kernels.ops.triton_support import attempt, launch, tl, triton, use_triton
from rapid_llm.kernels.registry import ArgumentError

_OP: Final = "moe.topk"
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def moe_topk(logits: Tensor, k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """Weights and ids of each token's k experts. See `rapid_llm.kernels.moe_topk`."""
    if logits.dim() != 2 or logits.dtype not in _DTYPES:
        raise ArgumentError(
            f"{_OP}: logits must be (tokens, experts) in float32, float16 or bfloat16, got {tuple(logits.shape)} "
            f"{logits.dtype}"
        )
    if not 1 <= k <= logits.shape[1]:
        raise ArgumentError(f"{_OP}: k is {k}; choose between 1 and the {logits.shape[1]} experts")
    shape = (logits.shape[0], k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if use_triton(_OP, logits) and attempt(_OP, _launch, logits, weights, ids, bool(renormalize)):
        return weights, ids
    wide = logits.float()
    ranked = torch.where(wide.isnan(), float("-inf"), wide).sort(dim=1, descending=True, stable=True).indices[:, :k]
    torch.gather(torch.softmax(wide, 1), 1, ranked, out=weights)
    if renormalize:
        weights /= weights.sum(1, keepdim=True)
    return weights, ids.copy_(ranked)


@tiles(_OP)
def _tiles(sm: int, *, experts: int) -> Mapping[str, int]:
    block = next_power_of_2(experts)
    return {"BLOCK": block, "num_warps": warps_for(block, per_thread=4)}


@triton.jit
def _topk_kernel(
    x_ptr, weights_ptr, ids_ptr, experts, x_token, x_step,
    K: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    x = tl.load(x_ptr + token * x_token + expert.to(tl.int64) * x_step, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    number = tl.where(x == x, x, float("-inf"))
    mass = tl.where(inside, tl.exp(x - tl.max(number, 0)), 0.0)
    share = mass / tl.sum(mass, 0)

    # Bits of floats are ordered as whole numbers, those of negative ones the other way round; -0 is 0.
    order = tl.where(number == 0.0, 0.0, number).to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    order = tl.where(inside, order, -2147483648)
    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    weights = tl.zeros((SLOTS,), tl.float32)
    for i in range(K):
        best = tl.argmax(order, 0, tie_break_left=True).to(tl.int32)
        chosen = expert == best
        ids = tl.where(slot == i, best, ids)
        weights = tl.where(slot == i, tl.sum(tl.where(chosen, share, 0.0), 0), weights)
        order = tl.where(chosen, -2147483648, order)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(weights_ptr + token * K + slot, weights, mask=slot < K)
    tl.store(ids_ptr + token * K + slot, ids, mask=slot < K)


def _launch(logits: Tensor, weights: Tensor, ids: Tensor, renormalize: bool) -> None:
    tokens, experts = logits.shape
    k = ids.shape[1]
    meta = resolve_tiles(_OP, logits.device, experts=experts)
    launch(
        _topk_kernel, (tokens,), logits.device, logits, weights, ids, experts, *token_strides(logits),
        K=k, SLOTS=next_power_of_2(k), RENORMALIZE=renormalize, **meta,
    )  # fmt: skip

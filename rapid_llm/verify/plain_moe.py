"""Plain rows, as in `rapid_llm.verify.plain`, of the ops of a mixture of experts, and the faults that they know."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from rapid_llm.verify.plain import give

FAULTS: Final = MappingProxyType(
    {
        "moe.topk": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("softmax of the chosen", "fp32"),
                ("never renormalised", "bf16"),
                ("always renormalised", "fp32"),
                ("higher id first", "fp32"),
                ("in order of ids", "bf16"),
                ("smallest", "fp32"),
                ("sigmoid", "fp32"),
                ("exp overflows", "fp32"),
                ("NaN wins", "fp32"),
                ("weights through bf16", "fp32"),
            )
        ),
        "fused_moe": tuple(
            (fault, dtype, None)
            for fault, dtype in (
                ("gate and up swapped", "fp32"),
                ("gate and up interleaved", "bf16"),
                ("weights ignored", "fp32"),
                ("first choice alone", "bf16"),
                ("last choice dropped", "fp32"),
                ("no expert is the first", "fp32"),
                ("no expert is the last", "fp32"),
                ("next expert", "bf16"),
                ("gelu", "fp32"),
                ("weights before the layer", "fp32"),
                ("hidden through bf16", "fp32"),
                ("every expert read", "fp32"),
            )
        ),
    }
)
"""op -> (fault, dtype and scheme where it shows)."""


def moe_topk(logits: Tensor, k: int, renormalize: bool = True, *, fault: str = "") -> tuple[Tensor, Tensor]:
    weights, ids = torch.empty(len(logits), k), torch.empty(len(logits), k, dtype=torch.int32)
    for token, row in enumerate(logits.float()):
        ranked = [float("-inf") if x != x and fault != "NaN wins" else x for x in row.tolist()]
        order = sorted(range(len(ranked)), key=lambda i: -ranked[i] if ranked[i] == ranked[i] else float("-inf"))
        if fault == "higher id first":
            order = sorted(range(len(ranked)), key=lambda i: (-ranked[i], -i))
        elif fault == "smallest":
            order.reverse()
        order = sorted(order[:k]) if fault == "in order of ids" else order[:k]
        mass = row.exp() if fault == "exp overflows" else (row - max(ranked)).exp()
        if fault == "sigmoid":
            mass = torch.sigmoid(row)
        share = mass / (mass[order].sum() if fault == "softmax of the chosen" else mass.sum())
        chosen = share[order]
        if (renormalize and fault != "never renormalised") or fault == "always renormalised":
            chosen = chosen / chosen.sum()
        weights[token] = chosen.bfloat16().float() if fault == "weights through bf16" else chosen
        ids[token] = torch.tensor(order, dtype=torch.int32)
    return weights, ids


def fused_moe(
    input: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out: Tensor | None = None,
    *,
    fault: str = "",
) -> Tensor:
    experts, inter = gate_up.shape[0], down.shape[2]
    result = torch.zeros(input.shape)
    for token, row in enumerate(input.float()):
        ids = topk_ids[token].tolist()
        for j, expert in enumerate(ids):
            if not 0 <= expert < experts:
                if fault not in ("no expert is the first", "no expert is the last"):
                    continue
                expert = 0 if fault == "no expert is the first" else experts - 1
            if (fault == "first choice alone" and j) or (fault == "last choice dropped" and j == len(ids) - 1):
                continue
            expert = (expert + 1) % experts if fault == "next expert" else expert
            factor = 1.0 if fault == "weights ignored" else float(topk_weights[token, j])
            result[token] += _expert(row, gate_up[expert].float(), down[expert].float(), inter, factor, fault)
        if fault == "every expert read":
            for expert in set(range(experts)) - set(ids):
                result[token] += 0.0 * _expert(row, gate_up[expert].float(), down[expert].float(), inter, 1.0, "")
    return give(result, out, input.dtype)


def _expert(row: Tensor, gate_up: Tensor, down: Tensor, inter: int, factor: float, fault: str) -> Tensor:
    both = gate_up @ (row * factor if fault == "weights before the layer" else row)
    gate, up = both[:inter], both[inter:]
    if fault == "gate and up swapped":
        gate, up = up, gate
    elif fault == "gate and up interleaved":
        gate, up = both[0::2], both[1::2]
    hidden = (torch.nn.functional.gelu(gate) if fault == "gelu" else gate / (1 + torch.exp(-gate))) * up
    if fault == "hidden through bf16":
        hidden = hidden.bfloat16().float()
    return down @ hidden * (1.0 if fault == "weights before the layer" else factor)

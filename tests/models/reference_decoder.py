"""A slow, obvious decoder: dense fp32 weights, no cache, no fusion, one head after the other.

It shares no code with the package, so that an error in either shows as a difference.
"""

from __future__ import annotations

import math

import torch

from tests.models.tiny import LAYERS, Shape

Weights = dict[str, torch.Tensor]


def logits(weights: Weights, shape: Shape, ids: list[int], layers: int = LAYERS) -> torch.Tensor:
    """(len(ids), vocab) fp32 logits of one sequence. weights: by GGUF name, rows of q and k in head order."""
    x = weights["token_embd.weight"][ids]
    for i in range(layers):
        part = {name.removeprefix(f"blk.{i}."): w for name, w in weights.items() if name.startswith(f"blk.{i}.")}
        x = x + _attention(part, shape, _norm(x, part["attn_norm.weight"], shape.eps), weights.get("rope_freqs.weight"))
        h = _norm(x, part["ffn_norm.weight"], shape.eps)
        gate, up = h @ part["ffn_gate.weight"].T, h @ part["ffn_up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ part["ffn_down.weight"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    return _norm(x, weights["output_norm.weight"], shape.eps) @ head.T


def greedy(weights: Weights, shape: Shape, ids: list[int], steps: int, layers: int = LAYERS) -> list[int]:
    """The next `steps` most probable ids, each computed from scratch."""
    out = list(ids)
    for _ in range(steps):
        out.append(int(logits(weights, shape, out, layers)[-1].argmax()))
    return out[len(ids) :]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _attention(part: Weights, shape: Shape, h: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Causal attention, head by head; each query head reads the key/value head of its group."""
    tokens, d = h.shape[0], shape.head_dim
    q, k, v = (h @ part[f"attn_{n}.weight"].T + part.get(f"attn_{n}.bias", 0) for n in "qkv")
    group = shape.heads // shape.kv_heads
    outputs = []
    for head in range(shape.heads):
        kv = head // group
        qh, kh, vh = q[:, head * d : (head + 1) * d], k[:, kv * d : (kv + 1) * d], v[:, kv * d : (kv + 1) * d]
        if "attn_q_norm.weight" in part:
            qh = _norm(qh, part["attn_q_norm.weight"], shape.eps)
            kh = _norm(kh, part["attn_k_norm.weight"], shape.eps)
        qh, kh = _rotate(qh, shape.theta, factors), _rotate(kh, shape.theta, factors)
        scores = qh @ kh.T / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
        outputs.append(torch.softmax(scores, -1) @ vh)
    return torch.cat(outputs, 1) @ part["attn_output.weight"].T


def _rotate(x: torch.Tensor, theta: float, factors: torch.Tensor | None) -> torch.Tensor:
    """Element i and element i + d/2 of position p turn by the angle p * theta ** (-2i / d) / factor[i]."""
    half = x.shape[1] // 2
    positions = torch.arange(x.shape[0], dtype=torch.float64)
    out = torch.empty_like(x)
    for i in range(half):
        angles = positions * (theta ** (-2 * i / x.shape[1]) / (1.0 if factors is None else float(factors[i])))
        cos, sin = angles.cos().float(), angles.sin().float()
        out[:, i] = x[:, i] * cos - x[:, i + half] * sin
        out[:, i + half] = x[:, i] * sin + x[:, i + half] * cos
    return out

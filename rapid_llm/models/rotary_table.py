"""Cosines and sines of every position, as the rope ops read them."""

from __future__ import annotations

import torch
from torch import Tensor

from .rope import Rope


def rotary_table(rope: Rope, dim: int, length: int, factors: Tensor | None = None) -> Tensor:
    """(length, dim) fp32: cosines, then sines, of position * frequency[i] / factor[i], times the scaling's magnitude.

    Frequencies and angles are taken in fp64, so that far positions are as exact as near ones.
    """
    frequencies = torch.tensor(rope.frequencies(dim, length), dtype=torch.float64)
    if factors is not None:
        frequencies = frequencies / factors.to("cpu", torch.float64)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.scaling.magnitude).float()

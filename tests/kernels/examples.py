"""Example calls of every op: the real sizes at which its Triton kernels are compiled for GPUs that are not here.

`EXAMPLES[op id]` is a list of (label, make); `make(dtype)` gives (positional arguments, keyword arguments) on the CPU.
Give one example for each distinct compilation that users meet (a scheme, a layout, an aligned and a misaligned size),
not for each size: equal compilations are done once. Values do not matter, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[torch.dtype], Call]

BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}


def _blocks(rows: int, elements: int, scheme: str) -> torch.Tensor:
    return torch.zeros(rows, elements // 32 * BLOCK_BYTES[scheme], dtype=torch.uint8)


EXAMPLES: dict[str, list[tuple[str, Make]]] = {
    "scale": [
        ("aligned", lambda dtype: ((torch.zeros(4, 4096, dtype=dtype), 0.3), {})),
        ("tail", lambda dtype: ((torch.zeros(4097, dtype=dtype), 0.3), {})),
        ("strided", lambda dtype: ((torch.zeros(8, 6, 130, dtype=dtype)[:, ::2, 1:], 0.3), {})),
    ],
}

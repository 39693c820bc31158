"""silu(gate) * up without a look at strides; the launcher divides the width by 8."""

import torch

from ._demands import HALF, dense, some


def silu_and_mul(
    input: torch.Tensor, out: torch.Tensor = None, enable_pdl: bool | None = None
) -> torch.Tensor:  # fmt: skip
    if input.shape[-1] * input.dtype.itemsize % 16 != 0:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    half = input.shape[-1] // 2
    assert input.dtype in HALF
    assert half >= 8
    assert half % 8 == 0
    some(input)
    dense(input)
    dense(out)
    gate, up = input[..., :half].double(), input[..., half:].double()
    tiny = torch.finfo(torch.float32).tiny  # -use_fast_math takes such numbers for 0
    gate, up = (torch.where(t.abs() < tiny, 0.0, t) for t in (gate, up))
    product = gate / (1 + torch.exp(-gate)) * up
    out.copy_(torch.where(product.abs() < tiny, 0.0, product))
    return out

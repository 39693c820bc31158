"""`flashinfer/rmsnorm.*`: flashinfer's norm reads the weight in the input's dtype, so another one is converted."""

from __future__ import annotations

import torch

from rapid_llm.kernels.backend.flashinfer import LIBRARY
from rapid_llm.kernels.backend.flashinfer._calls import aligned, check_rows, deliver, direct, first_use, on_device
from rapid_llm.kernels.ops.arguments import check_alias, check_tensor, check_written
from rapid_llm.kernels.ops.layernorm.rmsnorm import refuse_weight

_rmsnorm = LIBRARY.function("rmsnorm")


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """input / sqrt(mean(input**2, -1) + eps) * weight, in fp32, the weight rounded to input's dtype."""
    if weight.shape != input.shape[-1:] or weight.device != input.device:
        refuse_weight("rmsnorm", input, weight)
    check_rows("rmsnorm", "input", input)
    if out is not None:
        check_tensor("rmsnorm", "out", out, input, input.shape)
        check_alias("rmsnorm", out, "input", input)
        check_written("rmsnorm", "out", out)
    weight = aligned(weight.to(input.dtype).contiguous())
    result = direct(out, input, weight)
    if result is None:
        result = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    if input.numel():
        hidden = input.shape[-1]
        # flashinfer takes (rows, hidden) and (tokens, heads, hidden), the latter of any strides but the last.
        strided = input.dim() == 3 and not input.is_contiguous()
        rows = input if strided or input.dim() == 2 else input.reshape(-1, hidden)
        first_use("rmsnorm", input.dtype, hidden, rows.dim(), rows.is_contiguous())
        with on_device(input):
            _rmsnorm(aligned(rows), weight, eps=eps, out=result.view(rows.shape))
    return deliver(result, out)

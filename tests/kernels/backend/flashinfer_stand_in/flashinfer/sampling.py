"""The two filters, which keep ties."""

import torch

from ._demands import dense, some


def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    some(logits)
    dense(logits)
    assert not logits.isnan().any()
    assert top_k.dtype == torch.int32
    assert ((top_k > 0) & (top_k <= logits.shape[1])).all()
    down = logits.sort(1, descending=True).values
    return torch.where(logits >= down.gather(1, top_k[:, None].long() - 1), logits, float("-inf"))


def top_p_renorm_probs(
    probs: torch.Tensor,
    top_p: torch.Tensor | float,
    is_deterministic: bool = False,
) -> torch.Tensor:
    some(probs)
    dense(probs)
    dense(top_p, 4)
    assert probs.dtype == top_p.dtype == torch.float32
    assert is_deterministic
    assert not probs.isnan().any(), "the search for the border would not end"
    assert ((top_p > 0) & (top_p <= 1)).all()
    down = probs.sort(1, descending=True).values
    reached = down.double().cumsum(1) >= top_p[:, None].double()
    last = torch.where(reached.any(1), reached.to(torch.uint8).argmax(1), probs.shape[1] - 1)
    kept = torch.where(probs >= down.gather(1, last[:, None]), probs, 0.0)
    return kept / kept.sum(1, keepdim=True)

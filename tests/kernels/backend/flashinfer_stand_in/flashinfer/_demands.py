"""What upstream's kernels take for granted."""

import torch

HALF = (torch.float16, torch.bfloat16)


def rows(tensor: torch.Tensor, alignment: int) -> None:
    """16 bits, a dense last dimension, aligned rows."""
    assert tensor.dtype in HALF, tensor.dtype
    assert tensor.shape[-1] == 1 or tensor.stride(-1) == 1, tensor.stride()
    assert tensor.data_ptr() % alignment == 0
    assert all(s * tensor.element_size() % 16 == 0 for s in tensor.stride()[:-1]), tensor.stride()


def dense(tensor: torch.Tensor, alignment: int = 16) -> None:
    assert tensor.is_contiguous(), tensor.stride()
    assert tensor.data_ptr() % alignment == 0


def some(tensor: torch.Tensor) -> None:
    """An empty launch is an error."""
    assert tensor.numel() > 0

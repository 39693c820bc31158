"""DeepGEMM's fp8_gemm_nt with torch, as strict about its arguments as the kernels for SM 90 are."""

import torch


def fp8_gemm_nt(a, b, d, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
    (codes, scales), (weight, blocks) = a, b
    (m, k), (n, _) = codes.shape, weight.shape
    assert codes.dtype == weight.dtype == torch.float8_e4m3fn
    assert scales.dtype == blocks.dtype == torch.float32
    assert d.dtype == torch.bfloat16
    assert d.stride(1) == codes.stride(1) == weight.stride(1) == 1
    assert weight.stride(0) % 16 == codes.stride(0) % 16 == weight.data_ptr() % 16 == 0
    assert scales.shape == (m, k // 128)
    assert blocks.shape == (-(-n // 128), k // 128)
    assert blocks.is_contiguous()
    assert d.shape == (m, n)
    assert c is None
    left = codes.double() * scales.double().repeat_interleave(128, 1)
    right = weight.double() * blocks.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    d.copy_((left @ right.T).float())

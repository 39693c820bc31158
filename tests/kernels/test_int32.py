"""Offsets beyond 2**31 elements, in every native row that walks memory by strides.

Rows lie 2**30 elements apart in a buffer of which only those rows are ever touched: 6 GiB of addresses, a few pages of
memory. Catches: a product of two 32-bit integers as an offset, which writes somewhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rapid_llm.kernels.ops.activation.silu_and_mul import silu_and_mul
from rapid_llm.kernels.ops.elementwise.scale import scale
from rapid_llm.kernels.ops.embedding.embedding import embedding
from rapid_llm.kernels.ops.kvcache.kvcache_write import kvcache_write
from rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm import fused_add_rmsnorm
from rapid_llm.kernels.ops.layernorm.rmsnorm import rmsnorm
from rapid_llm.kernels.ops.rope.rope import rope
from rapid_llm.kernels.ops.triton_support import INTERPRETED, MISSING_REASON
from tests.kernels.devices import DEVICES

pytestmark = pytest.mark.interpreter

FAR = 2**30
ROWS = 4


@pytest.fixture(params=DEVICES)
def buffer(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    try:
        yield torch.empty((ROWS - 1) * FAR + 4096, dtype=torch.float16, device=request.param)
    except (RuntimeError, MemoryError) as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        pytest.skip(f"6 GiB of addresses cannot be had: {error}")


def far(buffer: torch.Tensor, *shape: int, start: int = 0) -> torch.Tensor:
    """A random tensor (ROWS, *shape) whose rows are FAR apart, and whose columns are not."""
    inner = torch.empty(shape).stride()
    x = buffer.as_strided((ROWS, *shape), (FAR, *inner), start)
    return x.copy_(torch.randn(x.shape, device=buffer.device))


def test_row_ops(buffer: torch.Tensor) -> None:
    x, y = far(buffer, 64), far(buffer, 64, start=64)
    weight = torch.rand(64, device=buffer.device)
    near, near_y = x.clone(), y.clone()
    assert torch.equal(rmsnorm(x, weight), rmsnorm(near, weight))
    assert torch.equal(silu_and_mul(x), silu_and_mul(near))
    out = far(buffer, 64, start=128)
    assert torch.equal(scale(x, 0.3, out), scale(near, 0.3))
    fused_add_rmsnorm(x, y, weight)
    fused_add_rmsnorm(near, near_y, weight)
    assert torch.equal(x, near)
    assert torch.equal(y, near_y)


def test_columns_far_apart(buffer: torch.Tensor) -> None:
    x = far(buffer, 8).t()
    near = x.clone()
    weight = torch.rand(ROWS, device=buffer.device)
    assert torch.equal(rmsnorm(x, weight), rmsnorm(near, weight))
    assert torch.equal(silu_and_mul(x), silu_and_mul(near))
    assert torch.equal(scale(x, 0.3), scale(near, 0.3))


def test_rope(buffer: torch.Tensor) -> None:
    query, key = far(buffer, 2, 16), far(buffer, 1, 16, start=64)
    near = query.clone(), key.clone()
    table = torch.rand(9, 16, device=buffer.device)
    positions = torch.tensor([3, 1, 8, 0], device=buffer.device)
    rope(query, key, positions, table)
    rope(*near, positions, table)
    assert torch.equal(query, near[0])
    assert torch.equal(key, near[1])


def test_embedding(buffer: torch.Tensor) -> None:
    table = far(buffer, 64)
    ids = torch.tensor([3, 0, 2], device=buffer.device)
    assert torch.equal(embedding(ids, table), table.clone()[ids])


def test_kvcache_write(buffer: torch.Tensor) -> None:
    k_cache, v_cache = far(buffer, 16, 1, 8), far(buffer, 16, 1, 8, start=256)
    key, value = torch.randn(2, 3, 1, 8, device=buffer.device).half()
    wanted = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([50, 3, 33], device=buffer.device)
    for source, cache in zip((key, value), wanted, strict=True):
        cache.view(-1, 1, 8)[slots] = source
    kvcache_write(key, value, k_cache, v_cache, slots)
    assert torch.equal(k_cache, wanted[0])
    assert torch.equal(v_cache, wanted[1])


@pytest.mark.skipif(bool(MISSING_REASON) or INTERPRETED, reason="needs Triton as a compiler")
def test_scale_counts_in_64_bits() -> None:
    """Catches: an element count or a grid cut to 32 bits; looked at in the launch, since nothing runs here."""
    from tests.kernels.triton_compile import record

    x = torch.empty(1, dtype=torch.bfloat16).expand(2**31 + 4097)
    out = torch.empty(2**31 + 4097, dtype=torch.bfloat16)
    (launch,) = record(90, scale, x, 0.3, out)
    assert launch.signature["numel"] == "i64"
    assert launch.grid[0] * launch.constexprs[launch.kernel.arg_names.index("BLOCK"),] >= 2**31 + 4097

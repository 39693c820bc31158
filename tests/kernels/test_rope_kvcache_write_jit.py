"""`jit/rope_kvcache_write`: what the conformance suite does not say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit
from rapid_llm.kernels.ops.kvcache.rope_kvcache_write_jit import rope_kvcache_write
from tests.kernels.fused_cache_write import Call, check, make, refusals

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]


@pytest.fixture(scope="module")
def built() -> None:
    """Builds once, so that a broken toolchain fails first and with its log; skips where the path is absent."""
    if not (probe := jit.why_not()).ok:
        pytest.skip(f"jit: {probe.text}")
    jit.load_jit("rope_kvcache_write", "kvcache/rope_kvcache_write.cu")


def test_refuses_cpu_tensors() -> None:
    """Catches: host memory handed to a kernel, or a compile started for it."""
    call = make(2, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"rope_kvcache_write.*CUDA"):
        rope_kvcache_write(*call.args)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
def test_one_projection(tokens: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Catches: a neighbour's heads read or written where query, key and value are views of one tensor."""
    call = make(tokens, device="cuda", dtype=dtype)
    before = call.copy()
    assert rope_kvcache_write(*call.args, interleaved=interleaved) is None
    check(call, before, interleaved=interleaved)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", ["projection", "k_cache", "v_cache", "table"])
def test_one_misaligned_tensor(shifted: str, dtype: torch.dtype) -> None:
    """Catches: 16-byte accesses although one of the tensors lies one element off, which ends the context."""
    call = make(5, device="cuda", dtype=dtype)
    tensor = getattr(call, shifted)
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape).copy_(tensor)
    parts = {name: getattr(call, name) for name in ("projection", "k_cache", "v_cache", "positions", "table", "slots")}
    call = Call(**{**parts, shifted: moved})
    before = call.copy()
    rope_kvcache_write(*call.args)
    check(call, before)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_position_and_slot_outside() -> None:
    """Catches: a read beyond the table, a write beyond the cache: NaN marks the one, the other is skipped."""
    call = make(3, device="cuda", dtype=torch.bfloat16)
    call.positions[1], call.slots[0] = call.table.shape[0], 4 * 16
    call.positions[2] = -1
    before = call.k_cache.clone()
    rope_kvcache_write(*call.args)
    assert call.query.isnan().all(-1).all(-1).tolist() == [False, True, True]
    assert int((call.k_cache != before).any(-1).any(-1).sum()) == 1  # of three tokens one is padding, one beyond


def _on_cuda(change: Any) -> tuple[Tensor, ...]:
    call: Call = make(3, device="cuda", dtype=torch.float32)
    return tuple(change(call))


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        *refusals(),
        pytest.param(lambda c: (*c.args[:4], c.k_cache, *c.args[5:]), "k_cache overlaps v_cache", id="one cache"),
        pytest.param(
            lambda c: (*c.args[:7], c.slots.cpu()), "slot_mapping must be a CUDA tensor", id="slots on the CPU"
        ),
        pytest.param(lambda c: (c.query, c.key.cpu(), *c.args[2:]), "key must be a CUDA tensor", id="key on the CPU"),
        pytest.param(
            lambda c: (*(t.double() for t in c.args[:5]), *c.args[5:]), "float64 is not a dtype", id="another dtype"
        ),
        pytest.param(
            lambda c: (c.query.transpose(1, 2).contiguous().transpose(1, 2), *c.args[1:]),
            "query must be contiguous in its last dimension",
            id="heads innermost",
        ),
    ],
)
def test_refusals(change: Any, pattern: str) -> None:
    """Catches: memory read by another stride, type or device than it has, arguments that overlap."""
    with pytest.raises(RuntimeError, match=pattern):
        rope_kvcache_write(*_on_cuda(change))


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_capture_and_replay() -> None:
    """Catches: a host value baked into a captured graph, a launch on another stream than the capturing one."""
    static = make(5, device="cuda", dtype=torch.bfloat16)
    rope_kvcache_write(*static.args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope_kvcache_write(*static.args)
    for seed in (1, 2):
        fresh = make(5, device="cuda", dtype=torch.bfloat16, seed=seed)
        for name, tensor in vars(static).items():
            if name not in ("query", "key", "value"):
                tensor.copy_(getattr(fresh, name))
        graph.replay()
        check(static, fresh)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_side_stream() -> None:
    """Catches: a launch on the default stream, which does not wait for what this stream has yet to write."""
    call = make(64, device="cuda", dtype=torch.bfloat16)
    before = call.copy()
    truth = call.projection.clone()
    call.projection.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call.projection.copy_(truth)
        rope_kvcache_write(*call.args)
    stream.synchronize()
    check(call, before)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one() -> None:
    """Catches: a launch on the current device instead of the tensors', and a device left current."""
    call = make(5, device="cuda:1", dtype=torch.bfloat16)
    before = call.copy()
    rope_kvcache_write(*call.args)
    assert torch.cuda.current_device() == 0
    check(call, before)

"""`jit/rope`: what the conformance suite does not say. Its device code is rope_kvcache_write's, tested there too."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels import jit
from rapid_llm.kernels.ops.rope.rope_jit import rope
from rapid_llm.verify import bounds
from rapid_llm.verify.compare import compare
from tests.kernels.fused_cache_write import Call, make
from tests.reference import oracle

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
    jit.load_jit("rope", "rope/rope.cu")


def _check(call: Call, before: Call, *, interleaved: bool = False) -> None:
    names = ("query", "key", "positions", "cos_sin_cache")
    tensors = (before.query, before.key, before.positions, before.table)
    args = {n: t.cpu() for n, t in zip(names, tensors, strict=True)} | {"interleaved": interleaved}
    expected = oracle("rope")(**args)
    limits = bounds.rope(args, expected)
    for name, truth, limit in zip(names[:2], expected, limits, strict=True):
        problem = compare(getattr(call, name).cpu(), truth, limit).problem
        assert problem is None, f"{name}: {problem}"
    assert torch.equal(call.value, before.value)


def test_refuses_cpu_tensors() -> None:
    """Catches: host memory handed to a kernel, or a compile started for it."""
    call = make(2, device="cpu", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"rope.*CUDA"):
        rope(call.query, call.key, call.positions, call.table)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_one_projection(tokens: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Catches: a neighbour's heads written where query, key and value are views of one tensor."""
    call = make(tokens, device="cuda", dtype=dtype)
    before = call.copy()
    assert rope(call.query, call.key, call.positions, call.table, interleaved=interleaved) is None
    _check(call, before, interleaved=interleaved)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_refusals() -> None:
    """Catches: shapes that broadcast, a table in another precision, overlapping arguments, memory on the CPU."""
    call = make(3, device="cuda", dtype=torch.float32)
    query, key, positions, table = call.query, call.key, call.positions, call.table
    for args, pattern in (
        ((query, key[..., :32], positions, table), r"rope.*same shape"),
        ((query, key, positions[:1], table), r"rope.*positions.*\(3,\)"),
        ((query, key, positions, table.half()), r"rope.*float32"),
        ((query, key, positions, table.repeat(1, 2)), r"rope.*rotary_dim"),
        ((query, query[:, 1:], positions, table), r"rope.*overlaps key"),
        ((query[:, :1].expand(3, 9, 64), key, positions, table), r"rope.*share memory"),
        ((query, key, positions.cpu(), table), r"rope.*CUDA"),
        ((query, key.half(), positions, table), r"rope.*dtype"),
    ):
        with pytest.raises(RuntimeError, match=pattern):
            rope(*args)


@pytest.mark.gpu
@pytest.mark.usefixtures("built")
def test_capture_and_replay() -> None:
    """Catches: positions baked into a captured graph, a launch on another stream than the capturing one."""
    static = make(5, device="cuda", dtype=torch.bfloat16)
    rope(static.query, static.key, static.positions, static.table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rope(static.query, static.key, static.positions, static.table)
    fresh = make(5, device="cuda", dtype=torch.bfloat16, seed=1)
    for name in ("projection", "positions", "table"):
        getattr(static, name).copy_(getattr(fresh, name))
    graph.replay()
    _check(static, fresh)

"""CUDA graphs and dispatch on a GPU: nothing is built within a capture, and host work is never captured (P65, D6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rapid_llm import kernels
from rapid_llm.kernels import dispatch, explain, jit, register
from rapid_llm.kernels.ops.elementwise import scale as scale_module
from rapid_llm.kernels.registry import ForcedRowError, KernelSpec, NotReadyError, dispatcher, evidence, unregister
from tests import scratch

pytestmark = pytest.mark.gpu

MODULE = """
import torch
from rapid_llm.kernels.jit import Kernel

# Flags of its own, so that no earlier test has loaded it.
_scale = Kernel("scale", "elementwise/scale.cu", extra_cuda_cflags=("-O3", "-DRAPID_LLM_TEST_COLD"))
prepare = _scale.prepare

def cold(input, factor, out=None):
    out = torch.empty_like(input) if out is None else out
    _scale[input.get_device()](out, input, factor)
    return out

def on_host(input, factor, out=None):
    return torch.mul(input, factor + 0.0 * float(input.max().item()), out=out)

def there():
    return True
"""


@pytest.fixture
def x() -> Iterator[torch.Tensor]:
    """1024 numbers, for which the floor's kernel is loaded."""
    x = torch.arange(1024, dtype=torch.float32, device="cuda")
    dispatch("scale", x, 2.0, backend="native")(x, 2.0)
    torch.cuda.synchronize()
    yield x
    kernels.thaw()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return scratch.make_module(tmp_path, "scratch_cuda_rows", MODULE)


def _row(name: str, module: str, function: str, **changes: object) -> Iterator[str]:
    fields = {"available": f"{module}:there", "devices": ("cuda",), "layout": ("contiguous",), "priority": 50}
    register(
        KernelSpec(
            name=name, op="scale", backend=name.split("/")[0], target=f"{module}:{function}", **fields, **changes
        )
    )  # type: ignore[arg-type]
    scratch.prove(name, "cuda", "fp32")
    yield name
    unregister(name)
    evidence.forget(name)
    dispatcher.forget(None)


@pytest.fixture
def cold(module: str) -> Iterator[str]:
    """The best row of scale, whose code is not built yet."""
    if not jit.available():
        pytest.skip(f"jit: {jit.why_not().text}")
    jit.forget()  # an earlier test of this process has loaded it
    yield from _row("cold/scale", module, "cold", prepare=f"{module}:prepare")


@pytest.fixture
def host(module: str) -> Iterator[str]:
    """The best row of scale, which reads its input on the host."""
    yield from _row("host/scale", module, "on_host", graph_safe=False)


def check_replay(graph: torch.cuda.CUDAGraph, x: torch.Tensor, result: torch.Tensor) -> None:
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, x * 2.0)


def test_a_cold_row_is_not_built_in_a_capture(cold: str, x: torch.Tensor) -> None:
    """P65: a compiler that runs within a capture, a wrong replay, a row that is never taken afterwards."""
    before = kernels.compiles()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = kernels.scale(x, 2.0)
    assert kernels.compiles() == before
    check_replay(graph, x, result)
    assert torch.equal(kernels.scale(x, 2.0), x * 2.0)
    assert kernels.compiles() == before + 1
    assert explain("scale", x, 2.0).selected == cold
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        result = kernels.scale(x, 2.0)
    check_replay(again, x, result)


def test_a_cold_row_that_is_forced_or_strict_is_a_typed_error(
    cold: str, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P65: a forced row that is swapped for the floor in a capture; strict mode that falls to it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(1.0)  # torch warns of a graph that is empty
        with pytest.raises(ForcedRowError, match="a CUDA graph is being captured"):
            dispatch("scale", x, 2.0, backend=cold)
        monkeypatch.setenv("RAPID_LLM_STRICT", "1")
        with pytest.raises(NotReadyError, match="a CUDA graph is being captured"):
            dispatch("scale", x, 2.0)


def test_a_cold_triton_kernel_is_not_compiled_in_a_capture(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """P65: Triton's compiler within a capture, a wrong replay, a floor that stays with PyTorch afterwards."""
    kernel = scale_module._scale_dense
    monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    before = kernels.compiles()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scale_module.scale(x, 2.0)
    assert kernels.compiles() == before
    check_replay(graph, x, result)
    scale_module.scale(x, 2.0)
    assert kernels.compiles() == before + 1


def test_prepared_kernels_are_ready_for_a_capture(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a prepare() that compiles and does not load, so that the capture has to."""
    kernel = scale_module._scale_dense
    monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    report = kernels.prepare([{"op": "scale", "args": (x, 2.0), "backend": "native"}])
    assert (report.ok, report.kernels, report.notes) == (True, 1, ())
    kernels.freeze()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scale_module.scale(x, 2.0)
    check_replay(graph, x, result)


def test_host_work_is_not_captured(host: str, x: torch.Tensor) -> None:
    """D6: a host value baked into a graph, by a bound handle or by the public function."""
    handle = dispatch("scale", x, 2.0)
    assert handle.spec.name == host
    assert torch.equal(handle(x, 2.0), x * 2.0)
    for call in (handle, kernels.scale):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(x, 2.0)
        check_replay(graph, x, result)
    assert explain("scale", x, 2.0).selected == host


def test_host_work_that_is_forced_is_refused(host: str, x: torch.Tensor) -> None:
    """D6: a row named by the user that is swapped for another in silence, or captured."""
    handle = dispatch("scale", x, 2.0, backend=host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(1.0)  # torch warns of a graph that is empty
        with pytest.raises(ForcedRowError, match="a CUDA graph cannot capture it"):
            handle(x, 2.0)

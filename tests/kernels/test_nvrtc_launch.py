"""The NVRTC path's launches: what the driver is told, and which kernel and grid the wrappers choose."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rapid_llm.kernels import registry
from rapid_llm.kernels.nvrtc import CudaError, libcuda
from rapid_llm.kernels.registry import ArgumentError, KernelSpec, probes
from tests.kernels.fake_cuda import FakeCuda
from tests.kernels.gpu_rows import built_rows, need

ROWS = [pytest.param(row, id=row.name) for row in built_rows("nvrtc")]


# ---- what the driver is told -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def entered(index: int, current: list[int]) -> Iterator[None]:
    previous, current[0] = current[0], index
    yield
    current[0] = previous


def launcher(fake: FakeCuda, signature: str, index: int = 0, current: list[int] | None = None) -> Callable[..., None]:
    device = [0] if current is None else current
    driver = libcuda.Driver(fake)
    (function,) = driver.functions(b"cubin", ["symbol"], index)
    return libcuda.launcher(
        *(driver, function, "toy", signature, index),
        stream_of=lambda i: 0x5000 + i,
        current=lambda: device[0],
        guard=lambda i: entered(i, device),
    )


class Arguments(ctypes.Structure):
    """As C lays out the parameters of signature `pfplitiu`."""

    class AnyFloats(ctypes.Structure):
        _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int))

    _fields_ = (
        *(("p", ctypes.c_void_p), ("f", ctypes.c_float), ("q", ctypes.c_void_p), ("l", ctypes.c_int64)),
        *(("i", ctypes.c_int), ("t", AnyFloats), ("j", ctypes.c_int), ("u", ctypes.c_uint)),
    )


def test_a_launch_passes_grid_block_stream_and_arguments_as_c_lays_them_out() -> None:
    """Catches: a field of the configuration at a wrong place, an argument that is not aligned, a wrong stream."""
    fake = FakeCuda()
    launcher(fake, "pfplitiu")(2**31 - 1, 96, 4, 2**63 + 5, 0.1, 7, -(2**40), -3, 11, 2, -4, 2**32 - 1)
    (launched,) = fake.launches
    assert (launched.grid, launched.block) == ((2**31 - 1, 1, 1), (96, 4, 1))
    assert (launched.shared, launched.stream, launched.attributes) == (0, 0x5000, (0, 0))
    assert len(launched.arguments) == ctypes.sizeof(Arguments)
    got = Arguments.from_buffer_copy(launched.arguments)
    assert (got.p, got.f, got.q, got.l) == (2**63 + 5, ctypes.c_float(0.1).value, 7, -(2**40))
    assert (got.i, got.t.data, got.t.kind, got.j, got.u) == (-3, 11, 2, -4, 2**32 - 1)
    assert fake.cubins == [b"cubin"]
    assert fake.symbols == ["symbol"]
    assert launched.function == 0xF001
    assert fake.contexts == [("push", 0xC0), ("pop", 0)]  # whatever was current is current again


@pytest.mark.parametrize("value", [1e300, -1e300, float("inf"), float("nan"), 1e-300])
def test_a_float_becomes_what_c_makes_of_it(value: float) -> None:
    """Catches: an OverflowError where the product with an infinity is meant."""
    fake = FakeCuda()
    launcher(fake, "pf")(1, 32, 1, 0, value)
    got = struct.unpack("Qf", fake.launches[0].arguments)[1]
    assert repr(got) == repr(ctypes.c_float(value).value)


def test_a_refused_launch_names_the_error_and_the_block() -> None:
    """Catches: a launch that did not happen, unnoticed (P75), and a launcher that is of no use afterwards."""
    fake = FakeCuda(fails={"cuLaunchKernelEx": [1]})
    launch = launcher(fake, "p")
    with pytest.raises(CudaError, match=r"toy.*5 blocks of 4096 x 1.*CUDA_ERROR_1: it is Monday"):
        launch(5, 4096, 1, 0)
    launch(5, 32, 1, 0)
    assert len(fake.launches) == 1
    with pytest.raises(ArgumentError, match="toy"):
        launch(2**32, 32, 1, 0)


def test_a_cubin_that_the_driver_refuses_is_named_and_the_context_restored() -> None:
    """Catches: an unchecked status, a context left on the stack."""
    fake = FakeCuda(fails={"cuModuleLoadData": [209]})
    with pytest.raises(CudaError, match="cuModuleLoadData: CUDA_ERROR_209"):
        launcher(fake, "p")
    assert [what for what, _ in fake.contexts] == ["push", "pop"]


def test_a_thread_without_a_context_gets_the_devices() -> None:
    """Catches: a first launch that fails in a thread in which nothing of CUDA ran yet."""
    fake = FakeCuda(fails={"cuLaunchKernelEx": [201]})
    launcher(fake, "p", index=1, current=[1])(1, 32, 1, 0)
    assert fake.contexts[-1] == ("set", 0xC1)
    assert fake.launches[0].stream == 0x5001


def test_a_tensor_on_another_device_is_launched_there() -> None:
    """Catches: device 0 assumed (P51); a current device that stays changed."""
    fake, current = FakeCuda(), [0]
    launcher(fake, "p", index=1, current=current)(1, 32, 1, 9)
    assert fake.launches[0].stream == 0x5001
    assert current == [0]


def test_launches_of_several_threads_do_not_mix() -> None:
    """Catches: one buffer for all threads: another's arguments in a launch."""
    fake = FakeCuda()
    launch = launcher(fake, "lll")

    def many(n: int) -> None:
        for _ in range(200):
            launch(n, n, n, n, n, n)

    threads = [threading.Thread(target=many, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 800
    for launched in fake.launches:
        n = launched.grid[0]
        assert launched.block == (n, n, 1)
        assert struct.unpack("qqq", launched.arguments) == (n, n, n)


# ---- what the wrappers choose ----------------------------------------------------------------------------------------


class Recorder(dict[Hashable, Callable[..., None]]):
    """Launchers of any variant that only note the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SimpleNamespace] = []

    def __missing__(self, variant: Hashable) -> Callable[..., None]:
        def launch(blocks: int, threads: int, rows: int, *arguments: Any) -> None:
            self.calls.append(
                SimpleNamespace(variant=variant, blocks=blocks, threads=threads, rows=rows, arguments=arguments)
            )

        return launch


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Callable[..., Any], Recorder]]:
    """(the function, what it launches) of a row, run on CPU tensors."""

    def of(name: str) -> tuple[Callable[..., Any], Recorder]:
        (row,) = (row for row in built_rows("nvrtc") if row.name == name)
        module, _, attr = row.target.partition(":")
        recorder = Recorder()
        found = {(-1, dtype): recorder for dtype in (torch.float32, torch.float16, torch.bfloat16)}
        monkeypatch.setattr(f"{module}._kernels", found)
        monkeypatch.setattr(f"{module}.check_dense", lambda *a: None)
        monkeypatch.setattr("rapid_llm.kernels.ops.layernorm.rmsnorm_nvrtc.check_dense", lambda *a: None)
        return probes.load(f"{module}:{attr}"), recorder

    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grid_of_scale_covers_every_element(recorded: Any, dtype: torch.dtype) -> None:
    """Catches: elements that no thread has, a vector variant for a misaligned pointer, a launch for nothing."""
    scale, recorder = recorded("nvrtc/scale")
    scale(torch.empty(0, dtype=dtype), 2.0)
    assert recorder.calls == []
    for size in (1, 7, 8, 255 * 8, 256 * 8, 4097, 8 * 256 * 1024, 8 * 256 * 1024 + 8 * 1024 + 5):
        for offset in (0, 1):
            x = torch.empty(size + offset, dtype=dtype)[offset:]
            out = scale(x, 2.0)
            (call,) = recorder.calls
            width, unroll = call.variant
            assert width == (1 if offset else 16 // x.element_size())
            assert call.arguments == (out.data_ptr(), x.data_ptr(), 2.0, size // width, size)
            assert call.blocks * call.threads * unroll >= size // width
            assert (call.threads, call.rows) == (256, 1)
            assert size - size // width * width < call.threads  # the last block takes what no vector does
            recorder.calls.clear()


@pytest.mark.parametrize("name", ["nvrtc/rmsnorm", "nvrtc/fused_add_rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_of_a_norm_holds_its_rows(recorded: Any, name: str, dtype: torch.dtype) -> None:
    """Catches: a row longer than its block, more threads than the kernel is bounded to, rows that no block has, and a
    variant that was not compiled."""
    norm, recorder = recorded(name)
    (row,) = (row for row in built_rows("nvrtc") if row.name == name)
    label = "fp32" if dtype is torch.float32 else "bf16"
    compiled = probes.load(row.target.partition(":")[0] + ":_instances")(label)
    for hidden in (1, 8, 31, 256, 264, 1032, 4096, 4097, 8192, 16384, 16392, 32768, 40000):
        for rows in (1, 264, 265, 1056, 1057):
            for weight_dtype in (dtype, torch.float32, torch.float64):
                x, other = torch.empty(rows, hidden, dtype=dtype), torch.empty(rows, hidden, dtype=dtype)
                weight = torch.empty(hidden, dtype=weight_dtype)
                norm(x, other, weight) if "fused" in name else norm(x, weight, 1e-6, other)
                call = recorder.calls.pop()
                assert call.variant in compiled
                assert call.blocks * call.rows >= rows > (call.blocks - 1) * call.rows
                assert call.threads % 32 == 0
                assert call.rows == 1 or call.threads == 32
                width = 16 // x.element_size()
                if isinstance(call.variant, tuple):
                    each = call.variant[1]
                    assert hidden % width == 0
                    assert hidden <= call.threads * each * width
                    assert call.threads * call.rows <= (512 if each * width > 16 else 1024)
                else:
                    assert call.arguments[3] == {torch.float32: 0, torch.bfloat16: 2, torch.float64: 3}[weight_dtype]
                assert call.arguments[-7:] == (hidden, rows, 1, hidden, 0, hidden, 0)
    assert recorder.calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunks_of_silu_and_mul_cover_every_row(recorded: Any, dtype: torch.dtype) -> None:
    """Catches: a part of a row that no block has, a vector variant where halves are misaligned."""
    silu_and_mul, recorder = recorded("nvrtc/silu_and_mul")
    for half in (1, 8, 100, 256 * 8, 256 * 8 + 8, 4097, 28672):
        for rows in (1, 3, 200):
            x = torch.empty(rows, 2 * half, dtype=dtype)
            out = silu_and_mul(x)
            call = recorder.calls.pop()
            width, each = call.variant
            assert half % width == 0
            assert (width == 1) == (half % (16 // x.element_size()) != 0)
            chunks = call.arguments[3]
            assert call.blocks == rows * chunks
            assert call.threads <= 256
            assert chunks * call.threads * each * width >= half
            assert call.arguments == (out.data_ptr(), x.data_ptr(), half, chunks, 1, 2 * half, 0, half, 0)
    assert silu_and_mul(torch.empty(4, 0, dtype=dtype)).shape == (4, 0)
    assert recorder.calls == []


@pytest.mark.parametrize("row", ROWS)
def test_cpu_tensors_are_refused(row: KernelSpec) -> None:
    """Catches: host memory that reaches a kernel."""
    function = probes.load(row.target)
    cases = probes.load(registry.get_op(row.op).cases)("fp32", "cpu", None, budget="full")
    plain = next(case for case in cases if "contiguous" in case.id and "empty" not in case.id)
    with pytest.raises(RuntimeError, match=r"input must be a CUDA tensor"):
        function(**plain.make(torch.Generator().manual_seed(0)))


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scale() -> Callable[..., torch.Tensor]:
    """The row, built first: a broken library fails here, with its log."""
    (row,) = (row for row in built_rows("nvrtc") if row.op == "scale")
    function = need(row)
    function(torch.ones(8, device="cuda"), 2.0)
    return function  # type: ignore[no-any-return]


@pytest.mark.gpu
def test_an_impossible_block_raises(scale: Callable[..., torch.Tensor]) -> None:
    """Catches: a launch that failed, unnoticed (P75), or one that leaves the next one broken."""
    kernels = probes.load("rapid_llm.kernels.ops.elementwise.scale_nvrtc:_kernels")
    x = torch.ones(8, device="cuda")
    with pytest.raises(CudaError, match=r"scale.*4096 x 1.*CUDA_ERROR_INVALID_VALUE"):
        kernels[0, torch.float32][1, 1](1, 4096, 1, x.data_ptr(), x.data_ptr(), 2.0, 8, 8)
    assert torch.equal(scale(x, 3.0), torch.full_like(x, 3.0))


@pytest.mark.gpu
def test_a_new_thread_may_launch_first(scale: Callable[..., torch.Tensor]) -> None:
    """Catches: a launch in a thread that has no context yet."""
    x, out, problems = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), []

    def run() -> None:
        try:
            scale(x, 4.0, out)
        except RuntimeError as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert problems == []
    assert bool((out == 4.0).all())

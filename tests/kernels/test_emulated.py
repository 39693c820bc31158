"""Every CUDA kernel of the package over the cases of its op, on the CPU: see emulation/.

Device code, launchers and the Python door are the package's own; tensors of the CPU pass for CUDA's, and the wrappers
of the `jit` rows call them. Faults planted in each kernel show that the cases would refuse a wrong one.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import fcntl
import importlib
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import jit, registry
from rapid_llm.kernels.build import jobs
from rapid_llm.kernels.build.extension import import_extension
from rapid_llm.kernels.registry import KernelSpec
from rapid_llm.verify.cases.build import torch_dtype
from rapid_llm.verify.conformance import check_callable, variants
from rapid_llm.verify.report import Report
from rapid_llm.verify.setting import one_thread

from .emulation.translate import Untranslatable, translate
from .emulation.units import UNITS, Fault, compile_unit, copy_sources, precompiled, shared, unavailable
from .gpu_rows import built_rows, check, parameters

pytestmark = pytest.mark.emulated

NOT_EMULATED: Final[dict[str, str]] = {}
"""Units that the CPU cannot run, each with the reason."""

BYTES_A_JOB: Final = 1 << 29

SCALE, GEMM, NORMS, ROPE = "elementwise/scale", "gemm/linear", "layernorm/", "rope/rope"
NORM_ROW, NORMED, GATED = (
    "gemm/fused_norm_row.cuh",
    "jit/rmsnorm_linear.settled",
    "jit/rmsnorm_linear_silu_and_mul.settled",
)
FAULTS: Final = {
    "scale: no tail": Fault("jit/scale", f"{SCALE}.cuh", "at < count", "false"),
    "scale: misaligned": Fault(
        *("jit/scale", f"{SCALE}_launch.h", "vector_width<T>(0, out.data, input.data) == whole", "true"),
        says=r"scale\.cuh:\d+: a misaligned access",
    ),
    "silu_and_mul: gate for up": Fault("jit/silu_and_mul", "activation/silu_and_mul.cuh", "from + half", "from"),
    "rmsnorm: no barrier": Fault(
        *("jit/rmsnorm", "include/rapid_llm/device.cuh", "__syncthreads()", "(void)0"),
        after="shared[threadIdx.x / 32] = x;\n  ",
    ),
    "fused_add_rmsnorm: rows taken for dense": Fault(
        *("jit/fused_add_rmsnorm", f"{NORMS}fused_add_rmsnorm.cuh"),
        *("row_start(row, inner, residual_outer, residual_inner)", "row * static_cast<i64>(hidden)"),
        after="sum = reinterpret_cast<Vec<T, N>*>(residual + ",
    ),
    "linear: a warp's rows in another's place": Fault(
        *("jit/linear", f"{GEMM}_row.cuh", "block + warp / SHARE * ROWS", "block + warp / SHARE"), cases=False
    ),
    "rope: wrong partner": Fault("jit/rope", f"{ROPE}.cuh", "first + p * half", "first + p * N"),
    "rope: device not set": Fault(
        *("jit/rope", "include/rapid_llm/launch.h", "previous_ != tensor.device", "false"), says="another device"
    ),
    "rope_kvcache_write: no slot 0": Fault(
        *("jit/rope_kvcache_write", "kvcache/rope_kvcache_write.cuh", "slot >= 0", "slot > 0")
    ),
    "linear: odd feature lost": Fault(
        *("jit/linear", f"{GEMM}_gemv.cuh", "k + 2 * i + 1 < features", "k + 2 * i + 2 < features")
    ),
    "linear: last steps lost": Fault(
        *("jit/linear.settled", f"{GEMM}_row.cuh", "(a.features + 255) / 256", "a.features / 256")
    ),
    "linear: barrier for some": Fault(
        *("jit/linear.settled", f"{GEMM}_row.cuh", "__syncthreads()", "warp == 0 ? __syncthreads() : (void)0"),
        says="barrier that others",
    ),
    "linear_add: residual's stride ignored": Fault(
        "jit/linear_add.settled", "gemm/fused_linear_add_launch.h", "residual.stride(-1)", "1"
    ),
    "linear_add: residual for the weight": Fault(
        *("jit/linear_add.settled", "gemm/fused_linear_add_launch.h", "residual.data", "weight.data"),
        after="arguments.bias = ",
    ),
    "rmsnorm_linear: squares of one warp": Fault(NORMED, NORM_ROW, "from[PITCH - 1]", "i ? 0.0f : from[PITCH - 1]"),
    "rmsnorm_linear: squares of the scaled row": Fault(NORMED, NORM_ROW, "x * x", "scaled * scaled"),
    "rmsnorm_linear: half a norm weight": Fault(NORMED, NORM_ROW, "i * 8 / SCALES", "0"),
    "rmsnorm_linear: last steps lost": Fault(NORMED, NORM_ROW, "(features + 255) / 256", "features / 256"),
    "rmsnorm_linear: no barrier": Fault(NORMED, NORM_ROW, "__syncthreads()", "(void)0"),
    "rmsnorm_linear: bias of another": Fault(NORMED, NORM_ROW, "output * a.linear.bias_stride", "threadIdx.x"),
    "rmsnorm_linear_silu_and_mul: gate for up": Fault(GATED, NORM_ROW, "part * ROWS", "0"),
    "rmsnorm_linear_silu_and_mul: parts interleaved": Fault(
        GATED, NORM_ROW, "sum / ROWS * a.linear.outputs + output", "output * PARTS + sum / ROWS"
    ),
    "rmsnorm_linear: a warp's results in another's place": Fault(
        NORMED, NORM_ROW, "block + warp / SHARE * ROWS", "block + warp / SHARE", cases=False
    ),
    "linear: minimum of another": Fault(
        "jit/linear.q4_1", f"{GEMM}_tiled.cuh", "high_half(least) * total", "low_half(least) * total"
    ),
}

BUFFER: Final = 140_000
VIEWS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "padded": lambda b: b[: 12 * 96].view(12, 96)[:, :64],
    "transposed": lambda b: b[: 6 * 4 * 64].view(6, 4, 64).transpose(0, 1),
    "sliced twice": lambda b: b[: 6 * 4 * 96].view(6, 4, 96)[:, 1:, 8:72],
    "four dimensions": lambda b: b[: 2 * 3 * 4 * 64].view(2, 3, 4, 64).permute(2, 1, 0, 3)[::2],
    "four rows a block": lambda b: b[: 265 * 64].view(265, 64),
    "eight rows a block": lambda b: b[: 1057 * 64].view(1057, 64),
    "several vectors a thread": lambda b: b[: 265 * 520].view(265, 520),
    "long": lambda b: b[:16392].view(1, 16392),
    "longer than registers hold": lambda b: b[:66000].view(2, 33000),
}
"""Rows that begin at multiples of 16 bytes, in more layouts than the cases have."""


def _kernel(row: KernelSpec) -> jit.Kernel:
    """The launcher that the row's wrapper calls."""
    wrapper = importlib.import_module(row.target.partition(":")[0])
    (kernel,) = (value for value in vars(wrapper).values() if isinstance(value, jit.Kernel))
    return kernel


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit's module, which is compiled in the background."""

    name: str
    output: Path
    compiling: concurrent.futures.Future[str]

    @cached_property
    def module(self) -> ModuleType:
        failure = self.compiling.result()
        assert not failure, f"{self.name} lacks a stand-in of tests/kernels/emulation: {failure[:4000]}"
        return import_extension(f"emulated_{self.output.stem}", self.output)


def _compile(sources: Path, name: str, output: Path) -> str:
    """What the compiler says if it fails; one of several test processes compiles, the others wait for it."""
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            return ""
        flag = f"-DRAPID_LLM_MODULE_NAME=emulated_{output.stem}"
        done = compile_unit(sources, sources / name, output, flag, first=precompiled(output.parent / "first"))
        return done.stderr if done.returncode != 0 else ""


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Unit]]:
    """Every unit, all compiles under way at once as far as cores and memory allow."""
    if missing := unavailable():
        pytest.skip(f"nothing can be emulated here: {missing}")
    sources = tmp_path_factory.mktemp("csrc")
    copy_sources(sources, FAULTS.values())
    folder = shared(tmp_path_factory)
    with concurrent.futures.ThreadPoolExecutor(jobs(BYTES_A_JOB)) as pool:
        found = {}
        for name in (unit for unit in UNITS if unit not in NOT_EMULATED):
            output = folder / f"{Path(name).stem}.so"
            found[name] = Unit(name, output, pool.submit(_compile, sources, name, output))
        yield found


def _check(row: KernelSpec, dtype: str, scheme: str | None, unit: Unit, *, first_failure: bool = False) -> Report:
    kernel = _kernel(row)
    kernel[-1] = getattr(unit.module, kernel.name)  # the device index of a tensor of the CPU
    try:
        return check_callable(
            registry.get_op(row.op),
            registry.load_target(row.name),
            dtype=dtype,
            scheme=scheme,
            seeds=(0,),
            row=dataclasses.replace(row, devices=(), capability=()),
            first_failure=first_failure,
        )
    finally:
        del kernel[-1]


@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_emulated(name: str) -> None:
    """Catches: a kernel that nothing runs before a GPU does."""
    called = {_kernel(row).source for row in built_rows("jit")}
    assert (name in called) != (name in NOT_EMULATED), (
        f"{name}: give it a row of `jit`, whose wrapper the cases call, or say in NOT_EMULATED why a CPU cannot run it"
    )


@pytest.mark.parametrize("row", parameters("jit"))
def test_cases(row: KernelSpec, units: dict[str, Unit]) -> None:
    """Catches: wrong tails, strides, operands or roundings, misaligned vectors, divergent barriers, a device not set,
    more threads than a kernel is bounded to, an argument that the wrapper passes in another's place."""
    name = _kernel(row).source
    if name in NOT_EMULATED:
        pytest.skip(NOT_EMULATED[name])
    for dtype, scheme in variants(registry.get_op(row.op), row):
        report = _check(row, dtype, scheme, units[name])
        assert report.ok, f"{report}"
        assert report.cases >= 20, "the full cases were not run"


def _tensor(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _calls(op: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Arguments that lead to kernels and layouts which the cases do not reach."""
    if op in ("linear_add", "rmsnorm_linear", "rmsnorm_linear_silu_and_mul"):
        parts = 2 if op.endswith("mul") else 1
        # Each of the plans for long rows, norm weights of both kinds.
        for outputs, features, kind in ((1030, 1032, dtype), (3177 // parts, 1024, torch.float32), (9, 2056, dtype)):
            if op == "linear_add" and outputs > 2000:
                continue  # its kernels are those of linear
            x, weight = _tensor(1, 1, features, dtype=dtype), _tensor(2, parts * outputs, features, dtype=dtype)
            if op == "linear_add":
                yield {"input": x, "weight": weight, "residual": _tensor(3, 1, outputs, dtype=dtype)}
            else:
                yield {"input": x, "norm_weight": _tensor(4, features, dtype=kind), "weight": weight}
        return
    if op == "linear":
        for outputs, features in ((1030, 1032), (4224, 1024)):  # four outputs a warp, and two
            yield {
                "input": _tensor(1, 1, features, dtype=dtype),
                "weight": _tensor(2, outputs, features, dtype=dtype),
                "bias": None,
            }
        return
    for at, cut in enumerate(VIEWS.values()):
        x = cut(_tensor(1, BUFFER, dtype=dtype))
        weight = _tensor(2, x.shape[-1], dtype=(dtype, torch.float32)[at % 2])
        if op == "silu_and_mul":
            yield {"input": x}
        elif op == "rmsnorm":
            yield {"input": x, "weight": weight}
        else:
            yield {"input": _tensor(3, *x.shape, dtype=dtype), "residual": x, "weight": weight}
            x = cut(_tensor(4, BUFFER, dtype=dtype))
            if not x.is_contiguous():
                yield {"input": x, "residual": _tensor(5, *x.shape, dtype=dtype), "weight": weight}


def _check_calls(row: KernelSpec, dtype: str, unit: Unit) -> None:
    kernel, function = _kernel(row), registry.load_target(row.name)
    mutated = registry.get_op(row.op).parsed.mutated
    kernel[-1] = getattr(unit.module, kernel.name)
    try:
        with one_thread():
            for values in _calls(row.op, torch_dtype(dtype)):
                before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
                result = function(**values)
                check(row.op, before, [values[name] for name in mutated] or [result], row.roundings)
    finally:
        del kernel[-1]


@pytest.mark.parametrize(
    "name",
    [
        *("jit/fused_add_rmsnorm", "jit/linear", "jit/linear_add.settled", "jit/rmsnorm", NORMED, GATED),
        "jit/silu_and_mul",
    ],
)
def test_aligned_rows_in_every_layout(name: str, units: dict[str, Unit]) -> None:
    """Catches: one tensor's stride taken for another's, rows of a block mixed up, vectors of a thread in another's
    place, a row longer than a block holds, an output that a warp computes for another: all where vectors are whole."""
    row = registry.get_row(name)
    for dtype in row.dtypes:
        _check_calls(row, dtype, units[_kernel(row).source])


@pytest.mark.parametrize("title", FAULTS)
def test_a_planted_fault_is_refused(title: str, units: dict[str, Unit]) -> None:
    """Catches: calls that do not reach a kernel's hard parts, and an emulation that answers without the kernel."""
    fault = FAULTS[title]
    row = registry.get_row(fault.row)
    unit = units[_kernel(row).source]
    dtype, scheme = variants(registry.get_op(row.op), row)[-1]
    planted = ctypes.c_int.in_dll(ctypes.CDLL(unit.module.__file__), "emulation_fault")
    planted.value = list(FAULTS).index(title) + 1
    try:
        if fault.cases:
            report = _check(row, dtype, scheme, unit, first_failure=True)
            assert report.failures, f"the cases of {row.op} took it for right"
            assert re.search(fault.says, str(report))
        else:
            with pytest.raises(AssertionError, match=row.op):
                _check_calls(row, dtype, unit)
    finally:
        planted.value = 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('asm("bar.warp.sync 0;");', "x.cuh:2: PTX without a stand-in: bar.warp.sync 0;"),
        ("kernel<<<grid, block>>>(x);", "kernel is launched with other than"),
        ("table[0]<<<1, 2, 0, stream>>>(x);", "x.cuh:2: a launch that"),
        ("__launch_bounds__(4) __global__ void kernel(int x);", "no kernel's body"),
    ],
)
def test_what_is_not_known_is_named(text: str, says: str) -> None:
    """Catches: CUDA that the translation leaves out or takes for something else."""
    with pytest.raises(Untranslatable, match=says):
        translate(f"\n{text}\n", "x.cuh")


def test_translation() -> None:
    """Catches: operands in another order, a launch's arguments lost, a bound that is not checked."""
    text = 'asm volatile("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(f(x, 1)));'
    assert translate(text, "x.cuh") == "::emulation::float_of_half(y, f(x, 1));"
    text = "kernel<T, 1><<<f(a, b), 256, 0, s>>>(x, (y));"
    assert translate(text, "x.cuh") == "::emulation::launch(f(a, b), 256, 0, s, kernel<T, 1>, x, (y));"
    text = "__global__ void __launch_bounds__(N * (2)) kernel(int x) { body; }"
    assert translate(text, "x.cuh") == "__global__ void  kernel(int x) { ::emulation::bound(N * (2)); body; }"

"""The extension as CI builds it, for every architecture: opened here beside a torch for CPUs, its ops without a GPU.

The same file runs on a GPU machine: see test_aot_doors.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

from rapid_llm.kernels import aot
from rapid_llm.kernels.build import toolchain
from tests.kernels.extension import ROOT, builder, built, size_tool

pytestmark = pytest.mark.compiles

SCHEMAS = {
    "fused_add_rmsnorm": "(Tensor! input, Tensor! residual, Tensor weight, float eps) -> ()",
    "linear": "(Tensor! out, Tensor input, Tensor weight, Tensor? bias, bool settled) -> ()",
    "rmsnorm": "(Tensor! out, Tensor input, Tensor weight, float eps) -> ()",
    "rope": "(Tensor! query, Tensor! key, Tensor positions, Tensor cos_sin_cache, bool interleaved) -> ()",
    "rope_kvcache_write": (
        "(Tensor! query, Tensor! key, Tensor value, Tensor! k_cache, Tensor! v_cache, Tensor positions, "
        "Tensor cos_sin_cache, Tensor slot_mapping, bool interleaved) -> ()"
    ),
    "scale": "(Tensor! out, Tensor input, float factor) -> ()",
    "silu_and_mul": "(Tensor! out, Tensor input) -> ()",
}
ABI = {
    *("aoti_torch_abi_version", "aoti_torch_delete_library_object", "aoti_torch_delete_tensor_object"),
    *("aoti_torch_get_current_cuda_stream", "aoti_torch_get_data_ptr", "aoti_torch_get_device_index"),
    *("aoti_torch_get_device_type", "aoti_torch_get_dim", "aoti_torch_get_dtype", "aoti_torch_get_sizes"),
    *("aoti_torch_get_strides", "aoti_torch_library_def", "aoti_torch_library_init_fragment"),
    *("aoti_torch_library_init_impl", "torch_library_impl"),
}
"""What the library asks of torch: all of it is in torch 2.11."""

BUDGET_MB = 16.0
"""Of the library: 6 MB for seven ops and five architectures leave room for as many again."""


@pytest.fixture(scope="module")
def library() -> Path:
    """Built once, so that a broken toolchain or source fails first, with the compiler's words."""
    path = built()
    if path.stat().st_size > BUDGET_MB * 1e6:
        pytest.fail(
            f"{path} has {path.stat().st_size / 1e6:.1f} MB of {BUDGET_MB:g}; python tests/wheel_size.py {path}"
        )
    return path


@pytest.fixture(scope="module")
def extension(library: Path) -> object:
    return aot.load()


def test_says_what_it_was_built_for(library: Path) -> None:
    """Catches: a statement that lacks an architecture, or cannot be read without loading the library."""
    info = aot.build_info()
    assert info is not None
    build = builder()
    assert info.archs == build.ARCHS
    assert info.torch == build.TORCH_TARGET
    assert info.cuda == toolchain().version


def test_holds_code_of_every_source_for_every_architecture(library: Path) -> None:
    """Catches: a statement that claims an architecture for which some kernel was not compiled."""
    sources = sorted(path.stem for path in (ROOT / "csrc").rglob("*.cu"))
    code = size_tool().device_code(library.read_bytes(), sources)
    assert sorted((c.source, c.arch) for c in code) == sorted((s, a) for s in sources for a in builder().ARCHS)


def test_needs_nothing_of_torch_beyond_the_stable_abi(library: Path) -> None:
    """Catches: a C++ symbol of torch, which another torch may lack; CUDA's libraries as dependencies; a wrong name."""
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1].partition("@")[0] for line in symbols.stdout.splitlines()]
    assert not [n for n in names if re.match(r"_ZN?K?\d*(2at|3c10|5torch)", n)], names
    assert not [n for n in names if n.startswith(("cuda", "cuLaunch"))], names
    types = {n for n in names if re.fullmatch(r"(aoti_)?torch_(dtype|device_type)_\w+", n)}
    assert {n for n in names if "torch" in n} - types <= ABI, "is it there in the oldest torch that is allowed?"
    python = [n for n in names if n.startswith(("Py", "_Py"))]
    assert "PyModule_Create2" in python
    assert not [
        n for n in python if n.startswith("_Py") and n not in ("_Py_Dealloc", "_Py_NoneStruct", "_Py_FalseStruct")
    ]


def test_opens_beside_this_torch_without_touching_cuda(extension: object) -> None:
    """Catches: [P38] a library that initialises CUDA, or needs it, when it is loaded; a plain import that fails."""
    import rapid_llm._C

    assert rapid_llm._C is extension
    assert not torch.cuda.is_initialized()
    assert aot.load() is extension


@pytest.mark.parametrize("op", SCHEMAS)
def test_schemas(extension: object, op: str) -> None:
    """Catches: an argument that is written to and not marked, a name or an order that differs from what is promised."""
    found = getattr(torch.ops.rapid_llm, op).default._schema
    promised = torch._C.parse_schema(f"rapid_llm::{op}{SCHEMAS[op]}")
    assert str(found) == str(promised)
    assert callable(getattr(extension, op))


def test_every_function_of_the_module_is_an_op(extension: object) -> None:
    """Catches: one of the two doors forgotten; a fake kernel missing."""
    names = {name for name, value in vars(extension).items() if callable(value) and not name.startswith("_")}
    assert names == set(SCHEMAS)
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rapid_llm::{name}", "Meta")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"rapid_llm::{name}", "CUDA")


def test_cpu_tensors_are_refused(extension: object) -> None:
    """Catches: host memory handed to a kernel, by either door."""
    x = torch.ones(4, 8)
    for function in (torch.ops.rapid_llm.scale.default, extension.scale):  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"scale[\s\S]*CUDA"):
            function(x, x, 2.0)
    with pytest.raises(TypeError, match="takes 3 positional arguments, got 2"):
        extension.scale(x, x)  # type: ignore[attr-defined]


def test_fake_kernels(extension: object) -> None:
    """Catches: a fake kernel that returns something, or is not there, so that torch.compile breaks the graph."""
    ops = torch.ops.rapid_llm
    with FakeTensorMode():
        x, y, w = (torch.empty(*shape, device="cuda") for shape in ((4, 8), (4, 8), (8,)))
        assert ops.scale.default(x, y, 2.0) is None
        assert ops.rmsnorm.default(x, y, w, 1e-6) is None
        assert ops.fused_add_rmsnorm.default(x, y, w, 1e-6) is None
        assert ops.silu_and_mul.default(torch.empty(4, 4, device="cuda"), x) is None
        assert ops.linear.default(torch.empty(4, 4, device="cuda"), x, y, None, False) is None


def test_a_compiled_call_is_seen_to_write(extension: object) -> None:
    """Catches: a schema without its marks: the compiled graph would drop the call, or read `out` from before it."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    @torch.compile(backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.rapid_llm.scale.default(out, x, 2.0)
        return out + 1

    with torch.inference_mode():
        assert step(torch.empty(4, device="meta")).shape == (4,)
    (code,) = graphs
    found = re.search(r"(\w+) = auto_functionalized_v2\[1\]", code)
    assert found is not None, code
    assert f"aten.add.Tensor({found[1]}, 1)" in code


def test_a_second_copy_is_an_error_and_not_the_end_of_the_process(library: Path, tmp_path: Path) -> None:
    """Catches: [P37] two builds in one process: torch ends it where a static initialiser throws."""
    other = tmp_path / library.name
    other.write_bytes(library.read_bytes())
    code = f"""
import importlib.util, torch
from importlib.machinery import ExtensionFileLoader
loader = ExtensionFileLoader("other._C", {str(other)!r})
spec = importlib.util.spec_from_file_location("other._C", {str(other)!r}, loader=loader)
copy = importlib.util.module_from_spec(spec)
from rapid_llm.kernels import aot
try:
    aot.load()
except aot.ExtensionError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "the namespace rapid_llm is taken" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "load one copy" in done.stdout

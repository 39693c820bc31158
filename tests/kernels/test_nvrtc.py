"""The NVRTC path: what is compiled and kept, and which part is missing; by the real libnvrtc where there is one."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels import nvrtc
from rapid_llm.kernels.build import BuildError, FrozenError, counters, freeze, key_of, thaw
from rapid_llm.kernels.nvrtc import Kernels, NvrtcCompiler, compiler, libcuda, libnvrtc
from rapid_llm.kernels.registry import ArgumentError, KernelSpec, NotReadyError, probes
from rapid_llm.kernels.registry.facts import Facts
from tests.kernels.fake_cuda import FakeCuda
from tests.kernels.gpu_rows import built_rows

ROOT = Path(nvrtc.__file__).parents[3]
needs_nvrtc = pytest.mark.skipif(bool(nvrtc.library().reason), reason=f"NVRTC: {nvrtc.library().reason}")
ROWS = [pytest.param(row, id=row.name) for row in built_rows("nvrtc")]


def kernels_of(row: KernelSpec) -> Kernels:
    assert row.prepare is not None
    found = probes.load(row.prepare).__self__
    assert isinstance(found, Kernels)
    return found


# ---- what is compiled ------------------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.compiles
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("row", ROWS)
def test_every_unit_compiles_and_takes_what_is_packed(row: KernelSpec, dtype: str, sm: int) -> None:
    """Catches: an instance that does not compile, a host header in device code, and a signature whose packing differs
    from the kernel's parameters in number, offset or size."""
    kernels = kernels_of(row)
    cubin, symbols = compiler.read(kernels.build(sm, dtype).path)
    wanted = kernels.instances(dtype)
    assert set(symbols) == {expression for expression, _ in wanted.values()}
    for expression, signature in wanted.values():
        assert parameters(cubin, symbols[expression]) == packed(signature), expression


def packed(signature: str) -> list[tuple[int, int]]:
    """(offset, size) of each parameter as a launch lays them out."""
    found = []
    for at, letter in enumerate(signature):
        size = struct.calcsize(libcuda.LETTERS[letter])
        found.append((struct.calcsize(libcuda.signature_format(signature[: at + 1])) - size, size))
    return found


def parameters(cubin: bytes, symbol: str) -> list[tuple[int, int]]:
    """(offset, size) of each parameter as the compiler wrote them down: EIATTR_KPARAM_INFO of `.nv.info.<kernel>`."""
    start, count, names = (*struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 60))
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + 64 * i) for i in range(count)]
    for name, _, _, _, offset, size in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)].decode() == f".nv.info.{symbol}":
            return sorted(_described(cubin[offset : offset + size]))
    raise LookupError(symbol)


def _described(info: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == (4, 0x17):
            offset, bits = struct.unpack_from("<HI", info, at + 4 + 6)
            yield offset, bits >> 18
        at += 4 + (value if form == 4 else 0)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with a header, and a store of the test's own."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    (tmp_path / "src" / "own").mkdir(parents=True)
    (tmp_path / "src" / "own" / "add.cuh").write_text("#pragma once\n#define ADD 1\n")
    (tmp_path / "src" / "toy.cuh").write_text(TOY)
    return tmp_path / "src"


TOY = """\
#include "own/add.cuh"
template <class T> __global__ void toy(T* out) { out[threadIdx.x] = ADD; }
"""


def toy(tree: Path) -> Kernels:
    def instances(dtype: str) -> dict[Hashable, tuple[str, str]]:
        return {"only": ("toy<float>", "p")}

    return Kernels("toy", "toy.cuh", instances, root=tree, include_dirs=(tree,))


@needs_nvrtc
def test_a_cubin_is_kept_until_a_header_changes(tree: Path) -> None:
    """Catches: a stale cubin after an edit; a compile, or a load of the library, where nothing changed."""
    first = toy(tree).build(90, "fp32")
    before = counters.compiles
    again = toy(tree).build(90, "fp32")
    assert (again.cached, again.path, counters.compiles) == (True, first.path, before)
    (tree / "own" / "add.cuh").write_text("#pragma once\n#define ADD 2\n")
    edited = toy(tree).build(90, "fp32")
    assert edited.key != first.key
    assert toy(tree).build(80, "fp32").key != edited.key
    code = f"""
        from pathlib import Path
        from rapid_llm.kernels import nvrtc
        def refuse(self): raise AssertionError("loaded")
        nvrtc.Library._functions = property(refuse)
        kernels = nvrtc.Kernels("toy", "toy.cuh", lambda d: {{"only": ("toy<float>", "p")}}, root=Path({str(tree)!r}),
                                include_dirs=(Path({str(tree)!r}),))
        print(kernels.build(90, "fp32").cached)
    """
    # The same libnvrtc must be found: the child gets this process's path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "True", done.stderr


@needs_nvrtc
def test_the_key_does_not_know_where_the_files_lie(tree: Path, tmp_path: Path) -> None:
    """Catches: an absolute path in the key (P10), or the spelling of the library's (P9)."""
    shutil.copytree(tree, tmp_path / "elsewhere")
    link = tmp_path / "link"
    link.symlink_to(str(nvrtc.library().path))
    assert nvrtc.library().path is not None
    other = nvrtc.Library(Path(os.path.realpath(link)))
    one = key_of(toy(tree).unit("sm_90", "fp32"), NvrtcCompiler(nvrtc.library()))
    assert key_of(toy(tmp_path / "elsewhere").unit("sm_90", "fp32"), NvrtcCompiler(other)) == one


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "first"),
    [
        (TOY.replace("= ADD", "= undeclared"), r"toy\.cuh:2: error: .*undeclared"),
        ('#define NAME "own/add.cuh"\n#include NAME\n' + TOY.split("\n", 1)[1], r"toy\.cuh:2: .*own/add\.cuh"),
        ("#include <cuda_runtime_api_of_nobody.h>\n" + TOY, r"toy\.cuh:1: .*cuda_runtime_api_of_nobody"),
        ("template <class T> __global__ void other(T* out) {}", r"toy"),
    ],
    ids=["code", "include by macro", "system header", "no such kernel"],
)
def test_what_does_not_compile_is_named_with_its_line(tree: Path, source: str, first: str) -> None:
    """Catches: an opaque failure (P29); a header that the key does not know, found behind its back (P11)."""
    (tree / "toy.cuh").write_text(source)
    with pytest.raises(BuildError, match=rf"nvrtc/toy-fp32.*{first}") as caught:
        toy(tree).build(90, "fp32")
    log = str(caught.value).rsplit("log: ", 1)[1].split()[0]
    assert Path(log).read_text()


@needs_nvrtc
def test_a_damaged_cubin_is_built_again(tree: Path) -> None:
    """Catches: a truncated file handed to the driver."""
    artifact = toy(tree).build(90, "fp32")
    whole = artifact.path.read_bytes()
    artifact.path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="no symbols"):
        compiler.read(artifact.path)
    assert compiler.read(toy(tree).build(90, "fp32").path)[1]


@needs_nvrtc
def test_nothing_is_compiled_where_it_may_not_be(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a compile after freeze(), under RAPID_LLM_JIT=off, for an old GPU, or to PTX that nothing loads."""
    freeze()
    try:
        with pytest.raises(FrozenError):
            toy(tree).build(90, "fp32")
    finally:
        thaw()
    with pytest.raises(RuntimeError, match=r"SM 80 or newer.*SM 75"):
        toy(tree).build(75, "fp32")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    with pytest.raises(BuildError, match="PTX only"):
        toy(tree).build(90, "fp32")
    monkeypatch.setenv("RAPID_LLM_JIT", "off")
    with pytest.raises(BuildError, match="RAPID_LLM_JIT=off"):
        toy(tree).build(90, "fp32")


# ---- which part is missing -------------------------------------------------------------------------------------------


def test_each_missing_part_is_a_reason_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a probe that says yes where the first call would fail, or no without the cause (P26, P31)."""
    good = nvrtc.Library(Path("/nowhere/libnvrtc.so.13"))
    vars(good)["reason"] = ""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "has_nvidia", lambda: True)
    monkeypatch.setattr(nvrtc, "why_no_driver", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(nvrtc, "library", lambda: good)
    assert nvrtc.available()
    for target, name, value, text in (
        (nvrtc, "library", lambda: nvrtc.Library(None, ("/a", "/b")), "no libnvrtc.so in /a, /b"),
        (torch.cuda, "device_count", lambda: 0, "no CUDA device is visible"),
        (nvrtc, "why_no_driver", lambda: "libcuda.so.1: cannot open", "libcuda: libcuda.so.1: cannot open"),
        (nvrtc, "has_nvidia", lambda: False, "no NVIDIA driver"),
        (torch.version, "cuda", None, "built without CUDA"),
    ):
        monkeypatch.setattr(target, name, value)
        found = nvrtc.why_not()
        assert not found.ok
        assert text in found.text
        assert found.fix
    monkeypatch.setenv("RAPID_LLM_JIT", "off")
    assert "RAPID_LLM_JIT=off" in nvrtc.why_not().text


def test_a_library_that_does_not_load_says_so(tmp_path: Path) -> None:
    """Catches: a file of the right name that is taken for the library."""
    (tmp_path / "libnvrtc.so.13").write_text("not a library")
    assert "cannot be loaded" in nvrtc.Library(tmp_path / "libnvrtc.so.13").reason


def test_the_library_of_torchs_cuda_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a newer NVRTC, whose cubins torch's driver may refuse; `libnvrtc.alt` or the builtins taken for it."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.8"):
        (tmp_path / name).touch()
    monkeypatch.setattr(libnvrtc, "_folders", lambda: iter([str(tmp_path)]))
    for cuda, name in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), ("None", "libnvrtc.so.13")):
        monkeypatch.setattr(libnvrtc, "torch_facts", lambda cuda=cuda: {"torch_cuda": cuda})
        assert libnvrtc.library.__wrapped__().path == tmp_path / name
    assert nvrtc.Library(tmp_path / "libnvrtc.so.12").identity == "12.8, 0 bytes"


# ---- when it is loaded -----------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_kernel_is_loaded_once_and_never_in_a_capture(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a build or a module load inside capture (P65); a load per call; a dtype or device that slips through."""
    fake = FakeCuda()
    driver = libcuda.Driver(fake)
    capturing = [True]
    monkeypatch.setattr(libcuda, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr("rapid_llm.kernels.ops.tile_policy.sm_version", lambda device: 90)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    kernels = toy(tree)
    facts = Facts("toy", "cuda", 0, 90, "fp32")
    with pytest.raises(NotReadyError, match="graph"):
        kernels.prepare(facts)
    capturing[0] = False
    kernels.prepare(facts)
    capturing[0] = True
    kernels[0, torch.float32]["only"](1, 32, 1, 5)
    assert len(fake.cubins) == len(fake.launches) == 1
    assert fake.cubins[0].startswith(b"\x7fELF")
    with pytest.raises(ArgumentError, match="toy: int32 is not a dtype"):
        kernels[0, torch.int32]
    with pytest.raises(ArgumentError, match="toy: input must be a CUDA tensor"):
        kernels[-1, torch.float32]

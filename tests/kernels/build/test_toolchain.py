"""The parts of a CUDA build: found where the build will look, each missing one named with its fix."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rapid_llm.kernels.build import BuildError, NvccCompiler, Unit, arch, build, gencode, key_of, nvcc_arch, toolchain
from rapid_llm.kernels.build.toolchain import Toolchain, find_nvcc, host_command, probe

module = importlib.import_module("rapid_llm.kernels.build.toolchain")  # its package has a function of this name


def fake_toolkit(root: Path, nvcc: tuple[int, int] = (12, 8), headers: tuple[int, int] = (12, 8)) -> Path:
    """A toolkit whose nvcc only speaks of itself; returns the program."""
    for folder in ("bin", "include", "lib64"):
        (root / folder).mkdir(parents=True)
    major, minor = nvcc
    program = root / "bin" / "nvcc"
    program.write_text(f"""#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {major}.{minor}, V{major}.{minor}.1"; echo "Build x" ;;
--dryrun) echo "#$ TOP={root}/bin/.." >&2; echo '#$ INCLUDES="-I{root}/include"  ' >&2
  echo '#$ LIBRARIES=  "-L{root}/lib64"' >&2 ;;
--list-gpu-code) echo sm_80; echo sm_90; echo sm_120 ;;
*) echo "called with $*" >&2; exit 9 ;;
esac
""")
    program.chmod(0o755)
    (root / "include" / "cuda_runtime.h").write_text("")
    number = headers[0] * 1000 + headers[1] * 10
    (root / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {number}\n")
    (root / "lib64" / "libcudart_static.a").write_text("")
    return program


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = fake_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(module, "driver_cuda", lambda: None)
    return program


def test_a_whole_toolkit_is_whole(toolkit: Path, tmp_path: Path) -> None:
    """Catches a part that is never found."""
    found = probe()
    assert found.reason("nvcc", "CUDA headers", "cudart", "architectures", "torch") == ""
    assert (found.version, found.root) == ((12, 8), tmp_path / "cuda")
    assert found.compiles_for("sm_90a")
    assert found.compiles_for("compute_120")
    assert not found.compiles_for("sm_100")


@pytest.mark.parametrize(
    ("break_it", "part", "text"),
    [
        ("rm bin/nvcc", "nvcc", "has no bin/nvcc"),
        ("rm include/cuda_runtime.h", "CUDA headers", "no cuda_runtime.h in"),
        ("rm include/cuda_runtime_api.h", "CUDA headers", "cuda_runtime_api.h"),
        ("rm lib64/libcudart_static.a", "cudart", "libcudart"),
        ("printf '#!/bin/sh\\nexit 7\\n' > bin/nvcc", "nvcc", "does not run"),
    ],
)
def test_each_missing_part_is_named_with_a_fix(
    toolkit: Path, tmp_path: Path, break_it: str, part: str, text: str
) -> None:
    """Catches a probe that sees nvcc and admits a row which then dies at its first call."""
    subprocess.run(break_it, shell=True, check=True, cwd=tmp_path / "cuda")
    found = probe()
    assert not found.ok
    assert not found.part(part).ok
    assert text in found.part(part).text
    assert found.part(part).fix
    assert found.reason() == f"{part}: {found.part(part).text}; {found.part(part).fix}"


def test_nvcc_that_lacks_its_host_compiler_is_mended_by_that(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: "install the CUDA toolkit" where there is one, and g++ is what is missing."""
    (tmp_path / "cuda" / "bin" / "nvcc").write_text("#!/bin/sh\necho 'gcc: No such file or directory' >&2; exit 1\n")
    monkeypatch.setenv("CXX", "/no/such/g++")
    found = probe().reason("nvcc", "host compiler")
    assert found.startswith("nvcc: ")
    assert found.endswith(module.HOST_FIX)


def test_nvcc_and_headers_of_two_toolkits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P25: nvcc from one package, headers from another; the kernel fails at its first launch."""
    fake_toolkit(tmp_path / "cuda", nvcc=(12, 8), headers=(12, 4))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    part = probe().part("CUDA headers")
    assert not part.ok
    assert "12.8" in part.text
    assert "12.4" in part.text


@pytest.mark.parametrize(
    ("driver", "ok"), [((12, 8), False), ((13, 0), True), ((13, 2), True), ((14, 0), True), (None, True)]
)
def test_a_toolkit_newer_than_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, ok: bool
) -> None:
    """P26: 'CUDA version mismatch' without the two versions; or a row kept out although the driver runs both."""
    fake_toolkit(tmp_path / "cuda", nvcc=(13, 0), headers=(13, 0))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(module, "driver_cuda", lambda: driver)
    monkeypatch.setattr(module, "torch_facts", lambda: {"torch_cuda": "12.8"})
    part = probe().part("torch")
    assert part.ok is ok
    assert "nvcc is 13.0, torch's CUDA is 12.8" in part.text
    assert ok or "the driver runs CUDA 12.8 at most" in part.text


def test_the_root_is_what_nvcc_says_not_where_a_wrapper_lies(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches /usr/local taken for the toolkit because a wrapper lies in /usr/local/bin."""
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert find_nvcc() == (wrapper, "from PATH")
    assert probe().root == tmp_path / "cuda"


def test_one_toolkit_by_two_paths_has_one_key(toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: half an hour of building again because CUDA_HOME is spelled through a link."""
    source = tmp_path / "a.cu"
    source.write_text("")
    monkeypatch.setattr(NvccCompiler, "dependencies", lambda self, unit, scratch: ())
    unit = Unit("jit", "a", source, "a.so", ("-O3",), arch="sm_90")
    one = key_of(unit, NvccCompiler(toolchain()))
    (tmp_path / "current").symlink_to(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "current"))
    assert toolchain().nvcc == tmp_path / "current" / "bin" / "nvcc"
    assert key_of(unit, NvccCompiler(toolchain())) == one


def test_a_toolkit_upgraded_behind_its_wrapper_is_noticed(
    toolkit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: the wrapper is unchanged, and so the remembered version of the old toolkit stays."""
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {toolkit} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert probe().version == (12, 8)
    toolkit.write_text(toolkit.read_text().replace("12.8", "12.9 "))
    assert probe().version == (12, 9)


def test_nvcc_is_asked_once(toolkit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a probe that starts processes each time it is asked."""
    probe()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert probe().version == (12, 8)
    assert toolchain() is toolchain()


def test_a_cuda_home_that_is_wrong_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build with another toolkit than the one that was named."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == (None, f"CUDA_HOME={tmp_path} has no bin/nvcc")


def test_no_toolkit_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an empty reason."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("os.access", lambda *a: False)
    found = probe()
    assert not found.ok
    assert "CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda" in found.reason("nvcc")
    assert "set CUDA_HOME" in found.reason("nvcc")


@pytest.mark.parametrize(
    ("cxx", "command", "problem"),
    [
        ("ccache g++", ("ccache", "g++"), ""),
        ("g++ -m64", ("g++", "-m64"), ""),
        ("no-such-compiler", (), "CXX=no-such-compiler names no program"),
        ("ccache no-such", (), "no-such is not on PATH"),
        ("g++ -I /opt/include --sysroot /opt", ("g++", "-I", "/opt/include", "--sysroot", "/opt"), ""),
        ("-O3", (), "CXX=-O3 names no program"),
        ("'g++", (), "cannot be read as a command"),
    ],
)
def test_cxx_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, command: tuple[str, ...], problem: str
) -> None:
    """Catches `CXX="ccache g++"` looked for as one file, and a CXX that names nothing ignored in favour of another."""
    for name in ("ccache", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    found, text = host_command()
    assert found == command
    assert problem in text
    assert bool(problem) == bool(text)


@pytest.mark.parametrize(
    ("programs", "cxx", "ccbin", "told"),
    [
        (("gcc", "g++", "c++"), "", "", None),
        (("clang++",), "", "", "clang++"),
        (("gcc", "g++", "ccache", "g++-12"), "ccache g++-12", "", "g++-12"),
        (("gcc", "g++", "ccache", "g++-12"), "ccache g++-12 -I /opt", "", "g++-12"),
        (("gcc", "g++", "mine"), "g++", "mine", None),
        ((), "", "", None),
    ],
    ids=str,
)
def test_nvcc_is_told_of_a_host_compiler_that_it_would_not_find(
    toolkit: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: tuple[str, ...],
    cxx: str,
    ccbin: str,
    told: str | None,
) -> None:
    """Catches a compiler that is probed and another one, or none, that nvcc then runs."""
    (tmp_path / "bin").mkdir()
    for name in programs:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} 1.0\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("NVCC_CCBIN", ccbin)
    found = probe()
    assert found.ccbin == told
    assert found.part("host compiler").ok == bool(programs)
    if told is not None:
        source = tmp_path / "a.cu"
        source.write_text("")
        unit = Unit("jit", "a", source, "a.so", (), arch="sm_90")
        with pytest.raises(BuildError, match=f"-ccbin {re.escape(told)} -gencode"):
            build(unit, NvccCompiler(found))  # the stand-in refuses to compile, and shows how it was called


@pytest.mark.parametrize(
    ("text", "sm", "expected"),
    [
        ("", 90, "sm_90"),
        ("9.0", 90, "sm_90"),
        ("9.0a", 90, "sm_90a"),
        ("8.0;9.0+PTX", 90, "sm_90"),
        ("8.0 8.6", 89, "sm_86"),
        ("8.0;9.0", 86, "sm_80"),
        ("8.0+PTX", 90, "compute_80"),
        ("8.0, 9.0+PTX", 120, "compute_90"),
        ("Hopper", 90, "sm_90"),
        ("Ampere", 89, "sm_86"),
        ("12.0f", 120, "sm_120f"),
        ("12.0f", 121, "sm_120f"),
        ("12.0;12.0a", 121, "sm_120"),
        ("native", 90, "sm_90"),
        (" ; ", 90, "sm_90"),
        ("Pascal;Volta;Hopper", 90, "sm_90"),
        ("Kepler+Tesla Ampere+Tegra", 87, "sm_87"),
        ("Blackwell+Tegra", 110, "sm_110"),
    ],
)
def test_the_architecture_is_the_devices_within_the_list(
    monkeypatch: pytest.MonkeyPatch, text: str, sm: int, expected: str
) -> None:
    """P19: flags for another GPU than the tensor's, or a list of architectures that is ignored."""
    monkeypatch.setenv(arch.VARIABLE, text)
    assert nvcc_arch(sm) == expected


@pytest.mark.parametrize(
    ("text", "sm", "names"),
    [
        ("9", 90, "'9'"),
        ("9.0;banana", 90, "'banana'"),
        ("sm_90", 90, "'sm_90'"),
        ("9.0+ptx", 90, r"'9.0\+ptx'"),
        ("8.0", 90, "add 9.0"),
        ("9.0a", 100, "add 10.0"),
        ("12.0a", 121, "add 12.1"),
        ("9.0", 80, "add 8.0"),
    ],
)
def test_a_list_that_cannot_serve_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str, sm: int, names: str) -> None:
    """P19, P21: a misspelt entry ignored; or code for other GPUs only, found out at launch."""
    monkeypatch.setenv(arch.VARIABLE, text)
    with pytest.raises(BuildError, match=names):
        nvcc_arch(sm)


def test_the_options_of_an_architecture() -> None:
    """P19: code for more, or others, than was asked for."""
    assert gencode("sm_90") == ("-gencode", "arch=compute_90,code=sm_90")
    assert gencode("sm_90a") == ("-gencode", "arch=compute_90a,code=sm_90a")
    assert gencode("compute_80") == ("-gencode", "arch=compute_80,code=compute_80")
    with pytest.raises(BuildError, match="use sm_90"):
        gencode("90")


def real() -> Toolchain:
    found = toolchain()
    if found.reason("nvcc", "host compiler", "CUDA headers", "cudart"):
        pytest.skip(f"no CUDA toolkit: {found.reason()}")
    return found


def test_nvcc_builds_for_the_architecture_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11, P19, P29 with the real nvcc: headers of both passes, one architecture, a distilled error."""
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("no nvcc")
    tools = real()
    monkeypatch.setenv(arch.VARIABLE, "9.0")
    source = tmp_path / "a.cu"
    text = '#ifdef __CUDA_ARCH__\n#include "device.h"\n#else\n#include "host.h"\n#endif\n__global__ void k() {}\n'
    source.write_text(text)
    for name in ("device.h", "host.h"):
        (tmp_path / name).write_text("\n")
    unit = Unit("jit", "a", source, "a.so", ("-std=c++17", "-O0"), arch=nvcc_arch(90))
    compiler = NvccCompiler(tools)
    assert {path.name for path in compiler.dependencies(unit)} >= {"device.h", "host.h"}
    made = build(unit, compiler)
    log = (made.path.parent / "build.log").read_text()
    assert log.count("-gencode") == 1
    assert "arch=compute_90,code=sm_90" in log
    (tmp_path / "device.h").write_text("int f() { return undeclared; }\n")
    with pytest.raises(BuildError, match=r"device\.h:1: error: .*undeclared"):
        build(unit, compiler)

"""`load_jit` and the rows behind it: what is probed, what is compiled for which device, and every way to fail."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rapid_llm.kernels import dispatch, jit
from rapid_llm.kernels.build import BuildError, FrozenError, Part, counters, freeze, thaw, toolchain
from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.registry import ArgumentError, ForcedRowError, KernelError, NotReadyError, dispatcher, probes
from rapid_llm.kernels.registry.facts import Facts

TOOLS = toolchain()
NEEDS_NVCC = pytest.mark.skipif(not TOOLS.ok, reason=TOOLS.reason())

SOURCE = """
#include "answer.h"
#include "rapid_llm/module.h"
namespace rapid_llm {
void answer(Tensor& out) { *out.as<float>() = ANSWER; }
}
RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(answer))
"""


@pytest.fixture(autouse=True)
def own_memo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A store and a memo of the test's own."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    jit.forget()
    probes.forget()
    yield
    jit.forget()
    probes.forget()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A unit of one line, for sm_90, in a source tree of the test's own beside the package's headers."""
    monkeypatch.setattr(jit, "INCLUDES", (tmp_path, *jit.INCLUDES))
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    if not torch.cuda.is_available():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    (tmp_path / "answer.h").write_text("#define ANSWER 42.0f\n")
    file = tmp_path / "answer.cu"
    file.write_text(SOURCE)
    return file


def answer() -> float:
    out = torch.zeros(1)
    jit.load_jit("answer", "answer.cu").answer(out)
    return float(out)


# -- the probe --------------------------------------------------------------------------------------------------------


@pytest.fixture
def all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is missing."""
    whole = dataclasses.replace(TOOLS, parts=(Part("nvcc", True, "13.0"),))
    monkeypatch.setattr(jit, "toolchain", lambda: whole)
    monkeypatch.setattr(jit, "has_nvidia", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_the_probe_says_yes_where_all_is_there(all_there: None) -> None:
    """Catches: a probe that never admits."""
    assert jit.available() is True
    assert probes.check("rapid_llm.kernels.jit:available").ok


def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "has_nvidia", lambda: False)


def _cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def _old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(version=SimpleNamespace(cuda="12.6"), Tensor=object, __version__="2.5.1")
    monkeypatch.setitem(sys.modules, "torch", old)


def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def _off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_JIT", "off")


def _mixed_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (
        Part("nvcc", True, "12.8"),
        Part("CUDA headers", False, "nvcc is 12.8, the headers are 12.4", "one toolkit"),
    )
    monkeypatch.setattr(jit, "toolchain", lambda: dataclasses.replace(TOOLS, parts=parts))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_off, "RAPID_LLM_JIT=off"),
        (_no_torch, "torch is not installed"),
        (_cpu_torch, "this torch is built without CUDA"),
        (_old_torch, "torch 2.5.1 has no DLPack exchange API"),
        (_no_driver, "no NVIDIA driver"),
        (_mixed_toolkit, "CUDA headers: nvcc is 12.8, the headers are 12.4"),
    ],
)
def test_each_missing_part_is_a_reason_of_its_own(
    all_there: None, spoil: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a row admitted by an nvcc on PATH that dies at its first call; explain() that says "returned False"."""
    with monkeypatch.context() as patched:
        spoil(patched)
        assert jit.available() is False
        probe = probes.call_here("rapid_llm.kernels.jit:available")
    assert not probe.ok
    assert text in probe.text


def test_the_probe_compiles_nothing_and_leaves_cuda_alone() -> None:
    """Catches (P38): a probe that costs a compile, or that initialises CUDA so that the process can no longer fork."""
    before, initialised = counters.compiles, torch.cuda.is_initialized()
    jit.available()
    assert (counters.compiles, torch.cuda.is_initialized()) == (before, initialised)


# -- building ---------------------------------------------------------------------------------------------------------


def test_a_missing_toolkit_is_a_runtime_error_that_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an AttributeError, or the floor, where the user asked for a CUDA module."""
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(RuntimeError, match=r"jit/answer: the CUDA toolkit cannot be used: nvcc: CUDA_HOME=/nowhere"):
        answer()


def test_off_is_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a compile on a machine whose owner forbade it."""
    monkeypatch.setenv("RAPID_LLM_JIT", "off")
    with pytest.raises(BuildError, match=r"jit/answer: RAPID_LLM_JIT=off"):
        answer()


@NEEDS_NVCC
def test_a_module_is_built_once_kept_and_built_again_when_a_header_changes(source: Path) -> None:
    """Catches (P11, P30): a stale module after an edit of a header; a second build of what is there."""
    before = counters.compiles
    assert [answer(), answer()] == [42.0, 42.0]
    first = jit.load_jit("answer", "answer.cu")
    assert first is jit.load_jit("answer", "answer.cu")
    assert first.__name__ == "rapid_llm_jit_answer"
    jit.forget()  # as a new process would
    assert answer() == 42.0
    assert counters.compiles == before + 1
    source.with_name("answer.h").write_text("#define ANSWER 43.0f\n")
    assert answer() == 42.0
    jit.forget()
    assert answer() == 43.0
    assert counters.compiles == before + 2


@NEEDS_NVCC
def test_a_broken_source_names_file_and_line_and_the_log(source: Path) -> None:
    """Catches (P29): "nvcc returned 2" without the one line that matters, or without the whole log."""
    source.write_text(SOURCE.replace("= ANSWER", "= UNDECLARED"))
    with pytest.raises(BuildError, match=r"jit/answer does not compile: .*answer\.cu.5.*UNDECLARED") as caught:
        answer()
    log = Path(str(caught.value).rpartition("log: ")[2])
    assert "UNDECLARED" in log.read_text()


def test_a_source_that_is_not_there_is_named(source: Path) -> None:
    """Catches: a compiler's error for a misspelt path."""
    with pytest.raises(BuildError, match=r"jit/answer: .*(no source .*/anwser\.cu|toolkit)"):
        jit.load_jit("answer", "anwser.cu")


def test_without_a_device_and_a_list_of_architectures_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a module for some default architecture that the machine to come does not run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildError, match=r"no CUDA device is visible; set TORCH_CUDA_ARCH_LIST|toolkit"):
        jit.load_jit("scale", "elementwise/scale.cu")


@pytest.mark.parametrize("how", ["capture", "frozen"])
@pytest.mark.skipif(not TOOLS.ok, reason=TOOLS.reason())
def test_nothing_is_built_in_a_capture_or_frozen(source: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches (P65): nvcc started while a CUDA graph is captured, or while an engine serves."""
    before = counters.compiles
    if how == "capture":
        monkeypatch.setattr(jit, "_capturing", lambda: True)
    else:
        freeze()
    try:
        with pytest.raises(NotReadyError if how == "capture" else FrozenError, match="answer"):
            answer()
    finally:
        thaw()
    assert counters.compiles == before


# -- which architecture ------------------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(name, architecture) of every module built; none is really. Device 0 is SM 80, device 1 is SM 90, 2 is SM 75."""
    built: list[tuple[str, str]] = []

    def build(name: str, source: str, flags: tuple[str, ...], arch: str) -> ModuleType:
        built.append((name, arch))
        module = ModuleType(name)
        module.__dict__[name] = lambda *arguments: arch
        return module

    monkeypatch.setattr(jit, "_build", build)
    monkeypatch.setattr(tile_policy, "sm_version", lambda device: (80, 90, 75)[device.index])
    return built


def test_the_tensors_device_decides_and_is_asked_once(loads: list[tuple[str, str]]) -> None:
    """Catches (P51): device 0's architecture for a tensor on device 1, and a look-up that builds again."""
    kernel = jit.Kernel("scale", "elementwise/scale.cu")
    assert [kernel[i]() for i in (1, 0, 1, 0)] == ["sm_90", "sm_80", "sm_90", "sm_80"]
    assert loads == [("scale", "sm_90"), ("scale", "sm_80")]
    other = jit.Kernel("scale", "elementwise/scale.cu")
    assert other[1]() == "sm_90"
    assert len(loads) == 2


def test_the_list_of_architectures_is_honoured(loads: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches (P19, P21): a hard-coded architecture, and one entry's code launched where it cannot run."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    kernel = jit.Kernel("scale", "elementwise/scale.cu")
    assert (kernel[0](), kernel[1]()) == ("sm_80", "sm_90a")
    jit.forget()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(BuildError, match=r"TORCH_CUDA_ARCH_LIST=8.0 has no entry that the device's sm_90 runs"):
        kernel[1]


def test_old_devices_and_other_devices_are_refused_before_anything_is_built(loads: list[tuple[str, str]]) -> None:
    """Catches: a compile for an architecture that lacks the instructions, or for a tensor that is not on a GPU."""
    kernel = jit.Kernel("scale", "elementwise/scale.cu")
    with pytest.raises(KernelError, match=r"scale: JIT kernels need SM 80 or newer, the tensor's device is SM 75"):
        kernel[2]
    with pytest.raises(ArgumentError, match="scale: needs CUDA tensors"):
        kernel[torch.ones(1).get_device()]
    with pytest.raises(KernelError, match="SM version is not known"):
        kernel.prepare(Facts("scale", "cuda"))
    assert loads == []


def test_dispatch_builds_before_it_settles(loads: list[tuple[str, str]], all_there: None) -> None:
    """Catches: a row whose build is left to its first call, where it can no longer fall to the floor."""
    facts = Facts("scale", "cuda", 0, 90, "bf16", layout=frozenset({"contiguous"}))
    dispatcher.forget(None)
    try:
        decision = dispatcher.settle(facts, dispatcher.overrides.current("scale", "jit/scale"))
    finally:
        dispatcher.forget(None)
    assert decision.row.name == "jit/scale"
    assert loads == [("scale", "sm_90")]


@NEEDS_NVCC
def test_an_architecture_that_nvcc_does_not_know_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: nvcc's own "unsupported gpu architecture" after seconds."""
    monkeypatch.setattr(jit, "_current_arch", lambda name: "sm_999")
    with pytest.raises(BuildError, match=r"jit/answer: nvcc .* does not compile for sm_999, only for .*sm_90"):
        answer()


# -- on a GPU ----------------------------------------------------------------------------------------------------------

IMPOSSIBLE = """
#include "rapid_llm/module.h"
namespace rapid_llm {
__global__ void nothing() {}
void impossible(Tensor& out) {
  const Launch launch("impossible", out);
  nothing<<<1, 4096, 0, launch.stream()>>>();
  check_launch("impossible");
}
}
RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(impossible))
"""


@pytest.mark.gpu
def test_a_launch_that_fails_raises(source: Path) -> None:
    """Catches (P75): a failed launch that returns, and is timed as fast."""
    source.with_name("impossible.cu").write_text(IMPOSSIBLE)
    module = jit.load_jit("impossible", "impossible.cu")
    out = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match=r"impossible: the launch failed: cudaErrorInvalid(Configuration|Value)"):
        module.impossible(out)
    assert float(out + 1) == 2.0  # the error was not sticky, and is not met again


@pytest.mark.gpu
def test_a_cold_row_is_not_built_in_a_capture() -> None:
    """Catches (P65): a compile while a CUDA graph is captured; a row that stays out afterwards."""
    if not jit.available():
        pytest.skip(jit.why_not().text)
    x = torch.ones(5, device="cuda")
    torch.cuda.synchronize()
    dispatcher.forget(None)
    before = counters.compiles
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        with pytest.raises(ForcedRowError, match="a CUDA graph is being captured"):
            dispatch("scale", x, 2.0, backend="jit")
        with pytest.raises(NotReadyError, match="a CUDA graph is being captured"):
            jit.load_jit("scale", "elementwise/scale.cu")
    assert counters.compiles == before
    assert dispatch("scale", x, 2.0, backend="jit")(x, 2.0).tolist() == [2.0] * 5

"""What the flashinfer rows say where flashinfer cannot be used: each cause by its name, with what would mend it."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import explain, registry
from rapid_llm.kernels.backend import flashinfer as backend
from rapid_llm.kernels.registry import probes

STAND_IN = Path(__file__).parent / "flashinfer_stand_in"


def _unload() -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "flashinfer" or m.startswith(f"{backend.__name__}.")]:
        del sys.modules[name]
    probes.forget()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No verdict of an earlier test, in memory or on disk."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    _unload()
    yield
    _unload()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the stand-in's installation, to be spoilt."""
    shutil.copytree(STAND_IN, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder on PATH, with nvcc, ninja and c++ in it, and a CUDA_HOME."""
    folder = tmp_path / "toolkit" / "bin"
    folder.mkdir(parents=True)
    for name in ("nvcc", "ninja", "c++"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_NVCC", "FLASHINFER_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_absent() -> None:
    """Would go red if a missing library were an error, or its fix were not the command that installs it."""
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("flashinfer is installed here")
    found = backend.available()
    assert not found.ok
    assert not found.installed
    assert found.text == "flashinfer is not installed"
    assert "pip install 'flashinfer-python>=0.6.7,<0.7'" in found.fix


@pytest.mark.parametrize("version", ["0.2.5", "0.6.6", "0.7.0", "0.7.0rc1"])
def test_other_versions(site: Path, version: str) -> None:
    """Would go red if a version whose interface nobody compared with the adapters were called."""
    record = site / "flashinfer_python-0.6.7.dist-info" / "METADATA"
    record.write_text(f"Metadata-Version: 2.4\nName: flashinfer-python\nVersion: {version}\n")
    found = backend.available()
    assert not found.ok
    assert version in found.text
    assert ">=0.6.7,<0.7" in found.text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise AssertionError('no driver here')", "no driver here"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("import os; os._exit(9)", "status 9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import a_part_that_is_missing", "a_part_that_is_missing"),
    ],
)
def test_broken_import(site: Path, code: str, words: str) -> None:
    """P33, P34: would go red if flashinfer's import could take this process along, or its text were lost."""
    (site / "flashinfer" / "__init__.py").write_text(code + "\n")
    found = backend.available()
    assert not found.ok
    assert words in found.text
    assert "flashinfer" not in sys.modules


def test_no_cuda(site: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if a torch without CUDA, or without a GPU, were found out by a launch."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is built without it" in backend.available().text
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees none" in backend.available().text


@pytest.mark.parametrize(
    ("tool", "words"), [("nvcc", "nvcc is no compiler"), ("ninja", "with ninja"), ("c++", "c++ is not on PATH")]
)
def test_missing_tool(
    site: Path, gpu: None, tools: Path, monkeypatch: pytest.MonkeyPatch, tool: str, words: str
) -> None:
    """Would go red if a row were admitted whose first call dies for want of a tool, or the tool were not named."""
    monkeypatch.setenv("CUDA_HOME", str(tools.parent))
    assert backend.available().ok
    (tools / tool).unlink()
    found = backend.available()
    assert not found.ok
    assert words in found.text
    assert "flashinfer-jit-cache" in found.fix


def test_named_toolkit(site: Path, gpu: None, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P25: would go red if the probe looked for nvcc elsewhere than flashinfer does."""
    monkeypatch.setenv("CUDA_HOME", "/nowhere/cuda")
    assert "/nowhere/cuda/bin/nvcc" in backend.available().text
    monkeypatch.setenv("FLASHINFER_NVCC", str(tools / "nvcc"))
    assert backend.available().ok


def test_prebuilt_kernels_need_no_tools(site: Path, gpu: None, tools: Path) -> None:
    """Would go red if a machine without a compiler were refused although the kernels are there."""
    for tool in tools.iterdir():
        tool.unlink()
    (site / backend.PREBUILT).mkdir()
    (site / backend.PREBUILT / "__init__.py").touch()
    assert backend.available().ok


def test_jit_switched_off(site: Path, gpu: None, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if flashinfer's own switch came as its exception in the middle of a request."""
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in backend.available().text


@pytest.mark.parametrize(
    ("file", "old", "new", "row", "words"),
    [
        ("norm.py", "    eps: float = 1e-6,\n    out", "    epsilon: float = 1e-6,\n    out", "rmsnorm", "'eps'"),
        ("activation.py", "out: torch.Tensor = None", "output: torch.Tensor = None", "silu_and_mul", "'out'"),
        ("rope.py", "is_neox", "neox", "rope", "'is_neox'"),
        ("decode.py", "sm_scale:", "softmax_scale:", "attention.decode", "'sm_scale'"),
        ("prefill.py", "        head_dim_qk: int", "        head_dim: int", "attention.prefill", "'head_dim_qk'"),
        ("sampling.py", "def top_p_renorm_probs", "def renormalise", "sample", "top_p_renorm_probs"),
    ],
)
def test_renamed_upstream(site: Path, file: str, old: str, new: str, row: str, words: str) -> None:
    """Would go red if an argument renamed upstream were a TypeError of a call, or took other rows along."""
    path = site / "flashinfer" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    targets = {r.target for op in registry.ops() for r in registry.rows(op.id) if r.backend == "flashinfer"}
    bad = registry.get_row(f"flashinfer/{row}").target
    with pytest.raises(ImportError, match=words):
        probes.load(bad)
    for target in targets - {bad}:
        probes.load(target)


def test_a_cpu_call_never_asks_flashinfer(site: Path) -> None:
    """Would go red if a call that flashinfer cannot serve cost an import of it."""
    (site / "flashinfer" / "__init__.py").write_text("raise SystemExit('asked')\n")
    text = str(explain("rmsnorm", torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(64)))
    assert "flashinfer/rmsnorm" in text
    assert "runs on cuda, not cpu" in text
    assert "asked" not in text

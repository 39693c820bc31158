"""The floor cannot fail: where Triton is absent or cannot build, every native row answers through PyTorch and says why.

There is no GPU here, so recording launches sends the wrappers down their Triton path over CPU tensors, and the recorder
fails as a first launch would.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (declares the ops)
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops import triton_support
from rapid_llm.kernels.ops.elementwise.scale import scale
from rapid_llm.kernels.registry import StrictFallbackError, notes
from rapid_llm.verify.conformance import check_row
from tests import warm
from tests.kernels.examples import TORCH_DECODED, TORCH_FLOORS, by_triton

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(bool(triton_support.MISSING_REASON), reason="Triton is not installed")
pytestmark = pytest.mark.skipif(triton_support.INTERPRETED, reason="the interpreter builds nothing")

NATIVE = [
    (op.id, row.name, scheme)
    for op in registry.ops()
    for row in registry.rows(op.id)
    if row.is_native
    for scheme in (row.schemes or (None,))
    if by_triton(op.id, scheme)
]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No op has failed yet, and what fails here is forgotten afterwards."""
    monkeypatch.setattr(triton_support, "_broken", {})
    monkeypatch.setattr(triton_support, "_moved_cache", [])
    monkeypatch.setattr(notes, "_notes", {})
    yield
    triton_support.record_launches(None)


def _first_launch(*_: object) -> None:
    """Build a host module, as Triton does at the first launch of a process: it needs a C compiler and Python.h."""
    from triton.runtime.build import compile_module_from_src

    source = f"#include <Python.h>\nstatic int unused_{os.getpid()};\n"
    compile_module_from_src(source, "rapid_llm_probe")


def _raises(make: Callable[[], BaseException]) -> Callable[..., None]:
    def recorder(*_: object) -> None:
        raise make()

    return recorder


def _ptxas() -> BaseException:
    from triton.runtime.errors import PTXASError

    return PTXASError("Unsupported .version 9.0; current version is '8.0'")


def _compilation() -> BaseException:
    import ast

    import triton

    return triton.CompilationError("x = 1", ast.parse("x = 1").body[0], "unsupported type")


FAILURES: dict[str, tuple[dict[str, str], Callable[..., None], str]] = {
    "no C compiler": ({"PATH": "/nowhere", "CC": ""}, _first_launch, "C compiler"),
    "no Python.h": ({"CC": "false"}, _first_launch, "CalledProcessError"),
    "ptxas refuses": ({}, _raises(_ptxas), r"Unsupported \.version"),
    "old driver": ({}, _raises(lambda: RuntimeError("Triton Error [CUDA]: unsupported PTX version")), "PTX"),
    "no libcuda": ({}, _raises(lambda: AssertionError("libcuda.so cannot found!")), "libcuda"),
    "broken module": ({}, _raises(lambda: ImportError("undefined symbol: cuLaunchKernelEx")), "undefined symbol"),
    "kernel does not compile": ({}, _raises(_compilation), "unsupported type"),
}


@needs_triton
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("failure", FAILURES)
def test_build_failure(failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a build failure that reaches the caller, one that leaves no trace, one tried again at every call."""
    environment, recorder, text = FAILURES[failure]
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    triton_support.record_launches(recorder)
    x = torch.arange(6.0)
    assert torch.equal(scale(x, 2.0), x * 2)
    assert "scale" in triton_support.broken()
    assert any(text.replace("\\", "") in note for note in notes.of("native/scale")), notes.of("native/scale")
    assert "native/scale answers through PyTorch" in caplog.text
    triton_support.record_launches(_raises(lambda: RuntimeError("tried again")))
    assert torch.equal(scale(x, 2.0), x * 2)


@needs_triton
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("op_id", "row", "scheme"), NATIVE)
def test_every_row_answers_without_a_compiler(op_id: str, row: str, scheme: str | None) -> None:
    """Catches: an op without a PyTorch path for tensors that would take Triton, or that half runs before it falls."""
    dtype = "uint8" if op_id == "embedding" and scheme != "unquantized" else "fp32"
    triton_support.record_launches(_raises(lambda: RuntimeError("Failed to find C compiler.")))
    report = check_row(op_id, row, dtype=dtype, scheme=scheme, budget="interpret")
    assert report.ok, report
    assert op_id in triton_support.broken()
    assert "C compiler" in "".join(notes.of(row))


@needs_triton
@pytest.mark.usefixtures("fresh")
def test_errors_of_a_launch_are_not_hidden() -> None:
    """Catches: out of memory or an illegal address answered by PyTorch as if nothing had happened."""
    for text in ("Triton Error [CUDA]: an illegal memory access was encountered", "CUDA out of memory"):
        triton_support.record_launches(_raises(lambda text=text: RuntimeError(text)))
        with pytest.raises(RuntimeError, match=text[-12:]):
            scale(torch.ones(3), 2.0)
    assert not triton_support.broken()


@needs_triton
@pytest.mark.usefixtures("fresh")
def test_a_tile_too_big_costs_one_call() -> None:
    """Catches: one shape whose tile does not fit turning Triton off for every other shape."""
    from triton.runtime.errors import OutOfResources

    triton_support.record_launches(_raises(lambda: OutOfResources(300_000, 232_448, "shared memory")))
    assert torch.equal(scale(torch.ones(3), 2.0), torch.full((3,), 2.0))
    assert "shared memory" in notes.of("native/scale")[0]
    launched: list[object] = []
    triton_support.record_launches(lambda *launch: launched.append(launch))
    scale(torch.ones(5), 2.0)
    assert launched


@needs_triton
@pytest.mark.usefixtures("fresh")
def test_strict_refuses_the_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: RAPID_LLM_STRICT without effect on the last fall of all."""
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    triton_support.record_launches(_raises(lambda: ImportError("no such symbol")))
    with pytest.raises(StrictFallbackError, match=r"native/scale.*no such symbol"):
        scale(torch.ones(3), 2.0)


@needs_triton
@pytest.mark.usefixtures("fresh")
def test_unusable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches: a read-only or foreign Triton cache that costs the kernels; a private one must do, and be noted."""
    import triton

    blocked = tmp_path / "a file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(blocked / "cache"))
    caches: list[Path] = []

    def build(*_: object) -> None:
        folder = Path(triton.knobs.cache.dir)
        caches.append(folder)
        (folder / "kernel").mkdir(parents=True)

    triton_support.record_launches(build)
    scale(torch.ones(3), 2.0)
    assert caches[0] == blocked / "cache"
    assert caches[1].is_dir()
    assert not triton_support.broken()
    assert str(blocked) in notes.of("native/scale")[0]


def test_without_triton() -> None:
    """Catches: an op module that needs Triton to be imported, or a tensor on a GPU that then gets no answer."""
    script = f"""
import runpy
runpy.run_path("tests/hidden/sitecustomize.py")  # torch, which a warm Python has, imports no Triton
import rapid_llm.kernels.ops
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops import triton_support
from rapid_llm.kernels.registry import notes
from rapid_llm.verify.conformance import check_row
assert "No module named 'triton'" in triton_support.MISSING_REASON, triton_support.MISSING_REASON
triton_support.record_launches(lambda *launch: None)  # the wrappers now ask for Triton
for op in registry.ops():
    for row in registry.rows(op.id):
        for scheme in (row.schemes or (None,)) if row.is_native else ():
            if scheme in {TORCH_DECODED}.get(op.id, ()):
                continue
            dtype = "uint8" if op.id == "embedding" and scheme != "unquantized" else "fp32"
            report = check_row(op.id, row.name, dtype=dtype, scheme=scheme, budget="interpret")
            assert report.ok, report
            if op.id not in {TORCH_FLOORS}:
                assert "Triton cannot be imported" in notes.of(row.name)[0], row.name
"""
    environment = {**os.environ, "RAPID_LLM_TEST_WITHOUT": "triton", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [warm.executable(), "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr

"""`rapid-llm kernels doctor`: a cause and a fix a finding; what a machine cannot have is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rapid_llm.authoring import diagnosis
from rapid_llm.kernels.build import Part, Toolchain, store
from rapid_llm.kernels.build.locks import KeyLock

from .support import environment, rapid_llm


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of this test's own."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for layer in store.layers():
        if layer.writable:
            store.open_layer(layer)
    return tmp_path / "cache" / "builds"


def findings() -> list[tuple[str, str]]:
    found = diagnosis.Diagnosis()
    diagnosis._toolchain(found)
    diagnosis._store(found)
    return found.findings


def broken(*names: str) -> Toolchain:
    parts = [Part(n, n not in names, f"no {n}", f"install {n}") for n in ("nvcc", "host compiler", "Python.h")]
    return Toolchain(tuple(parts))


def test_a_missing_part_is_a_finding_with_its_fix_where_a_gpu_could_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: nvcc demanded of a machine without a GPU, and its absence passed over on one that has it."""
    monkeypatch.setattr(diagnosis.build, "toolchain", lambda: broken("nvcc", "Python.h"))
    monkeypatch.setattr(diagnosis, "has_nvidia", lambda: False)
    assert findings() == [("Python.h: no Python.h", "install Python.h")]
    monkeypatch.setattr(diagnosis, "has_nvidia", lambda: True)
    assert findings() == [("nvcc: no nvcc", "install nvcc"), ("Python.h: no Python.h", "install Python.h")]


def test_what_killed_builds_left_is_found_and_what_runs_is_not(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a build that is under way taken for a left-over, and a left-over that nobody is told of."""
    monkeypatch.setattr(diagnosis.build, "toolchain", lambda: broken())
    (own_store / store.STAGING / "jit-scale-abc.xyz").mkdir()
    with KeyLock(own_store / store.LOCKS / "jit-scale-abc.lock", "jit/scale", 1.0):
        found = diagnosis.Diagnosis()
        diagnosis._store(found)
        assert found.findings == []
        (note,) = found.notes
        assert "jit/scale" in note
        assert "process" in note
    assert findings() == [(f"killed builds left 1 folders in {own_store / store.STAGING}", "rapid-llm cache gc")]


def test_a_build_that_hangs_is_named_with_the_command_that_ends_it(
    own_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a lock held for hours that no one is told of, and a fix that names no process."""
    monkeypatch.setattr(diagnosis.build, "toolchain", lambda: broken())
    monkeypatch.setattr(diagnosis, "LONG_S", -1.0)
    code = (
        "import sys\nfrom pathlib import Path\nfrom rapid_llm.kernels.build.locks import KeyLock\n"
        "with KeyLock(Path(sys.argv[1]), 'jit/scale', 1.0):\n    print('held', flush=True); sys.stdin.read()"
    )
    lock = own_store / store.LOCKS / "jit-scale-abc.lock"
    command = [sys.executable, "-c", code, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        ((what, fix),) = findings()
        assert "jit/scale" in what
        assert fix == f"kill {holder.pid}"
        holder.communicate("")
    assert findings() == []


def test_a_damaged_artifact_is_found(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a cut file in the store that `doctor` calls healthy."""
    monkeypatch.setattr(diagnosis.build, "toolchain", lambda: broken())
    folder = own_store / "jit" / f"scale-{'0' * 24}-{'0' * 16}"
    folder.mkdir(parents=True)
    ((what, fix),) = findings()
    assert str(folder) in what
    assert fix == "rapid-llm cache gc"


def test_the_command(tmp_path: Path) -> None:
    """Catches: a section that fails, JSON that is none, a status that contradicts the findings."""
    done = rapid_llm("kernels", "doctor", "--json", env={"RAPID_LLM_CACHE_DIR": str(tmp_path)})
    told = json.loads(done.stdout)
    assert {"C++ and CUDA", "compiled kernels", "extension (aot)", "external libraries", "Triton"} <= set(told["facts"])
    assert done.returncode == (1 if told["findings"] else 0)
    assert all(finding["fix"] for finding in told["findings"])
    general = json.loads(rapid_llm("doctor", "--json", env={"RAPID_LLM_CACHE_DIR": str(tmp_path)}).stdout)
    assert general["facts"]["C++ and CUDA"] == told["facts"]["C++ and CUDA"]

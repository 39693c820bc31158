"""A cache, a temporary directory, a source tree and a stand-in compiler of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rapid_llm.kernels.build import thaw

from . import standin


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The store's user layer; the temporary layer is beside it."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "MAX_JOBS", "TORCH_CUDA_ARCH_LIST", "CPATH"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache" / "builds"
    thaw()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return standin.sources(tmp_path)


@pytest.fixture
def gxx(tmp_path: Path) -> standin.StandIn:
    return standin.make(tmp_path / "stand-in")

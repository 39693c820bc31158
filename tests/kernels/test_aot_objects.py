"""csrc/build.py compiles a source anew if anything that its object is made of has changed, and only then."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels.extension import builder

SOURCES = ("a/first.cu", "a/second.cu")
Build = Callable[..., list[str]]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes the objects of a small checkout with a compiler that writes what it was told; returns what it compiled."""
    module, compiled = builder(), []
    csrc, kernels = tmp_path / "csrc", tmp_path / "kernels"
    for name, text in {
        "a/first.cu": '#include "own.cuh"\n#include "both.cuh"\n',
        "a/second.cu": '#include "both.cuh"\n',
        "a/own.cuh": "own",
    }.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)
    kernels.mkdir()
    (kernels / "both.cuh").write_text("both")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("")

    def run(command: Sequence[str]) -> None:
        compiled.append(Path(command[-3]).name)
        Path(command[-1]).write_text(" ".join(command))

    for name, value in {"ROOT": tmp_path, "CSRC": csrc, "KERNELS": kernels, "_run": run}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "build" / "objects")

    def objects(
        archs: Sequence[str] = ("sm_80",), torch: str = "2.13.0", version: tuple[int, int] = (13, 0)
    ) -> list[str]:
        compiled.clear()
        tools = SimpleNamespace(nvcc=nvcc, version=version, ccbin=None)
        found = module.Torch(tmp_path / "torch", torch)
        for source in SOURCES:
            made = module._object(module.CSRC / source, tmp_path, found, tools, archs)
            assert f"{Path(source).name} -o" in made.read_text()
        return list(compiled)

    return objects


def test_what_has_not_changed_is_not_compiled_again(build: Build) -> None:
    """Catches: an edit of one source after which all are compiled."""
    assert build() == ["first.cu", "second.cu"]
    assert build() == []


@pytest.mark.parametrize(
    ("file", "again"),
    [
        ("csrc/a/first.cu", ["first.cu"]),
        ("csrc/a/own.cuh", ["first.cu"]),
        ("kernels/both.cuh", ["first.cu", "second.cu"]),
    ],
)
def test_an_edit_compiles_all_that_includes_it(build: Build, tmp_path: Path, file: str, again: list[str]) -> None:
    """Catches: an extension linked from an object of a source, or of a header, as it was before an edit."""
    build()
    old = (tmp_path / file).read_text()
    (tmp_path / file).write_text(f"{old}// edited")
    assert build() == again
    (tmp_path / file).write_text(old)
    assert build() == []


def test_other_tools_and_architectures_compile_anew(build: Build, tmp_path: Path) -> None:
    """Catches: machine code for another GPU, or of another compiler or another torch's headers."""
    build()
    both = ["first.cu", "second.cu"]
    assert build(archs=("sm_90",)) == both
    assert build(torch="2.14.0") == both
    assert build(version=(13, 1)) == both
    (tmp_path / "nvcc").write_text("another build of it")
    assert build() == both


def test_old_objects_go(build: Build, tmp_path: Path) -> None:
    """Catches: a folder that grows with every edit."""
    for number in range(6):
        (tmp_path / "csrc/a/own.cuh").write_text(str(number))
        build()
    stems = sorted(path.name.partition("-")[0] for path in (tmp_path / "build/objects").glob("*.o"))
    assert stems == ["first"] * builder().KEPT + ["second"]


def test_a_copy_of_the_checkout_takes_what_was_compiled(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a digest that depends on where the checkout is, after which a guide's clone compiles all again; tools
    that lie inside the checkout are no part of the copy."""
    build()
    copy = tmp_path / "copy"
    for name in ("csrc", "kernels"):
        shutil.copytree(tmp_path / name, copy / name)
    for name, value in {"ROOT": copy, "CSRC": copy / "csrc", "KERNELS": copy / "kernels"}.items():
        monkeypatch.setattr(builder(), name, value)
    assert build() == []

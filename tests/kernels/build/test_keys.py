"""What makes a new key, and what does not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rapid_llm.kernels.build import CompileFailed, GxxCompiler, Unit, facts, key_of
from rapid_llm.kernels.build.compilers import parse_rule, version_text

from . import standin
from .standin import StandIn, make_artifact, unit


def test_a_header_two_includes_deep_behind_a_macro_counts(root: Path, gxx: StandIn) -> None:
    """P11, P30: a scan of the sources sees no file in `#include SECOND`; the edited header goes unnoticed."""
    first = make_artifact(root, gxx.compiler)
    (root / "include" / "two.h").write_text("#define TWO 3\n")
    second = make_artifact(root, gxx.compiler)
    assert (first.cached, second.cached) == (False, False)
    assert "TWO 3" in second.path.read_text()
    (root / "include" / "two.h").write_text("#define TWO 2\n")
    assert make_artifact(root, gxx.compiler).path == first.path
    assert len(gxx.calls) == 2


def test_the_real_compiler_lists_the_macro_include(root: Path) -> None:
    """P11 with g++: `-M` names headers that no scan of the text finds."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    found = GxxCompiler(("g++",)).dependencies(unit(root))
    assert {"one.h", "two.h"} <= {path.name for path in found}


def test_a_header_that_comes_to_shadow_another_counts(root: Path, gxx: StandIn) -> None:
    """P11: a list of known headers is complete only while no new file is found in front of one."""
    make_artifact(root, gxx.compiler)
    (root / "one.h").write_text("#define ONE 7\n")  # quoted includes look beside the source first
    assert "ONE 7" in make_artifact(root, gxx.compiler).path.read_text()


def test_nested_include_directories_shadow_as_the_compiler_searches(root: Path, gxx: StandIn) -> None:
    """P11: include/one.h found through csrc/include must not be listed as csrc's, in front of which others come."""
    first = root.parent / "first"
    nested = {"include_dirs": (first, root, root / "include")}
    make_artifact(root, gxx.compiler, **nested)
    first.mkdir()
    (first / "one.h").write_text("#define ONE 8\n")
    assert "ONE 8" in make_artifact(root, gxx.compiler, **nested).path.read_text()


def test_an_unrelated_file_beside_the_source_does_not_count(root: Path, gxx: StandIn) -> None:
    """Catches a digest over the whole folder: every new kernel would rebuild all others."""
    make_artifact(root, gxx.compiler)
    (root / "b.cpp").write_text("int b;\n")
    (root / "include" / "b.h").write_text("\n")
    assert make_artifact(root, gxx.compiler).cached


def test_package_and_cache_may_move_together(
    root: Path, gxx: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: an absolute path in the key or in the list of headers rebuilds everything in each CI run."""
    first = make_artifact(root, gxx.compiler)
    other = tmp_path / "other" / "prefix"
    shutil.move(root, other / "csrc")
    shutil.move(tmp_path / "cache", other / "cache")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(other / "cache"))
    moved = make_artifact(other / "csrc", gxx.compiler)
    assert (moved.cached, moved.key) == (True, first.key)
    assert len(gxx.calls) == 1
    assert str(tmp_path) not in (moved.path.parent / "artifact.json").read_text()


def test_one_compiler_through_two_spellings_has_one_key(root: Path, gxx: StandIn, tmp_path: Path) -> None:
    """P9: the path through which a tool is found is no property of the tool."""
    (tmp_path / "link").symlink_to(gxx.folder)
    spelled = GxxCompiler((str(tmp_path / "link" / "g++"),))
    assert key_of(unit(root), gxx.compiler) == key_of(unit(root), spelled)


def test_gcc_by_any_of_its_names_is_one_compiler() -> None:
    """P9 with the real one: it prints the name it was called by in front of its version."""
    if shutil.which("g++") is None or shutil.which("c++") is None:
        pytest.skip("no g++ and c++ on PATH")
    if Path(str(shutil.which("g++"))).resolve() != Path(str(shutil.which("c++"))).resolve():
        pytest.skip("g++ and c++ are two compilers here")
    assert version_text(("g++",)) == version_text(("c++",))


def test_an_upgraded_compiler_has_a_new_key(root: Path, gxx: StandIn) -> None:
    """P14: the version that was remembered for a compiler outlives its upgrade in place."""
    old = key_of(unit(root), gxx.compiler)
    standin.make(gxx.folder, version="stand-in 2.0 with a longer name")
    script = gxx.folder / "g++"
    script.write_text(script.read_text() + "\n# 2.0\n")
    assert key_of(unit(root), gxx.compiler) != old


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": ("-O2", "-shared")},
        {"flags": ("-shared", "-O3")},
        {"arch": "sm_90"},
        {"output": "b.so"},
        {"facts": {"cuda": "13.0"}},
        {"facts": {"cxx11_abi": "True"}},
        {"facts": {"python": "cpython-311"}},
    ],
    ids=str,
)
def test_everything_that_shapes_the_result_is_in_the_key(root: Path, gxx: StandIn, changes: dict[str, object]) -> None:
    """P14: a build for another CUDA, ABI, Python, architecture or flag is taken for this one."""
    assert key_of(unit(root, **changes), gxx.compiler) != key_of(unit(root), gxx.compiler)


@pytest.mark.parametrize("fact", ["__version__", "cuda", "abi"])
def test_another_torch_is_another_key(root: Path, gxx: StandIn, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: a torch of another version, CUDA or ABI finds the old binary, and an undefined symbol in it."""

    def fake(**changes: object) -> SimpleNamespace:
        values = {"__version__": "2.11.0", "cuda": "13.0", "abi": True, **changes}
        return SimpleNamespace(
            __version__=values["__version__"],
            version=SimpleNamespace(cuda=values["cuda"]),
            compiled_with_cxx11_abi=lambda: values["abi"],
        )

    monkeypatch.setitem(sys.modules, "torch", fake())
    one = key_of(unit(root, facts=facts.torch_facts()), gxx.compiler)
    monkeypatch.setitem(sys.modules, "torch", fake(**{fact: "other"}))
    assert key_of(unit(root, facts=facts.torch_facts()), gxx.compiler) != one


def test_torch_is_known_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key that changes as soon as torch is imported, from the text of its version file to its attributes."""
    import torch

    loaded = facts.torch_facts()
    assert loaded["torch"] == torch.__version__
    monkeypatch.delitem(sys.modules, "torch")
    assert facts.torch_facts() == loaded


def test_linked_files_count_by_content(root: Path, gxx: StandIn, tmp_path: Path) -> None:
    """P15: a library replaced under the same name is linked from the cache as if it were the old one."""
    library = tmp_path / "libx.so"
    library.write_bytes(b"x" * (1 << 20))  # large enough for its digest to be remembered
    linked = unit(root, link_inputs=(library,))
    one = key_of(linked, gxx.compiler)
    assert key_of(linked, gxx.compiler) == one
    library.unlink()
    library.write_bytes(b"y" * (1 << 20))
    assert key_of(linked, gxx.compiler) != one


def test_variables_that_the_compiler_reads_count(root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: CPATH adds headers that no option on the command line shows."""
    one = key_of(unit(root), gxx.compiler)
    monkeypatch.setenv("CPATH", "/opt/other/include")
    assert key_of(unit(root), gxx.compiler) != one


def test_headers_of_the_system_are_left_to_their_versions(root: Path) -> None:
    """Catches a look-up that reads hundreds of system headers each time, and keys that differ by their paths."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    (root / "a.cpp").write_text('#include <vector>\n#include "one.h"\nextern "C" int a() { return ONE; }\n')
    from rapid_llm.kernels.build import build

    made = build(unit(root, flags=("-shared", "-fPIC")), GxxCompiler(("g++",)))
    names = [name for name, _ in json.loads((made.path.parent / "artifact.json").read_text())["headers"]]
    assert sorted(names) == ["0:one.h", "0:two.h", "source:one.h", "source:two.h"]


@pytest.mark.parametrize("field", ["path", "name", "output"])
@pytest.mark.parametrize("value", ["", "../x", "a/b", ".hidden", "a b"])
def test_names_that_would_leave_the_store_are_refused(root: Path, field: str, value: str) -> None:
    """Catches an artifact written outside of its folder."""
    with pytest.raises(ValueError, match=field):
        unit(root, **{field: value})


def test_a_rule_for_make_is_read_with_its_escapes() -> None:
    """Catches a list of headers cut at a space in a path, or one that takes the line end for a name."""
    text = "a.o: a.cpp \\\n /my\\ dir/one.h \\\n  two$$.h\n\n/my\\ dir/one.h:\n"
    assert [str(p) for p in parse_rule(text)] == ["a.cpp", "/my dir/one.h", "two$.h"]


def test_a_missing_header_is_the_compilers_error(root: Path) -> None:
    """Catches a preprocessor that fails while headers are listed, and a key made of nothing."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    (root / "a.cpp").write_text('#include "gone.h"\n')
    with pytest.raises(CompileFailed, match=r"gone\.h"):
        key_of(unit(root), GxxCompiler(("g++",)))


def test_a_unit_can_be_an_argument_of_a_cache(root: Path) -> None:
    """Catches facts, a mapping, in the hash."""
    assert isinstance(hash(unit(root, facts={"a": "b"})), int)
    assert isinstance(unit(root), Unit)

"""C++ kernels compiled on first use: kept, rebuilt when anything changes, never half there, and out with a reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm.kernels import cpp, explain
from rapid_llm.kernels.build import counters
from rapid_llm.kernels.build.toolchain import Part, host_command
from rapid_llm.kernels.registry import dispatcher, probes
from tests import warm

pytestmark = pytest.mark.skipif(cpp.available() is not True, reason=f"C++ kernels: {cpp.available()}")
ROOT = Path(cpp.__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel of one line in a source tree and a cache of the test's own; nothing is loaded yet."""
    monkeypatch.setattr(cpp, "SOURCES", tmp_path)
    monkeypatch.setattr(cpp, "_loaded", {})
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "answer.h").write_text("#pragma once\n#define ANSWER 42\n")
    file = tmp_path / "answer.cpp"
    file.write_text(SOURCE)
    return file


SOURCE = """
#include "include/answer.h"
#include "rapid_llm/module.h"
namespace rapid_llm {
bool answer(int64_t said) { return said == ANSWER; }
}
RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(answer))
"""


def answer() -> int:
    cpp._loaded.clear()
    right: Callable[[int], bool] = cpp.load_cpp("answer", "answer.cpp").answer
    return next(said for said in range(100) if right(said))


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "builds" / "cpp").glob("answer-*/answer.abi3.so"))


def test_a_kernel_is_built_once_and_again_when_its_header_changes(source: Path, tmp_path: Path) -> None:
    """P11, P30: a kernel compiled at each start, or one that keeps what an edited header used to say."""
    before = counters.compiles
    assert [answer(), answer()] == [42, 42]
    assert counters.compiles == before + 1
    (tmp_path / "include" / "answer.h").write_text("#pragma once\n#define ANSWER 43\n")
    assert answer() == 43
    assert counters.compiles == before + 2
    assert len(libraries(tmp_path)) == 2


def test_a_loaded_kernel_needs_no_second_look(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a library that is looked up again by each row that uses it."""
    library = cpp.load_cpp("answer", "answer.cpp")
    monkeypatch.setattr(cpp, "build", None)
    assert cpp.load_cpp("answer", "answer.cpp") is library


@pytest.mark.parametrize("cut", [0, 100, 8000])
def test_nothing_half_built_is_ever_taken(source: Path, tmp_path: Path, cut: int) -> None:
    """A library cut short, by a full disk say, is built again; a killed builder leaves nothing to wait for."""
    assert answer() == 42
    (kept,) = libraries(tmp_path)
    whole = kept.read_bytes()
    kept.unlink()  # a new file in its place: the old one is mapped into this process
    kept.write_bytes(whole[:cut])
    (tmp_path / "cache" / "builds" / "staging" / "cpp-answer-killed.x").mkdir()
    assert answer() == 42


def test_a_kernel_collected_before_it_is_loaded_is_built_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a row lost for the process because `cache gc` came between its look-up and its import."""
    calls = []
    real = cpp.build

    def build(*args: Any) -> Any:
        found = real(*args)
        calls.append(found.cached)
        if len(calls) == 1:
            shutil.rmtree(found.path.parent)
        return found

    monkeypatch.setattr(cpp, "build", build)
    assert answer() == 42
    assert calls == [False, False]


def test_a_broken_source_names_the_first_error_the_command_and_the_log(source: Path) -> None:
    source.write_text(SOURCE.replace("ANSWER", "undeclared"))
    with pytest.raises(cpp.BuildError, match=r"answer\.cpp:5:.*undeclared") as caught:
        answer()
    text = str(caught.value)
    assert "command: " in text
    log = Path(text.rsplit("log: ", 1)[1])
    assert "undeclared" in log.read_text()


def test_an_unwritable_cache_is_replaced_by_a_directory_of_ones_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert answer() == 42
    assert list(tmp_path.glob(f"rapid_llm-{os.getuid()}/builds/cpp/answer-*/answer.abi3.so"))


def test_processes_may_build_at_once(source: Path, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from rapid_llm.kernels import cpp
        cpp.SOURCES = Path({str(tmp_path)!r})
        print(cpp.load_cpp("answer", "answer.cpp").answer(42))
    """
    command = [warm.executable(), "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)]
    assert [p.communicate()[0].strip() for p in processes] == ["True"] * 3
    assert len(libraries(tmp_path)) == 1


def forget() -> None:
    """As in a new process: neither a probe's answer nor a decision made with it is known."""
    probes.forget()
    dispatcher.forget(None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RAPID_LLM_JIT": "off"}, "RAPID_LLM_JIT=off"),
        ({"PATH": "/nowhere", "CXX": ""}, "no C++ compiler"),
        ({"CXX": "no-such-compiler"}, "CXX=no-such-compiler names no program"),
    ],
)
def test_without_a_compiler_the_rows_are_out_and_say_why(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    forget()
    found = explain("rmsnorm", device="cpu", dtype="fp32").json()
    monkeypatch.undo()
    forget()
    rows = {r["name"]: r for r in found["rows"]}  # type: ignore[attr-defined,index]
    assert found["selected"] == "native/rmsnorm"
    assert expected in rows["cpp/rmsnorm"]["reasons"][0]["text"]


def test_without_pythons_header_the_rows_are_out_and_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a row that a probe lets in and that then fails to compile, where Python.h is not installed."""
    missing = Part("Python.h", False, "/usr/include/python3.11/Python.h does not exist", "install python3-dev")
    monkeypatch.setattr(cpp, "python_part", lambda: missing)
    assert cpp.available() == "Python.h: /usr/include/python3.11/Python.h does not exist"
    assert cpp.why_not().fix == "install python3-dev"


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [("RAPID_LLM_JIT", "off", "unset RAPID_LLM_JIT"), ("CXX", "/no/such/g++", "install g++, or set CXX")],
)
def test_a_row_that_is_out_comes_with_a_fix_to_type(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fix: str
) -> None:
    """Catches: "do what makes available() answer True" where one variable is set wrongly."""
    monkeypatch.setenv(variable, value)
    forget()
    found = explain("rmsnorm", device="cpu", dtype="fp32").json()
    monkeypatch.undo()
    forget()
    (row,) = [r for r in found["rows"] if r["name"] == "cpp/rmsnorm"]  # type: ignore[attr-defined,index]
    assert fix in row["reasons"][0]["fix"]


def test_a_machine_of_the_same_level_takes_what_another_one_built(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an artifact that is exported in vain, because the CPU's model is in its key."""
    assert answer() == 42
    before = counters.compiles
    here = cpp.cpu_info()
    monkeypatch.setattr(cpp, "cpu_info", lambda: replace(here, model="another", isa=(*here.isa, "amx_fp8")))
    assert answer() == 42
    assert counters.compiles == before


def test_a_smaller_cpu_takes_a_lower_level(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: instructions that the CPU does not have, and a level that is chosen for want of one extension."""
    here, lowest = cpp.cpu_info(), cpp.LEVELS[0]
    monkeypatch.setattr(cpp, "cpu_info", lambda: replace(here, isa=(*lowest.isa, "avx512f")))
    assert cpp.levels() == (lowest,)
    assert answer() == 42
    (built,) = libraries(tmp_path)
    record = json.loads((built.parent / "artifact.json").read_text())
    assert record["arch"] == lowest.name
    assert [flag for flag in record["details"]["flags"] if flag.startswith("-m")] == ["-mavx2", "-mfma", "-mf16c"]
    with pytest.raises(cpp.BuildError, match="avx512 needs avx512bw, avx512vl, which this CPU lacks"):
        cpp.load_cpp("answer", "answer.cpp", cpp.LEVELS[1])


def test_an_older_compiler_takes_a_lower_level(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rows that are out because the compiler does not know the newest extension of the CPU."""
    (command,), _ = host_command()
    old = tmp_path / "old-compiler"
    old.write_text(
        f'#!/bin/sh\ncase "$*" in *-mavx512*) echo "no -mavx512f here" >&2; exit 1;; esac\nexec {command} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert answer() == 42
    (built,) = libraries(tmp_path)
    assert json.loads((built.parent / "artifact.json").read_text())["arch"] == "avx2"
    old.write_text('#!/bin/sh\necho "what is $1?"; exit 1\n')
    with pytest.raises(cpp.BuildError, match="old-compiler does not take -mavx2 -mfma -mf16c"):
        answer()


def test_a_compiler_that_was_killed_is_asked_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a level, or all C++ rows, out for good because the compiler ran out of memory when it was asked."""
    (command,), _ = host_command()
    tired = tmp_path / "tired-compiler"
    script = f"""#!/bin/sh
case "$*" in *-E*) [ -e {tmp_path}/rested ] || {{ echo "Killed signal terminated program cc1plus" >&2; exit 1; }};; esac
exec {command} "$@"
"""
    tired.write_text(script)
    tired.chmod(0o755)
    monkeypatch.setenv("CXX", str(tired))
    with pytest.raises(cpp.BuildError, match="ended with 1: Killed signal"):
        answer()
    (tmp_path / "rested").write_text("")
    assert answer() == 42


def test_cxx_may_be_a_command_of_several_words(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `CXX="ccache g++"` looked for as one file, and a launcher that is left out."""
    (command,), _ = host_command()
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/launched\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} {command}")
    assert answer() == 42
    assert command in (tmp_path / "launched").read_text().split()


def test_a_cxx_that_names_nothing_is_not_passed_over(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a build with another compiler than the one that was named."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(cpp.BuildError, match="CXX=no-such-compiler names no program"):
        answer()


def test_a_row_that_does_not_build_is_out_with_a_warning_and_the_next_one_answers(tmp_path: Path) -> None:
    """In a process of its own: the row's module must not be loaded before."""
    code = """
        import logging, torch
        logging.basicConfig()
        from rapid_llm.kernels import cpp, rmsnorm, explain
        def broken(*a): raise cpp.BuildError("cpp/norms does not compile: it is Monday")
        cpp.build = broken
        x, w = torch.ones(2, 8), torch.ones(8)
        for _ in range(3): rmsnorm(x, w)
        print(explain("rmsnorm", x, w).selected)
    """
    env = {**os.environ, "RAPID_LLM_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [warm.executable(), "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.stdout.strip() == "native/rmsnorm", done.stderr
    assert done.stderr.count("it is Monday") >= 1
    assert "cpp/rmsnorm is out" in done.stderr


@pytest.mark.parametrize("case", ["expanded query", "two-dimensional positions", "float positions"])
def test_rope_refuses_what_the_floor_refuses(case: str) -> None:
    from rapid_llm.kernels.registry import ArgumentError, load_target

    query, key = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    positions, table = torch.tensor([1, 2]), torch.randn(32, 16)
    if case == "expanded query":
        query, key, positions = torch.randn(1, 1, 16).expand(1, 4, 16), key[:1], positions[:1]
    elif case == "two-dimensional positions":
        positions = torch.tensor([[1, 30], [2, 31]])
    else:
        positions = positions.float()
    for row in ("native/rope", "cpp/rope"):
        with pytest.raises((ArgumentError, IndexError, RuntimeError)):
            load_target(row)(query, key, positions, table)


def test_attention_refuses_pages_without_rows_and_lengths_beyond_int32() -> None:
    """Catches: a division by a page size of 0; a length cut to 32 bits, which would pass for a short one."""
    from rapid_llm.kernels.registry import load_target

    decode = load_target("cpp/attention.decode")
    query, cache = torch.randn(2, 4, 16), torch.randn(5, 16, 2, 16)
    lengths, table = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([[1], [2]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"attention\.decode: .*page_size of at least 1"):
        decode(query, cache[:, :0], cache[:, :0].clone(), lengths, table, 1.0)
    with pytest.raises(RuntimeError, match=r"sequence 0 has 4294967301 keys .* too short"):
        decode(query, cache, cache.clone(), lengths.long() + 2**32, table, 1.0)

"""Builds where the machine is not as expected: no temporary directory, no terminal, foreign names, images, clocks."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.cli import cache as commands
from rapid_llm.kernels.build import (
    BuildError,
    CompileFailed,
    GxxCompiler,
    NvccCompiler,
    Toolchain,
    build,
    key_of,
    keys,
    store,
    upkeep,
)
from rapid_llm.kernels.build.compilers import version_text
from rapid_llm.kernels.build.process import run
from rapid_llm.kernels.build.toolchain import host_command

from .standin import StandIn, make_artifact, unit

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tempfile` says in a read-only container, and on a full disk."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)


def test_without_a_temporary_directory_the_cache_serves(root: Path, gxx: StandIn, no_temporary: None) -> None:
    """P22: an error of `tempfile` where everything that is needed lies in the cache."""
    assert make_artifact(root, gxx.compiler).layer == "user"
    assert make_artifact(root, gxx.compiler).cached


def test_without_any_directory_the_error_says_so(
    root: Path, gxx: StandIn, no_temporary: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: a FileNotFoundError that leaves the layer of kernels untyped."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(BuildError, match=r"no temporary directory can be written; .*file/below.*RAPID_LLM_CACHE_DIR"):
        make_artifact(root, gxx.compiler)


def test_the_compiler_needs_no_temporary_directory_of_the_machine(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: nvcc writes files to TMPDIR even to list headers, and a TMPDIR that is not there took every kernel along."""
    program = tmp_path / "c++"
    program.write_text("""#!/bin/sh
[ "$1" = --version ] && echo one && exit
[ "$1" = -dumpmachine ] && exit
[ -w "$TMPDIR" ] || { echo "Could not open output file '$TMPDIR/x'" >&2; exit 1; }
case "$*" in *" -M "*) echo "a.o: ";; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo "built by me" > "$2"; shift; done
""")
    program.chmod(0o755)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert make_artifact(root, GxxCompiler((str(program),))).layer == "user"


def test_without_path_the_compiler_finds_its_parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `cannot execute 'cc1plus'` under `env -i`: the compiler has not the path it was found by."""
    monkeypatch.delenv("PATH")
    command, problem = host_command()
    assert not problem
    assert build(unit(root, flags=("-shared", "-fPIC")), GxxCompiler(command)).layer == "user"


def test_a_tmpdir_that_is_not_there_is_given_to_no_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P22: nvcc, asked for its folders, fails for want of a place to write: no CUDA toolkit."""
    monkeypatch.setenv("TMPDIR", "/nowhere")
    told = Path(run(["/bin/sh", "-c", "echo $TMPDIR"], timeout_s=10.0).out.strip())
    assert told.is_dir()


def test_headers_installed_by_hand_count(root: Path) -> None:
    """P11: a library in /usr/local/include, updated in place, whose kernels stay as they were."""
    assert not keys._foreign("/usr/local/include/cutlass/cutlass.h", unit(root))
    assert keys._foreign("/usr/local/include/c++/14.2.0/vector", unit(root))
    assert keys._foreign("/usr/include/stdio.h", unit(root))


class Gone:
    """A terminal whose connection has been closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("stream", [None, Gone(), object()], ids=["closed", "gone", "foreign"])
def test_no_build_depends_on_a_terminal(
    root: Path, gxx: StandIn, stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a daemon, whose sys.stderr is None, and a job whose terminal was closed, that lose their kernels."""
    monkeypatch.setattr(sys, "stderr", stream)
    assert make_artifact(root, gxx.compiler).layer == "user"


def test_no_build_depends_on_a_thread_for_its_progress(
    root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches RLIMIT_NPROC met by the progress line; and the line never given back."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert not make_artifact(root, gxx.compiler).cached
    started: list[str] = []
    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name) or real(thread))
    make_artifact(root, gxx.compiler, flags=("-O1",))
    assert started == ["rapid-llm-progress"]


def _append(entry: list[str]) -> Edit:
    return lambda kept: kept["headers"].append(entry)


@pytest.mark.parametrize(
    "edit",
    [
        _append(["9:x.h", "00"]),
        _append(["here:x.h", "00"]),
        _append(["0:x\0.h", "00"]),
        lambda kept: kept.update(size=float("inf")),
        lambda kept: kept.update(created=float("-inf")),
        lambda kept: kept.update(seconds=float("nan")),
        lambda kept: kept.update(output="a\0b"),
        lambda kept: kept.update(output=".."),
        lambda kept: kept.update(output=["a.so"]),
        lambda kept: kept.update(output="\ud800"),
        None,
    ],
)
def test_a_record_that_was_altered_costs_a_build_and_nothing_else(
    root: Path, gxx: StandIn, edit: Edit | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches any exception out of `build` or `cache list` for what lies in a file that anything may have written."""
    made = make_artifact(root, gxx.compiler)
    record = made.path.parent / "artifact.json"
    kept = json.loads(record.read_text())
    if edit is not None:
        edit(kept)
    record.write_text(json.dumps(kept) if edit is not None else "[" * 200_000)
    commands.list_artifacts(json=True)
    upkeep.faults()
    again = make_artifact(root, gxx.compiler)
    assert not again.cached
    assert make_artifact(root, gxx.compiler).cached


def test_what_is_no_folder_makes_way(root: Path, gxx: StandIn, tmp_path: Path) -> None:
    """Catches a file, or a link to nowhere, in an artifact's place, that sends each build elsewhere."""
    folder = make_artifact(root, gxx.compiler).path.parent
    for put in (lambda: folder.write_text(""), lambda: folder.symlink_to(tmp_path / "nowhere")):
        upkeep.store.discard(folder, folder.parents[1])
        put()
        made = make_artifact(root, gxx.compiler)
        assert (made.layer, made.path.parent) == ("user", folder)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_who_runs_an_image_can_use_what_its_builder_built(
    root: Path, gxx: StandIn, cache: Path, tmp_path: Path, usual_umask: None
) -> None:
    """P10: folders as private as mkdtemp's, so that kernels built by root are built again, or missed, by the user."""
    made = make_artifact(root, gxx.compiler)
    commands.export(tmp_path / "out.tar", name=None, force=False)
    for path in (made.path.parent, made.path, made.path.parent / "artifact.json", tmp_path / "out.tar"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044, path
    upkeep.store.discard(made.path.parent, cache)
    commands.load(tmp_path / "out.tar")
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o755
    assert {stat.S_IMODE(lock.stat().st_mode) for lock in (cache / "locks").iterdir()} == {0o644}


def test_a_private_umask_is_kept(root: Path, gxx: StandIn, usual_umask: None) -> None:
    """Catches permissions wider than the user gives to any new file."""
    os.umask(0o077)
    made = make_artifact(root, gxx.compiler)
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700


@pytest.fixture
def overlay(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """An overlay does not rename folders of its lower layer: here, all artifacts'."""
    real = os.rename

    def rename(source: Any, target: Any) -> None:
        if cache / "cpp" in Path(source).parents:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)


def test_artifacts_of_an_image_can_be_replaced_and_collected(root: Path, gxx: StandIn, overlay: None) -> None:
    """Catches EXDEV, met by a damaged artifact in a container's image: every build elsewhere, every gc a failure."""
    made = make_artifact(root, gxx.compiler)
    made.path.write_text("damaged")
    again = make_artifact(root, gxx.compiler)
    assert (again.layer, again.path) == ("user", made.path)
    assert [r.kind for r in upkeep.gc(older_than_days=-1.0) if r.kind == "artifact"] == ["artifact"]
    assert not made.path.parent.exists()


def test_a_failure_from_a_clock_that_was_ahead_is_not_shared(root: Path, gxx: StandIn, cache: Path) -> None:
    """Catches a note of 2035, left before the clock was set right, that fails each build without a compile till then:
    a failure may have been the machine's (memory, a limit), so only who waited for it takes it over."""
    gxx.tell("killed")
    with pytest.raises(BuildError):
        make_artifact(root, gxx.compiler)
    (note,) = (cache / "logs").glob("*.failed.json")
    note.write_text(json.dumps({**json.loads(note.read_text()), "at": 2_051_222_400.0}))
    gxx.tell("ok")
    assert not make_artifact(root, gxx.compiler).cached


def test_names_that_are_no_text(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder named in another encoding, or with a shell's signs: headers not found, logs not written."""
    odd = Path(os.fsdecode(os.fsencode(str(tmp_path)) + b"/caf\xe9 o'clock $x #1"))
    odd.mkdir()
    root.rename(odd / "csrc")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(odd / "cache"))
    made = unit(odd / "csrc", flags=("-shared", "-fPIC"))
    assert build(made, GxxCompiler(("g++",))).layer == "user"
    (odd / "csrc" / "include" / "two.h").write_text("#define TWO 3\n")
    assert not build(made, GxxCompiler(("g++",))).cached
    (odd / "csrc" / "a.cpp").write_text("nonsense;\n")
    with pytest.raises(BuildError, match=r"a\.cpp:1: error: 'nonsense'.*(\n.*)*log: /"):
        build(made, GxxCompiler(("g++",)))


@pytest.mark.parametrize("sign", list("$'`\""))
def test_nvcc_is_given_no_path_that_it_breaks(tmp_path: Path, sign: str) -> None:
    """Catches `No such file` for a file that is there: nvcc starts its passes by a shell and quotes nothing."""
    source = tmp_path / f"a{sign}b" / "a.cu"
    source.parent.mkdir()
    source.write_text("")
    tools = Toolchain((), nvcc=Path("/bin/true"), nvcc_text="nvcc 1", host=("g++",))
    plain = tmp_path / "a.cu"
    plain.write_text("")
    made = replace(unit(tmp_path, source=plain, include_dirs=()), path="jit", arch="sm_90")
    with pytest.raises(CompileFailed) as refused:
        NvccCompiler(tools).dependencies(made, source.parent)
    assert "nvcc cannot use" in refused.value.first
    with pytest.raises(CompileFailed) as refused:
        NvccCompiler(tools).compile(made, source.with_name("a.so"), tmp_path / "log")
    assert "nvcc cannot use" in refused.value.first
    with pytest.raises(BuildError, match=r"nvcc cannot use .*: it loses the"):
        build(replace(unit(tmp_path, source=source, include_dirs=()), path="jit"), NvccCompiler(tools))


def test_arguments_in_cxx_shape_the_key(root: Path) -> None:
    """P57, P14: CXX="g++ -ffast-math" takes what g++ built, and the other way round; a launcher makes no difference."""
    plain = key_of(unit(root), GxxCompiler(("g++",)))
    assert key_of(unit(root), GxxCompiler(("env", "g++"))) == plain or version_text(("env", "g++")) != version_text(
        ("g++",)
    )
    others = [key_of(unit(root), GxxCompiler(("g++", flag))) for flag in ("-ffast-math", "-m32", "-DNDEBUG")]
    assert len({plain, *others}) == 4


def test_collectors_and_builders_get_on(root: Path, gxx: StandIn) -> None:
    """Catches a gc that ends in FileNotFoundError because a builder, or another gc, was at the same folder."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            try:
                upkeep.gc(older_than_days=0.0, newest_only=True)
            except BaseException as error:
                errors.append(error)

    collectors = [threading.Thread(target=collect) for _ in range(3)]
    for thread in collectors:
        thread.start()
    try:
        for at in range(8):
            make_artifact(root, gxx.compiler, flags=(f"-DAT={at}",))
    finally:
        ended.set()
        for thread in collectors:
            thread.join()
    assert not errors, errors


def test_what_vanishes_under_a_collector_counts_nothing(tmp_path: Path) -> None:
    """Catches the same, told by the functions that look."""
    gone = tmp_path / "gone"
    assert upkeep._size(gone) == 0
    assert not upkeep._older(gone, 1e12)
    assert upkeep._remove(gone, "log", "old", dry_run=False).size == 0
    assert store.read(gone, "user") is None

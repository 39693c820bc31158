"""Damaged, read-only, full, foreign, frozen: what the store holds is right, or is built again, or says why not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rapid_llm.kernels.build import (
    BuildError,
    FrozenError,
    build,
    counters,
    engine,
    freeze,
    frozen,
    locks,
    store,
    thaw,
)

from .standin import StandIn, make_artifact, unit

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("cut", [0, 10, None], ids=["emptied", "cut short", "altered"])
def test_a_damaged_artifact_is_built_again(
    root: Path, gxx: StandIn, cut: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """P2: a library cut short by a full disk is mapped, and kills the process at its first missing page."""
    first = make_artifact(root, gxx.compiler)
    data = first.path.read_bytes()
    first.path.write_bytes(data[:cut] if cut is not None else data.replace(b"int a", b"int b"))
    second = make_artifact(root, gxx.compiler)
    assert (second.cached, second.path) == (False, first.path)
    assert caplog.text.count("its content differs from what was built") == 1
    assert b"int a" in second.path.read_bytes()


@pytest.mark.parametrize("damage", ["gone", "cut", "foreign"])
def test_an_artifact_with_a_damaged_record_is_built_again(root: Path, gxx: StandIn, damage: str) -> None:
    """P17: half of a pair is taken for the whole."""
    first = make_artifact(root, gxx.compiler)
    record = first.path.parent / "artifact.json"
    if damage == "gone":
        record.unlink()
    else:
        record.write_text(record.read_text()[:40] if damage == "cut" else "[]")
    assert not make_artifact(root, gxx.compiler).cached
    assert make_artifact(root, gxx.compiler).cached


def test_what_does_not_load_here_is_built_again(root: Path, gxx: StandIn) -> None:
    """P13: an artifact that fails its load test stays in the cache and fails in every process."""
    old = make_artifact(root, gxx.compiler).path.stat().st_ino

    def check(path: Path) -> None:
        if path.stat().st_ino == old:
            raise OSError("undefined symbol")

    assert not build(unit(root), gxx.compiler, check=check).cached
    assert build(unit(root), gxx.compiler, check=check).cached


def test_what_a_compiler_leaves_behind_goes_with_its_build(
    root: Path, gxx: StandIn, tmp_path: Path, cache: Path
) -> None:
    """Catches temporary files of compilers that fill /tmp, or that are published with the artifact."""
    made = make_artifact(root, gxx.compiler)
    assert not list((tmp_path / "tmp").iterdir())
    assert not list((cache / "staging").iterdir())
    assert {p.name for p in made.path.parent.iterdir()} == {"a.so", "artifact.json", "build.log"}


def test_a_compiler_whose_output_does_not_load_fails(root: Path, gxx: StandIn, cache: Path) -> None:
    """P2: exit status 0 is taken for success, and a broken library is published."""
    gxx.tell("cut short")
    with pytest.raises(BuildError, match="left nothing that loads: cut short"):
        make_artifact(root, gxx.compiler)
    assert not list(cache.glob("cpp/*"))


def test_a_compiler_that_writes_nothing_fails(root: Path, gxx: StandIn) -> None:
    """Catches exit status 0 without an output."""
    gxx.tell("empty")
    with pytest.raises(BuildError, match=r"a\.so was not written"):
        make_artifact(root, gxx.compiler)


def test_a_failed_build_says_where_what_and_how(root: Path, gxx: StandIn) -> None:
    """P29: 'returned non-zero exit status 1' and nothing else."""
    gxx.tell("fail")
    with pytest.raises(BuildError) as caught:
        make_artifact(root, gxx.compiler)
    first, command, log = str(caught.value).splitlines()
    assert first == f"cpp/a does not compile: {root}/a.cpp:3: error: 'nonsense' was not declared in this scope"
    assert f"{gxx.folder}/g++ -O3 -shared" in command
    kept = Path(log.removeprefix("  log: ")).read_text()
    assert "nonsense" in kept
    assert "g++ -O3" in kept
    gxx.tell("ok")
    assert not make_artifact(root, gxx.compiler).cached


def test_a_read_only_home_is_replaced_by_a_private_temporary_directory(
    root: Path, gxx: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: PermissionError at first use where the home is read-only."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file" / "below"))  # no permission is asked of root
    made = make_artifact(root, gxx.compiler)
    assert made.layer == "temporary"
    assert made.path.is_relative_to(tmp_path / "tmp" / f"rapid_llm-{os.getuid()}")
    assert (tmp_path / "tmp" / f"rapid_llm-{os.getuid()}").stat().st_mode & 0o777 == 0o700
    assert make_artifact(root, gxx.compiler).cached


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_without_write_permission(root: Path, gxx: StandIn, tmp_path: Path, cache: Path) -> None:
    """P22 by permissions."""
    cache.mkdir(parents=True)
    cache.chmod(0o555)
    assert make_artifact(root, gxx.compiler).layer == "temporary"
    cache.chmod(0o755)


def test_a_user_without_a_home(root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """P22: a container's user without an entry in the password file; RuntimeError of Path.home()."""

    def none() -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RAPID_LLM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert make_artifact(root, gxx.compiler).layer == "temporary"
    assert make_artifact(root, gxx.compiler).cached


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_temporary_directory_of_somebody_elses_is_not_trusted(
    root: Path, gxx: StandIn, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: a folder that another user planted in /tmp serves its code to this one."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file" / "below"))
    made = make_artifact(root, gxx.compiler)
    private = tmp_path / "tmp" / f"rapid_llm-{os.getuid()}"
    if kind == "link":
        private.rename(tmp_path / "planted")
        private.symlink_to(tmp_path / "planted")
    elif kind == "open":
        private.chmod(0o777)
    else:
        private.rename(tmp_path / "planted")
        private.write_text("")
    with pytest.raises(BuildError, match=f"no directory to build in: .*file/below.*{private}") as caught:
        make_artifact(root, gxx.compiler)
    assert {"link": "is not a directory", "open": "chmod 700", "file": "is not a directory"}[kind] in str(caught.value)
    assert "RAPID_LLM_CACHE_DIR" in str(caught.value)
    assert made.layer == "temporary"


def test_a_disk_that_fills_up_under_the_compiler_is_not_the_sources_fault(
    root: Path, gxx: StandIn, tmp_path: Path
) -> None:
    """P22: 'does not compile' is said of a good source, and the other directories are not tried."""
    gxx.tell("full disk")
    with pytest.raises(BuildError, match="no directory to build in") as caught:
        make_artifact(root, gxx.compiler)
    assert str(caught.value).count("the disk is full") == 2
    assert "does not compile" not in str(caught.value)


def test_a_disk_that_fills_up_under_the_record_moves_on(
    root: Path, gxx: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: ENOSPC in this process's own write ends the program."""
    real = store.write

    def full(staging: Path, record: dict[str, Any]) -> None:
        if staging.is_relative_to(cache):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(staging, record)

    monkeypatch.setattr(store, "write", full)
    assert make_artifact(root, gxx.compiler).layer == "temporary"
    assert not list((cache / "staging").iterdir())


def test_a_home_from_which_nothing_may_be_loaded(root: Path, gxx: StandIn, cache: Path) -> None:
    """P22: a home that is mounted noexec; the loader's refusal is taken for a broken compiler."""

    def check(path: Path) -> None:
        if path.is_relative_to(cache):
            raise OSError(f"{path}: failed to map segment from shared object: Operation not permitted")

    assert build(unit(root), gxx.compiler, check=check).layer == "temporary"
    assert build(unit(root), gxx.compiler, check=check).cached


def test_without_file_locks_a_rename_is_enough(
    root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P18: a network file system without flock makes every build fail."""

    def none(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(locks, "_said", set())
    assert not make_artifact(root, gxx.compiler).cached
    assert make_artifact(root, gxx.compiler).cached
    assert caplog.text.count("no file locks here") == 1


def test_an_artifact_of_the_package_needs_no_compiler(
    root: Path, gxx: StandIn, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a prebuilt layer that is built into, or not looked at."""
    layers = store.layers()
    packaged = store.Layer("package", tmp_path / "prebuilt", writable=False)
    made = make_artifact(root, gxx.compiler)
    (tmp_path / "prebuilt" / "cpp").mkdir(parents=True)
    made.path.parent.rename(tmp_path / "prebuilt" / "cpp" / made.path.parent.name)
    monkeypatch.setattr(store, "layers", lambda: (packaged, *layers[1:]))
    found = make_artifact(root, gxx.compiler)
    assert (found.cached, found.layer) == (True, "package")
    found.path.write_text("damaged")
    again = make_artifact(root, gxx.compiler)
    assert (again.cached, again.layer) == (False, "user")


def test_after_freeze_nothing_compiles_and_everything_ready_loads(root: Path, gxx: StandIn) -> None:
    """P66: a compile in the middle of serving."""
    make_artifact(root, gxx.compiler)
    compiles, hits = counters.compiles, counters.hits
    freeze()
    assert frozen()
    assert make_artifact(root, gxx.compiler).cached
    with pytest.raises(FrozenError, match=r"cpp/a is not built.*prepare\(\)"):
        make_artifact(root, gxx.compiler, flags=("-O1",))
    assert (counters.compiles, counters.hits) == (compiles, hits + 1)
    thaw()
    assert not make_artifact(root, gxx.compiler, flags=("-O1",)).cached
    assert counters.compiles == compiles + 1


def test_building_opens_no_socket(root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, P41, P42, P43: nothing is ever fetched, so no fetch can race, fail, or be missed offline."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not make_artifact(root, gxx.compiler).cached
    assert make_artifact(root, gxx.compiler).cached


def test_importing_writes_nothing_and_starts_nothing(tmp_path: Path) -> None:
    """P22, P23: files written and processes started by an import."""
    code = """
import sys
seen = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.fork", "socket.connect", "os.mkdir", "os.rename", "ctypes.dlopen"):
        seen.append((event, args))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, args))
import ctypes  # opens the interpreter itself
sys.addaudithook(hook)
import rapid_llm.kernels.build, rapid_llm.kernels.build.upkeep, rapid_llm.kernels.build.archive
assert not seen, seen
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_progress_is_for_terminals(
    root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a silent minute on a terminal, and control characters in a log file."""
    make_artifact(root, gxx.compiler)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make_artifact(root, gxx.compiler, flags=("-O1",))
    shown = capfd.readouterr().err
    assert "building cpp/a ... 0 s" in shown
    assert shown.endswith("\r\x1b[K")


def test_the_look_up_runs_no_process(root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a warm load that asks the compiler for its headers or its version."""
    make_artifact(root, gxx.compiler)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert make_artifact(root, gxx.compiler).cached
    assert engine.key_of(unit(root), gxx.compiler)


def test_a_key_that_is_asked_for_first_is_the_one_that_is_built(root: Path, gxx: StandIn) -> None:
    """Catches two ways to the key that part."""
    key = engine.key_of(unit(root), gxx.compiler)
    made = make_artifact(root, gxx.compiler)
    assert made.key == key == engine.key_of(unit(root), gxx.compiler)
    assert json.loads((made.path.parent / "artifact.json").read_text())["key"] == key


def test_a_source_that_is_not_there_is_named(root: Path, gxx: StandIn) -> None:
    """Catches a FileNotFoundError that leaves the layer of kernels untyped."""
    with pytest.raises(BuildError, match=r"gone\.cpp"):
        make_artifact(root, gxx.compiler, source=root / "gone.cpp")

"""Builders at once, slow, killed, waiting: whatever happens to one, the next is right, or says why not."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from rapid_llm.kernels.build import (
    BuildError,
    BuildTimeout,
    GxxCompiler,
    LockTimeout,
    build,
    locks,
    store,
)
from rapid_llm.kernels.build.process import run

from . import standin
from .standin import StandIn, make_artifact, unit, whole

ROOT = Path(__file__).parents[3]


def start(root: Path, gxx: StandIn) -> subprocess.Popen[str]:
    """A process of its own that builds the unit."""
    return subprocess.Popen(
        [sys.executable, "-c", standin.PROCESS, str(root), str(gxx.folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def lock_file(cache: Path, root: Path, gxx: StandIn) -> Path:
    from rapid_llm.kernels.build.keys import base_key

    return cache / "locks" / f"cpp-a-{base_key(unit(root), gxx.compiler)}.lock"


def test_eight_processes_compile_once(root: Path, gxx: StandIn) -> None:
    """P1: a build folder shared by name, in which eight processes compile over each other."""
    gxx.tell("half")
    processes = [start(root, gxx) for _ in range(8)]
    gxx.wait_until_half_written()
    gxx.let_go()
    said = [process.communicate(timeout=60) for process in processes]
    assert [p.returncode for p in processes] == [0] * 8, said
    assert len({out.split()[1] for out, _ in said}) == 1
    assert sorted(out.split()[0] for out, _ in said) == ["False"] + ["True"] * 7
    assert len(gxx.calls) == 1


def test_threads_of_one_process_compile_once(root: Path, gxx: StandIn) -> None:
    """P1 within a process: a lock that belongs to the process lets its threads through."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_artifact(root, gxx.compiler), range(8)))
    assert len({a.path for a in made}) == 1
    assert len(gxx.calls) == 1


def test_nobody_sees_a_file_half_written(root: Path, gxx: StandIn, cache: Path) -> None:
    """P2, P17: an existence test finds a library that the linker is still writing, or one without its digest."""
    gxx.tell("half")
    builder = start(root, gxx)
    gxx.wait_until_half_written()
    assert not list(cache.glob("cpp/*"))
    assert list(cache.glob("staging/*/a.so"))  # it is being written, in private
    gxx.let_go()
    assert builder.wait(60) == 0
    (folder,) = cache.glob("cpp/*")
    assert {p.name for p in folder.iterdir()} == {"a.so", "artifact.json", "build.log"}


def test_builders_of_different_content_each_load_a_matching_pair(
    root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: without locks two builders publish at once; the file of one beside the digest of the other."""

    def none(*_: object) -> NoReturn:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    with ThreadPoolExecutor(4) as pool:  # each output holds its compiler's process id
        made = list(pool.map(lambda _: make_artifact(root, gxx.compiler), range(4)))
    (folder,) = {a.path.parent for a in made}
    record = store.read(folder, "user")
    assert record is not None
    assert record.fault() == ""


def test_a_killed_builder_blocks_nobody(root: Path, gxx: StandIn, cache: Path) -> None:
    """P5: a lock that outlives its owner; the next process waits for a file that nobody will remove."""
    gxx.tell("half")
    builder = start(root, gxx)
    compiler = gxx.wait_until_half_written()
    builder.send_signal(signal.SIGKILL)
    builder.wait(60)
    gxx.tell("ok")
    made = build(unit(root), gxx.compiler, check=whole, lock_timeout_s=0)  # no waiting at all
    os.kill(compiler, signal.SIGKILL)  # the compiler itself outlived its builder; it holds no lock
    builder.communicate()
    assert not made.cached
    assert not list((cache / "staging").iterdir())


def test_a_killed_compiler_is_named(root: Path, gxx: StandIn) -> None:
    """P27, P29: the kernel's out-of-memory killer leaves no text; a report of 'exit status -9' helps nobody."""
    gxx.tell("killed")
    with pytest.raises(BuildError, match=r"out of memory.*MAX_JOBS"):
        make_artifact(root, gxx.compiler)


def test_a_fork_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """P5: a forked worker inherits the lock of its killed parent and holds it for as long as it lives."""
    code = f"""
import os
from pathlib import Path
from rapid_llm.kernels.build import locks
with locks.KeyLock(Path({str(tmp_path / "lock")!r}), "x", 0):
    if os.fork() == 0:
        print("ready", flush=True)
        os.read(0, 1)  # lives on until the test ends it
        os._exit(0)
    os.read(0, 1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    lock = locks.KeyLock(tmp_path / "lock", "y", 0)
    assert not lock.try_now()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lock.try_now()
    lock.release()
    process.stdin.close()
    process.stdout.read()  # until the fork has ended too
    process.stdout.close()


def test_a_lock_file_removed_under_a_waiter_is_not_what_it_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: gc removes an old lock file that a builder has just opened; the next one makes a new file, and both build."""
    real = fcntl.flock
    calls: list[int] = []

    def removed(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed)
    with locks.KeyLock(tmp_path / "lock", "x", 0):
        assert not locks.KeyLock(tmp_path / "lock", "y", 0).try_now()
    assert locks.KeyLock(tmp_path / "lock", "y", 0).try_now()


@pytest.mark.parametrize("content", ["", "12345", '{"pid": 1, "host": "elsewhere", "since": "1999"}'])
def test_a_foreign_lock_file_blocks_nobody(root: Path, gxx: StandIn, cache: Path, content: str) -> None:
    """P6: a file left by whomever is taken for a lock that is held."""
    file = lock_file(cache, root, gxx)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    (cache / "cpp").mkdir()
    (cache / "cpp" / "lock").write_text("")
    assert build(unit(root), gxx.compiler, check=whole, lock_timeout_s=0).path.is_file()


def test_a_held_lock_names_its_holder_and_ends_in_a_typed_error(
    root: Path, gxx: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P7: a silent wait without limit after another process was stopped."""
    monkeypatch.setattr(locks, "NOTICE_S", 0.0)
    gxx.tell("half")
    builder = start(root, gxx)
    gxx.wait_until_half_written()
    with pytest.raises(LockTimeout) as caught:
        build(unit(root), gxx.compiler, check=whole, lock_timeout_s=0.05)
    gxx.let_go()
    builder.communicate(timeout=60)
    for text in (str(caught.value), caplog.text):
        assert f"process {builder.pid} on {socket.gethostname()}" in text
        assert str(lock_file(cache, root, gxx)) in text
    monkeypatch.undo()
    assert locks.NOTICE_S == 5.0


def test_a_compiler_that_hangs_is_ended_with_its_children(root: Path, gxx: StandIn) -> None:
    """P7: a limit that ends the compiler's driver and leaves the compiler running."""
    gxx.tell("half")
    hanging = GxxCompiler(gxx.compiler.command, timeout_s=0.0)
    with pytest.raises(BuildTimeout, match=r"cpp/a: .*after 0 s.*g\+\+"):
        make_artifact(root, hanging)
    gxx.tell("ok")
    assert not make_artifact(root, gxx.compiler).cached


def test_a_process_group_ends_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: a kill of the first process alone; the compiler proper goes on, and holds the pipe's other end."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    # The child's child says that it is there, and holds the pipe until it is killed.
    inner = f"import os, time; os.write({writer}, b's'); time.sleep(1000)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {inner!r}], close_fds=False)"
    original = subprocess.Popen

    def at_the_limit(self: object, timeout: float) -> NoReturn:
        os.close(writer)
        assert os.read(reader, 1) == b"s"  # it has started
        raise subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(original, "communicate", at_the_limit)
    monkeypatch.setattr(subprocess, "Popen", functools.partial(original, close_fds=False))
    with pytest.raises(BuildTimeout, match="after 7 s"):
        run([sys.executable, "-S", "-c", code], timeout_s=7)
    assert os.read(reader, 1) == b""  # end of file: nobody holds the other end
    os.close(reader)


def test_waiters_share_a_failure(root: Path, gxx: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: eight processes compile a broken source eight times, one after the other."""
    gxx.tell("fail")
    everybody = threading.Barrier(4)
    real = store.open_layer

    def together(layer: store.Layer) -> None:
        everybody.wait()  # all have asked before the first compiles
        real(layer)

    monkeypatch.setattr(store, "open_layer", together)

    def one(_: int) -> str:
        with pytest.raises(BuildError) as caught:
            make_artifact(root, gxx.compiler)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        (said,) = set(pool.map(one, range(4)))
    assert "nonsense" in said
    assert len(gxx.calls) == 1
    monkeypatch.undo()
    with pytest.raises(BuildError):  # who asks later compiles again: the cause may be gone
        make_artifact(root, gxx.compiler)
    assert len(gxx.calls) == 2


def test_a_source_edited_while_it_compiles_is_compiled_again(root: Path, gxx: StandIn, cache: Path) -> None:
    """P30: the object of the old text is published under the key of the new one, or the reverse."""
    gxx.tell("half")
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(make_artifact, root, gxx.compiler)
        gxx.wait_until_half_written()
        (root / "include" / "two.h").write_text("#define TWO 9\n")
        gxx.tell("ok")
        gxx.let_go()
        assert "TWO 9" in made.result().path.read_text()
    assert len(gxx.calls) == 2
    assert make_artifact(root, gxx.compiler).cached

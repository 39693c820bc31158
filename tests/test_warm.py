"""A warm Python does what a process of its own would: otherwise tests that use it would prove less than they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm


def python(*args: str, executable: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([executable or warm.executable(), *args], capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print(sys.argv, sys.path[0], __name__); print('x', file=sys.stderr); sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os; os._exit(300)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import sys; print(sys.stdin.read().upper())",
        "import sys; print([(s.encoding, s.errors, s.line_buffering) for s in (sys.stdout, sys.stderr)])",
        "import os; print(sorted(os.environ.items())); print(os.getcwd(), os.umask(0))",
        "import atexit, threading as t\natexit.register(print, 'left')\nt.Thread(target=print, args=('ran',)).start()",
        "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD))",
        "import subprocess, sys; print(subprocess.run(['sh', '-c', 'exit 5']).returncode)",
        "import os; print([number for number in range(3, 64) if os.path.exists(f'/proc/self/fd/{number}')])",
    ],
)
def test_what_is_seen_from_outside_and_inside_is_the_same(code: str, tmp_path: Path) -> None:
    """Catches: an argument, a stream, a variable, a signal or an exit status that is another in a fork."""
    given = {"cwd": tmp_path, "input": "text", "timeout": 60, "env": {**os.environ, "PYTHONPATH": "x", "ODD": "\udcff"}}
    real = python("-c", code, "a", "b c", executable=sys.executable, **given)
    warmed = python("-c", code, "a", "b c", **given)
    assert (warmed.returncode, warmed.stdout) == (real.returncode, real.stdout)
    assert warmed.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize("streams", [">&-", "<&-", "<&- >&- 2>&-", "2>&1 | head -c 1"])
def test_streams_that_are_not_there(streams: str, tmp_path: Path) -> None:
    """Catches: a stream or a complaint where a process of its own has none, and the other way round."""
    told = tmp_path / "told"
    code = (
        f"import os, sys; told = open({str(told)!r}, 'w')\n"
        "print(told.fileno(), sys.stdin, sys.stdout, sys.stderr, sys.__stderr__, file=told, flush=True)\n"
        "for _ in range(20_000): print('many words')"
    )
    seen = []
    for executable in (sys.executable, warm.executable()):
        line = f'{executable} -c "$CODE" {streams}'
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env={**os.environ, "CODE": code})
        seen.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:], told.read_text()))
    assert seen[0] == seen[1]


def test_modules_and_files(tmp_path: Path) -> None:
    """Catches: a module run under its own name, a file whose folder is not on the import path."""
    (tmp_path / "other.py").write_text("WORD = 'hello'")
    file = tmp_path / "it.py"
    file.write_text("import sys, other; print(other.WORD, __name__, __file__, sys.argv)")
    for args in ((str(file), "x"), ("-m", "it", "x")):
        assert python(*args, cwd=tmp_path).stdout == f"hello __main__ {file} {[str(file), 'x']}\n"


def test_nothing_is_left_from_one_to_the_next() -> None:
    """Catches: a module of this package, or a variable, that a process finds because another one had it."""
    code = (
        "import os, sys; print('rapid_llm' in sys.modules, 'SET' in os.environ); import rapid_llm; os.environ['SET']=''"
    )
    for _ in range(2):
        assert python("-c", code).stdout == "False False\n"


def test_signals_arrive_and_a_killed_caller_takes_its_process_with_it(tmp_path: Path) -> None:
    """Catches: an interrupt that the fork never sees; a process that goes on after a test gave it up."""
    code = (
        "import os, time\ntry: print(os.getpid(), flush=True), time.sleep(60)\nexcept KeyboardInterrupt: print('heard')"
    )
    for number, said, status in ((signal.SIGINT, "heard\n", 0), (signal.SIGKILL, "", -signal.SIGKILL)):
        process = subprocess.Popen([warm.executable(), "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert (process.communicate(timeout=30)[0], process.returncode) == (said, status)
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    """Whether the process is there still; one that was just killed is given time to end."""
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


def test_processes_of_its_own(tmp_path: Path) -> None:
    """Catches: a fork that cannot start what multiprocessing starts."""
    (tmp_path / "it.py").write_text(
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(abs, [-3]))\n"
    )
    assert python("it.py", cwd=tmp_path).stdout == "[3]\n"


def test_signals_that_the_caller_ignores() -> None:
    """Catches: a suite started in the background of a shell, which ignores interrupts, whose forks heed them; and a
    fork that ignores what its caller does not."""
    code = "import signal as s; print([s.getsignal(n) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP, s.SIGUSR1)])"
    seen = []
    for executable in (sys.executable, warm.executable()):
        line = f"""trap '' INT HUP; "{executable}" -c '{code}'"""
        seen.append(subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout)
    assert seen[0] == seen[1]
    assert "SIG_IGN" in seen[0]

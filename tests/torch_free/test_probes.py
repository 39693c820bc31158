"""Foreign code cannot harm this process: whatever it does at import becomes the text of a dead row (P33, P34)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rapid_llm.kernels import dispatch, explain, register
from rapid_llm.kernels.registry import probes
from tests import scratch

ROWS = "\ndef fast(input, weight, factor=1.0, out=None): return 'fast'\ndef yes(): return True\n"


def dead(op: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a row whose library does `text` at import; the reason it gets."""
    monkeypatch.syspath_prepend(str(folder))
    scratch.make_module(folder, "wild_library", text + ROWS)
    register(scratch.row("fast/scratch", "wild_library:fast", priority=5))
    scratch.prove("fast/scratch")
    facts = {"device": "cpu", "dtype": "fp32"}
    assert dispatch("scratch", **facts).spec.name == "native/scratch"
    (reason,) = next(r for r in explain("scratch", **facts).json()["rows"] if r["name"] == "fast/scratch")["reasons"]
    assert reason["code"] == "unavailable"
    return str(reason["text"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("assert False, 'needs a GPU of 2031'", "AssertionError: needs a GPU of 2031"),
        ("raise SystemExit('go away')", "SystemExit: go away"),
        ("import os; os._exit(1)", "ended its process with status 1"),
        ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import sys; sys.stderr.write('no arch 7.5 here'); import os; os._exit(3)", "no arch 7.5 here"),
    ],
)
def test_what_an_import_does_becomes_a_text(
    op: str, text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in dead(op, text, tmp_path, monkeypatch)


def test_a_missing_symbol_is_named_an_abi_mismatch_with_both_versions(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P35: a library built against another torch; its metadata says which, the installation says what is here."""
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "wild_library-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wild-library\nVersion: 1.0\nRequires-Dist: pytest==0.1\n"
    )
    (info / "RECORD").write_text("wild_library.py,,\n")
    text = dead(op, "raise ImportError('wild.so: undefined symbol: _ZN3c10')", tmp_path, monkeypatch)
    assert text.startswith(
        f"ABI mismatch: wild_library was built for pytest==0.1; here are pytest {pytest.__version__}."
    )
    assert "undefined symbol: _ZN3c10" in text


def test_a_hang_ends(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 1.0)
    assert "did not answer within 1 s" in dead(op, "import time; time.sleep(60)", tmp_path, monkeypatch)


def test_a_probe_that_says_no_is_quoted(op: str) -> None:
    register(scratch.row("fast/scratch", f"{op}:fast", available=f"{op}:why"))
    assert probes.check(f"{op}:why").text == "the gadget is unplugged"
    assert f"{op}:no() returned False" in probes.check(f"{op}:no").text


def test_an_absent_library_costs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_run_child", lambda *a: pytest.fail("a child was started for an absent library"))
    result = probes.library("no_such_library_anywhere")
    assert (result.ok, result.installed, result.text) == (False, False, "no_such_library_anywhere is not installed")


def test_a_good_answer_is_remembered_until_the_installation_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a child for each start, and a bad answer kept although what it spoke of (a system library that was not
    installed, a driver, time) has come since."""
    monkeypatch.syspath_prepend(str(tmp_path))
    system = tmp_path / "libverbs.so.1"
    text = f"import os\nif not os.path.exists({str(system)!r}): raise ImportError('libverbs.so.1: cannot open')"
    scratch.make_module(tmp_path, "moody_library", text)
    runs = []
    real = probes._run_child
    monkeypatch.setattr(probes, "_run_child", lambda *a: runs.append(a) or real(*a))
    assert "cannot open" in probes.library("moody_library").text
    system.write_text("")
    for _ in range(2):
        probes.forget()  # as a new process would
        assert probes.library("moody_library").ok
    assert len(runs) == 2
    scratch.make_module(tmp_path, "moody_library", "raise ImportError('second version')")
    probes.forget()
    assert "second version" in probes.library("moody_library").text
    assert len(runs) == 3


def test_what_a_library_prints_at_its_exit_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line after the verdict read as part of it: an error out of `dispatch`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch.make_module(tmp_path, "polite_library", "import atexit\natexit.register(print, 'bye')")
    assert probes.library("polite_library").ok


def test_a_signal_without_a_name_is_a_text(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a ValueError of `signal.Signals` out of `dispatch`."""
    assert "was killed by signal 40" in dead(op, "import os; os.kill(os.getpid(), 40)", tmp_path, monkeypatch)


def test_a_user_without_a_home_has_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a RuntimeError of `Path.home()`, as under a container's user that no passwd file knows."""
    for name in ("RAPID_LLM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch.make_module(tmp_path, "homeless_library", "x = 1")
    assert probes.library("homeless_library").ok


@pytest.mark.parametrize("executable", ["", None])
def test_a_python_that_does_not_know_its_file(
    executable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a TypeError in an embedding program; entries of sys.path that are no strings are passed over too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch.make_module(tmp_path, "embedded_library", "x = 1")
    with monkeypatch.context() as patch:
        patch.setattr("sys.path", [*sys.path, 3, b"bytes"])
        assert probes.library("embedded_library").ok
    probes.forget()
    scratch.make_module(tmp_path, "embedded_library", "x = 2  # asked anew")
    monkeypatch.setattr("sys.executable", executable)
    assert "does not know its own file" in probes.library("embedded_library").text


def test_a_read_only_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch.make_module(tmp_path, "plain_library", "x = 1")
    assert probes.library("plain_library").ok


ODD = """
class Untold(Exception):
    def __str__(self): raise RuntimeError("no text")
class Unshown:
    def __bool__(self): return False
    def __repr__(self): raise KeyError("no text")
def available_untold(): raise Untold
def available_unshown(): return Unshown()
"""


@pytest.mark.parametrize(
    ("name", "text"), [("untold", "raised Untold, whose text cannot"), ("unshown", "raised KeyError")]
)
def test_what_cannot_even_be_told_is_a_text(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an error of the error's own text, out of `dispatch`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    scratch.make_module(tmp_path, "odd_library", ODD)
    assert text in probes.call_here(f"odd_library:available_{name}").text

"""`kernels list` and `explain` say what holds here, under what is forced, in the words of the command line."""

from __future__ import annotations

import json
import subprocess

import pytest

from rapid_llm.cli import support
from rapid_llm.platform import has_nvidia
from tests import warm

from .support import call, environment, rapid_llm


def listed(*args: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    rows = json.loads(call("kernels", "list", "--op", "scale", *args, "--json", capsys=capsys).out)
    return {row["name"]: row for row in rows}


@pytest.mark.skipif(has_nvidia(), reason="there is a GPU here")
def test_no_row_runs_on_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: `--device cuda` answered by what a GPU could run, on a machine without one."""
    native = listed("--device", "cuda", capsys=capsys)["native/scale"]
    assert native["admitted"] is False
    assert "no CUDA device" in str(native["reasons"])
    assert listed("--device", "cpu", capsys=capsys)["native/scale"]["admitted"] is True


def test_what_a_variable_forces_is_in_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: rows listed as running here that no call would take."""
    monkeypatch.setenv("RAPID_LLM_SCALE_BACKEND", "jit")
    rows = listed("--device", "cpu", capsys=capsys)
    assert rows["native/scale"]["admitted"] is False
    assert "RAPID_LLM_SCALE_BACKEND forces jit" in str(rows["native/scale"]["reasons"])
    assert "forces" not in str(rows["jit/scale"]["reasons"])
    monkeypatch.setenv("RAPID_LLM_SCALE_BACKEND", "nosuch")
    assert listed("--device", "cpu", capsys=capsys)["native/scale"]["admitted"] is True


def test_a_row_without_a_figure_is_shown_as_unmeasured(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a blank where the rank is, which reads like a fault of the table."""
    lines = call("kernels", "list", "--op", "scale", "--device", "cpu", capsys=capsys).out.splitlines()
    (row,) = (line for line in lines if line.startswith("jit/scale"))
    assert row.split()[1:3] == ["no", "unmeasured"]


def test_fixes_name_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a fix in Python's words that cannot be typed after the command."""
    told = call("kernels", "explain", "linear", "--device", "cpu", "--scheme", "q4_1", capsys=capsys).out
    for option in ("give --dim tokens=N", "give --allow input:bf16", "give --prepack"):
        assert option in told
    assert "allow=(" not in told
    assert "dims={" not in told
    table = call("kernels", "list", "--op", "scale", "--device", "cuda", capsys=capsys).out
    assert "backend=" not in table


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_tokens=0 is not accepted", "--max-tokens 0 is not accepted"),
        ("name it: backend='jit/scale'", "name it: --backend 'jit/scale'"),
        ("run rapid_llm.verify.check_row('a', dtype='fp32') or dtype='x'", "dtype='fp32') or --dtype 'x'"),
        ("RAPID_LLM_SCALE_BACKEND=jit", "RAPID_LLM_SCALE_BACKEND=jit"),
    ],
)
def test_wording(text: str, said: str) -> None:
    """Catches: code to run, or a variable, rewritten as an option."""
    assert support.as_options(text).endswith(said)


@pytest.mark.parametrize("args", ["kernels list", "--help", "--version", "doctor --env", "nosuch"])
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(args: str, closed: str) -> None:
    """Catches: a traceback, or a file opened under the number of a stream that nobody has."""
    command = f"{warm.executable()} -m rapid_llm.cli {args} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment(), timeout=100)
    assert done.returncode == (2 if args == "nosuch" else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_leaves() -> None:
    """Catches: a traceback after `| head -1`."""
    command = f"{warm.executable()} -m rapid_llm.cli kernels list | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment(), timeout=100)
    assert done.stdout.startswith("row ")
    assert done.stderr == ""


def test_bytes_that_are_no_text() -> None:
    """Catches: a surrogate named to whoever sent a byte, in a locale whose input is lenient."""
    for command in (("generate", "-"), ("chat",)):
        done = rapid_llm(*command, stdin=b"ok \xff bad\n", env={"LC_ALL": "C", "PYTHONUTF8": "1"})
        if "fetch" in done.stderr or "download" in done.stderr:
            pytest.skip("the model is not here")
        assert done.returncode == 2, done.stderr
        assert "standard input is not utf-8" in done.stderr


def test_an_empty_model_name() -> None:
    """Catches: '' taken for the current directory."""
    done = rapid_llm("generate", "x", "--model", "")
    assert done.returncode == 2
    assert "the model's name is empty" in done.stderr

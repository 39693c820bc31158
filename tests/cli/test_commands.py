"""The command line from outside: help, exit statuses, what is imported, and the commands that need no model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rapid_llm import settings
from rapid_llm.cli import app_generate as commands
from rapid_llm.models import hub

from .support import call, environment, rapid_llm

COMMANDS = [
    ["generate"],
    ["chat"],
    ["bench"],
    ["serve"],
    ["doctor"],
    ["kernels", "list"],
    ["kernels", "explain"],
    ["kernels", "new"],
    ["kernels", "check"],
    ["kernels", "build"],
    ["kernels", "doctor"],
    ["cache", "list"],
    ["cache", "export"],
    ["cache", "import"],
    ["cache", "verify"],
    ["cache", "gc"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "inspect"],
]


def modules_after(*args: str) -> set[str]:
    """Modules that a command has imported by its end."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from rapid_llm.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["models", "list"], ["doctor", "--env"]])
def test_light_commands_import_nothing_heavy(args: list[str]) -> None:
    """Catches an import at the top of a module that only a handler needs."""
    assert not modules_after(*args) & {"torch", "triton", "numpy", "rich", "tokenizers", "jinja2"}


def test_help_imports_the_command_line_alone() -> None:
    """Catches what the list above misses: `benchmarks.dispatch` has the time, of which modules of this package that
    print no help would be a part."""
    own = {name for name in modules_after("--help") if name.partition(".")[0] == "rapid_llm"}
    assert "rapid_llm.cli.app" in own
    assert {name for name in own if not name.startswith("rapid_llm.cli")} <= {"rapid_llm", "rapid_llm.settings"}


def examples(args: list[str], capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    shown = call(*args, "--help", capsys=capsys)
    assert shown.status == 0
    _, found, text = shown.out.partition("Example:\n")
    assert found, shown.out
    for line in filter(None, map(str.strip, text.splitlines())):
        words = shlex.split(line.rpartition("| ")[2])
        assert words[0] == "rapid-llm", line
        yield words[1:]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_every_example_is_a_command_that_parses(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches help without an example, and an example that an option's new name has broken."""
    ran: list[Any] = []
    for target in (
        *("generate.run", "chat.run", "serve.run", "bench.run"),
        *("doctor.run", "kernels.list_rows", "kernels.explain_op"),
        *("kernels_new.new", "kernels_check.check", "kernels_build.build", "kernels_doctor.doctor"),
        *("models.list_models", "models.pull", "models.inspect"),
        *("cache.list_artifacts", "cache.export", "cache.load", "cache.verify", "cache.gc"),
    ):
        monkeypatch.setattr(f"rapid_llm.cli.{target}", lambda *a, **k: ran.append((a, k)))
    count = 0
    for example in examples(args, capsys):
        assert example[: len(args)] == args
        assert call(*example, capsys=capsys).status == 0, example
        count += 1
    assert len(ran) == count > 0


@pytest.mark.parametrize(
    "args",
    [
        ["--nosuch"],
        ["nosuch"],
        ["generate"],
        ["generate", "x", "--temprature", "1"],
        ["generate", "x", "--max-tokens", "many"],
        ["kernels"],
        ["kernels", "nosuch"],
        ["kernels", "explain", "linear", "--dim", "tokens"],
        ["kernels", "explain", "linear", "--dim", "tokens=-1"],
        ["kernels", "explain", "linear", "--dim", "width=3"],
        ["kernels", "explain", "linear", "--scheme", "q9"],
        ["kernels", "explain", "linear", "--dtype", "fp9"],
        ["kernels", "explain", "linear", "--allow", "weight:fp9"],
        ["kernels", "explain", "linear", "--backend", "nosuch"],
        ["kernels", "explain", "linear", "--device", "tpu"],
        ["kernels", "explain", "nosuch"],
        ["kernels", "list", "--op", "nosuch"],
        ["models", "pull", "nosuch"],
        ["models", "inspect", "nosuch"],
        ["doctor", "extra"],
    ],
    ids=" ".join,
)
def test_usage_errors_are_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a typo that is ignored, a traceback, and an error that goes to standard output."""
    result = call(*args, capsys=capsys)
    assert result.status == 2
    assert "Traceback" not in result.err
    assert "Error" in result.err or "Usage" in result.err + result.out


def test_a_near_miss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'rmsnorm'" in call("kernels", "explain", "rmsnrm", capsys=capsys).err
    assert "smollm2-135m-instruct" in call("models", "inspect", "smollm2", capsys=capsys).err


def test_version() -> None:
    done = rapid_llm("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("rapid-llm ")


def test_kernels_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a change of the fields that scripts read."""
    result = call("kernels", "list", "--json", capsys=capsys)
    rows = json.loads(result.out)
    assert result.status == 0
    assert {"native/rmsnorm", "native/linear.q4_1"} <= {row["name"] for row in rows}
    for row in rows:
        assert set(row) == {"op", "name", "backend", "admitted", "reasons", "priority", "evidence"}
        assert row["admitted"] == (not row["reasons"])
    one = json.loads(call("kernels", "list", "--op", "rmsnorm", "--json", capsys=capsys).out)
    assert one == [row for row in rows if row["op"] == "rmsnorm"]


def test_kernels_list_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a row that is cut or wrapped where the table goes into a pipe."""
    lines = call("kernels", "list", capsys=capsys).out.splitlines()
    assert lines[0].split() == [
        "row",
        "runs",
        "here",
        "rank",
        "evidence",
        "why",
        "not,",
        "and",
        "what",
        "would",
        "admit",
        "it",
    ]
    rows = json.loads(call("kernels", "list", "--json", capsys=capsys).out)
    assert [line.split()[0] for line in lines[1:]] == [row["name"] for row in rows]


def test_kernels_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches facts that are not handed on: each option changes the key."""
    args = ["kernels", "explain", "linear", "--device", "cpu", "--dtype", "bfloat16", "--scheme", "q8_0"]
    args += ["--dim", "tokens=1", "--dim", "in_features=64", "--allow", "weight:bf16", "--prepack"]
    result = call(*args, "--json", capsys=capsys)
    data = json.loads(result.out)
    assert result.status == 0
    assert {"op", "key", "selected", "rows"} <= set(data)
    key = data["key"]
    assert (key["device"], key["dtype"], key["scheme"]) == ("cpu", "bf16", "q8_0")
    assert (key["dims"], key["allow"], key["prepack"]) == ({"tokens": 1, "in_features": 64}, ["weight:bf16"], True)
    for row in data["rows"]:
        assert {"name", "admitted", "reasons", "evidence"} <= set(row)
        assert all(set(reason) == {"code", "text", "fix"} for reason in row["reasons"])
    table = call(*args, "--backend", "native", capsys=capsys).out
    assert "-> native/linear.q8_0" in table


def test_explaining_a_call_that_nothing_can_run_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    result = call("kernels", "explain", "rmsnorm", "--dtype", "int8", capsys=capsys)
    assert result.status == 1
    assert "Fix: convert to" in result.out


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a healthy machine that is declared ill, and sections that are missing from JSON."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    result = call("doctor", "--json", capsys=capsys)
    report = json.loads(result.out)
    assert set(report) == {"facts", "findings", "notes"}
    compiled = {"C++ and CUDA", "compiled kernels", "extension (aot)", "NVRTC"}
    general = {"machine", "torch", "triton", "cache", "threads", "kernels", "environment"}
    assert set(report["facts"]) == general | compiled
    assert result.status == (1 if report["findings"] else 0)
    assert not [f for f in report["findings"] if "cache" in f["what"]]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("RAPID_LLM_FORCE_BAKEND", "native", "did you mean RAPID_LLM_FORCE_BACKEND"),
        ("RAPID_LLM_RMSNORM_BACKEND", "nosuch", "nosuch"),
        ("RAPID_LLM_FORCE_BACKEND", "nativ", "did you mean 'native'"),
        ("RAPID_LLM_STRICT", "perhaps", "RAPID_LLM_STRICT='perhaps': use 1 or 0"),
    ],
)
def test_doctor_finds_wrong_variables(
    variable: str, value: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P53: catches a misspelt or impossible setting that is passed over."""
    monkeypatch.setenv(variable, value)
    result = call("doctor", "--env", capsys=capsys)
    assert result.status == 1
    assert "FINDING" in result.out
    assert says in result.out


def test_doctor_finds_an_unusable_cache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", "/dev/null/cache")
    result = call("doctor", capsys=capsys)
    assert result.status == 1
    assert "/dev/null/cache cannot be written" in result.out


def test_doctor_finds_a_damaged_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    path = hub.model_path(hub.MODELS[hub.DEFAULT_MODEL])
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    result = call("doctor", capsys=capsys)
    assert result.status == 1
    assert "is not the published smollm2-135m-instruct" in result.out


def test_doctor_documents_every_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a variable that works and is not documented, or is documented without what it takes."""
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    text = call("doctor", "--env", capsys=capsys).out
    data = json.loads(call("doctor", "--env", "--json", capsys=capsys).out)["variables"]
    assert [v["name"] for v in data] == [s.name for s in settings.TABLE]
    for setting in settings.TABLE:
        assert setting.name in text
        assert setting.doc in text
    assert {v["name"]: v["value"] for v in data}["RAPID_LLM_STRICT"] == "1"
    assert "Now: 1." in text


def test_models_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model listed as here that isn't, and a list that fetches."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    model, *_ = json.loads(call("models", "list", "--json", capsys=capsys).out)
    assert (model["name"], model["here"], model["path"]) == (hub.DEFAULT_MODEL, False, None)
    assert "smollm2-135m-instruct (default)" in call("models", "list", capsys=capsys).out
    assert list(tmp_path.iterdir()) == []


def test_models_inspect_does_not_fetch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    result = call("models", "inspect", hub.DEFAULT_MODEL, capsys=capsys)
    assert result.status == 1
    assert "rapid-llm models pull smollm2-135m-instruct" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_a_model_that_is_here_is_only_checked(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P43: catches a pull that goes online for what is there; nothing can be fetched without pip."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", None)
    path = hub.model_path(hub.MODELS[hub.DEFAULT_MODEL])
    path.parent.mkdir(parents=True)
    path.symlink_to(model_path)
    result = call("models", "pull", hub.DEFAULT_MODEL, capsys=capsys)
    assert (result.status, result.out) == (0, f"{path}\n")


@pytest.mark.parametrize("data", [b"", b"GGUF", b"PK\x03\x04" * 10, b"GGUF" + b"\xff" * 60])
def test_a_file_that_is_no_model_is_status_1(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback for a damaged file."""
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    for args in (["models", "inspect", str(path)], ["generate", "hi", "--model", str(path)]):
        result = call(*args, capsys=capsys)
        assert result.status == 1
        assert str(path) in result.err
        assert result.out == ""


def test_the_limits_of_the_command_line_are_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """E95: catches a default that help and code state differently."""
    text = " ".join(call("generate", "--help", capsys=capsys).out.split())
    assert f"tokens of answer. [default: {commands.MAX_TOKENS}]" in text
    assert f"[default: {commands.TEMPERATURE}]" in text

"""P33 to P35 for deepgemm, flashmla and deepep: in every way in which a library can fail, the row is out, says why and
what to do, and the floor answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.kernels import dispatch, explain
from rapid_llm.kernels.registry import ForcedRowError, get_row, probes
from tests.kernels.backend.libraries import STAND_INS, VERSIONS, forget, install, on_cpu, reason

ROWS = {
    "deepgemm/linear": ("deep_gemm", "fp8_gemm_nt", "d", "git+https://github.com/deepseek-ai/DeepGEMM"),
    "flashmla/attention.mla_decode": (
        *("flash_mla", "flash_mla_with_kvcache", "head_dim_v"),
        "git+https://github.com/deepseek-ai/FlashMLA",
    ),
    "deepep/comm.dispatch": ("deep_ep", "dispatch", "num_worst_tokens", "git+https://github.com/deepseek-ai/DeepEP"),
    "deepep/comm.combine": ("deep_ep", "combine", "handle", "git+https://github.com/deepseek-ai/DeepEP"),
}
DIMS = {
    "linear": {"in_features": 128, "out_features": 64, "biased": 0},
    "attention.mla_decode": {"page_size": 64, "head_dim": 576, "value_dim": 512},
    "comm.dispatch": {"ranks": 2, "hidden": 256, "topk": 2},
    "comm.combine": {"ranks": 2, "hidden": 256},
}


def facts(op: str) -> dict[str, Any]:
    """A call that the op's external row takes, were it here."""
    scheme = {"scheme": "fp8_block128"} if op == "linear" else {}
    roundings = {"linear": ("input:fp8_block128",), "attention.mla_decode": ("probs:bf16",)}.get(op, ())
    return {"device": "cpu", "dtype": "bf16", "dims": DIMS[op], "allow": roundings, "prepack": True, **scheme}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Path]:
    """A folder on the import path; nothing of it is remembered afterwards."""
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "libraries").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))
    forget()
    yield tmp_path / "libraries"
    forget()


def outcome(row: str) -> dict[str, str]:
    """Why the row is out, forced by name on the CPU as it would be on its GPU."""
    op = get_row(row).op
    with on_cpu(row) as trial:
        assert dispatch(op, **facts(op)).spec.is_native
        with pytest.raises(ForcedRowError):
            dispatch(op, backend=trial.name, **facts(op))
        return reason(explain(op, backend=trial.name, **facts(op)), trial.name)


AT_IMPORT = {
    "import error": ("import no_such_dependency", "ModuleNotFoundError: No module named 'no_such_dependency'"),
    "assertion": ("assert False, 'CUDA_HOME is not set'", "AssertionError: CUDA_HOME is not set"),
    "system exit": ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
    "hard exit": ("import os; os._exit(1)", "ended its process with status 1"),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    "undefined symbol": (
        "raise ImportError('_C.so: undefined symbol: _ZN3c105ErrorC2E')",
        "ABI mismatch",
    ),
}


@pytest.mark.parametrize("failure", AT_IMPORT)
@pytest.mark.parametrize("row", [r for r in ROWS if r != "deepep/comm.combine"])
def test_what_an_import_does(row: str, failure: str, folder: Path) -> None:
    """Catches: a library that takes the process with it, or whose text is lost."""
    module, *_, command = ROWS[row]
    text, expected = AT_IMPORT[failure]
    install(folder, module, text)
    found = outcome(row)
    assert found["code"] == "unavailable"
    assert expected in found["text"]
    assert command in found["fix"]


@pytest.mark.parametrize("row", ROWS)
def test_absent(row: str) -> None:
    """Catches: a missing library that is no reason of its own, or comes without its recipe."""
    module, *_, command = ROWS[row]
    assert outcome(row)["text"] == f"{module} is not installed"
    assert command in outcome(row)["fix"]


@pytest.mark.parametrize("version", ["0.9.9", "7.0", None])
@pytest.mark.parametrize("row", [r for r in ROWS if r != "deepep/comm.combine"])
def test_other_versions_are_not_even_imported(row: str, version: str | None, folder: Path) -> None:
    """Catches: an interface of another time that is called, and an import that could have been spared."""
    module = ROWS[row][0]
    install(folder, module, "raise SystemExit('imported')", version)
    text = outcome(row)["text"]
    assert "imported" not in text
    assert ("no installer's record" in text) if version is None else f"{module} is version {version}" in text


def test_a_hang(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an engine that waits for a library's import without end."""
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.5)
    install(folder, "deep_ep", "import time; time.sleep(60)")
    assert "did not answer within" in outcome("deepep/comm.dispatch")["text"]


CHANGES = ("argument renamed", "function gone", "argument added")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("row", ROWS)
def test_an_interface_that_changed(row: str, change: str, folder: Path) -> None:
    """Catches: a call that fails in the middle of a request because the library moved on; the text names what."""
    module, function, argument, command = ROWS[row]
    source = (STAND_INS / f"{module}.py").read_text()
    start = source.index(f"def {function}(")
    end = source.index("):", start)
    head = source[start:end]
    if change == "argument renamed":
        new, expected = head.replace(f"{argument}", f"{argument}_new", 1), repr(argument)
        if argument == "d":  # the name's first letter alone would hit another word
            new = head.replace(", d,", ", d_new,")
    elif change == "function gone":
        new, expected = head.replace(f"def {function}(", f"def {function}_v2("), "has no"
    else:
        separator = "" if head.rstrip().endswith(",") else ", "
        new, expected = f"{head.rstrip()}{separator} *, stream", "demands an argument 'stream'"
    install(folder, module, source[:start] + new + source[end:])
    found = outcome(row)
    assert found["code"] == "broken"
    assert f"{module} {VERSIONS[module]}" in found["text"]
    assert expected in found["text"]
    assert function in found["text"]
    assert command in found["text"]


@pytest.mark.parametrize("row", ROWS)
def test_a_good_library_is_admitted(row: str, folder: Path) -> None:
    """Catches: a check so strict that it refuses the library as it is; all of the above would then prove nothing."""
    install(folder, ROWS[row][0])
    op = get_row(row).op
    with on_cpu(row) as trial:
        assert dispatch(op, backend=trial.name, **facts(op)).spec is trial

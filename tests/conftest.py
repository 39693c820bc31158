"""What all tests share.

Nothing here imports torch before a test needs it: `tests/torch_free` runs where there is none.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest

from tests import warm
from tests.session_record import SessionRecord

_KEEP = ("RAPID_LLM_CACHE_DIR",)
_ORACLES = ("gguf", "safetensors", "transformers", "uvicorn", "fastapi", "prometheus_client")
"""Packages that only judge, or serve: `make test` installs them, a GPU machine without a network may lack some."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--result-file",
        metavar="FILE",
        help="write machine, versions, and every test's outcome and recorded properties to FILE as JSON; "
        "{machine} in its name becomes the machine's",
    )


def pytest_configure(config: pytest.Config) -> None:
    """A developer's own RAPID_LLM_* settings must not decide what the tests see."""
    for name in list(os.environ):
        if name.startswith("RAPID_LLM_") and not name.startswith("RAPID_LLM_TEST_") and name not in _KEEP:
            del os.environ[name]
            warnings.warn(f"{name} is unset for the tests", stacklevel=1)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background: tests interrupt their children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _stay_on_own_cpus(config)
    if (path := config.getoption("--result-file")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SessionRecord(Path(path)), "session-record")


def _stay_on_own_cpus(config: pytest.Config) -> None:
    """One of several workers (pytest-xdist) keeps to its share of the CPUs: threads of two that spin for each other's
    would take many times as long."""
    worker = getattr(config, "workerinput", None)
    if worker is None or not hasattr(os, "sched_setaffinity"):
        return
    cpus = sorted(os.sched_getaffinity(0))
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    os.sched_setaffinity(0, cpus[number * len(cpus) // count : (number + 1) * len(cpus) // count] or cpus)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module whose oracle is not installed is skipped, and says so; any other failing import stays an error."""
    report = yield
    text = str(report.longrepr) if report.failed else ""
    for name in _ORACLES:
        if f"No module named '{name}'" in text and importlib.util.find_spec(name) is None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {name}, which these tests need, is not installed")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where torch sees no GPU; torch is imported only if there is such a test."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    reason = _no_gpu_reason()
    for item in gpu if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_reason() -> str:
    try:
        import torch
    except ImportError as error:
        return f"needs an NVIDIA GPU, and torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU, and this torch is built without CUDA"
    return "needs an NVIDIA GPU, and torch sees none"


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> str:
    """In place of `sys.executable`: the package's own children, such as those that try foreign code, find torch
    imported."""
    monkeypatch.setattr(sys, "executable", warm.executable())
    return sys.executable


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file: RAPID_LLM_TEST_MODEL, else the cache, else fetched into it.

    Skips if it cannot be had; with RAPID_LLM_TEST_REQUIRE_MODEL=1, which `make test` sets, that is an error.
    """
    if given := os.environ.get("RAPID_LLM_TEST_MODEL"):
        path = Path(given).expanduser()
        if not path.is_file():
            pytest.fail(f"RAPID_LLM_TEST_MODEL={given}: no such file")
        return path
    from rapid_llm.models import hub
    from rapid_llm.models.errors import DownloadError

    try:
        return hub.pull(hub.DEFAULT_MODEL)
    except DownloadError as error:
        if os.environ.get("RAPID_LLM_TEST_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(f"the default model cannot be had: {error}")

"""Libraries that are not here: stand-ins that compute with torch, and broken ones, installed into a folder."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rapid_llm.kernels.registry import KernelSpec, get_row, probes, register, unregister

STAND_INS = Path(__file__).parent / "stand_ins"


def install(folder: Path, module: str, text: str | None = None, version: str | None = "") -> None:
    """Put `module` and, unless version is None, an installer's record into `folder`, which must be on sys.path.

    text: its source; None takes the stand-in. version: '' takes the stand-in's.
    """
    source = (STAND_INS / f"{module}.py").read_text() if text is None else text
    (folder / f"{module}.py").write_text(source)
    for old in folder.glob(f"{module}-*.dist-info"):
        shutil.rmtree(old)
    if version is not None:
        version = version or VERSIONS[module]
        record = folder / f"{module}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n")
        (record / "RECORD").write_text(f"{module}.py,,\n")
    forget()


VERSIONS = {"deep_gemm": "2.1.1+c9f8b34", "flash_mla": "1.0.0+1408756", "deep_ep": "1.2.1+bfded34"}
BACKENDS = ("deepgemm", "flashmla", "deepep")


def forget() -> None:
    """As a new process would: no stand-in is imported, no adapter loaded, no probe asked."""
    for name in list(sys.modules):
        adapter = any(name.startswith(f"rapid_llm.kernels.backend.{b}.") for b in BACKENDS)
        if name.split(".")[0] in VERSIONS or (adapter and not name.endswith(".weight")):
            del sys.modules[name]
    importlib.invalidate_caches()
    probes.forget()


@contextmanager
def on_cpu(name: str) -> Iterator[KernelSpec]:
    """The row `name` registered once more for this test, without its limit to a kind of device."""
    row = get_row(name)
    trial = replace(row, name=f"{row.backend}/{row.op}.trial", devices=("cpu",), capability=())
    register(trial)
    try:
        yield trial
    finally:
        unregister(trial.name)


def reason(explanation: Any, row: str) -> dict[str, str]:
    """The only reason for which `row` is out."""
    (found,) = next(r for r in explanation.json()["rows"] if r["name"] == row)["reasons"]
    return dict(found)

"""External libraries are described, looked for and explained without torch, and without an import of any of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rapid_llm.kernels import explain
from rapid_llm.kernels.registry import get_row

ROOT = Path(__file__).resolve().parents[2]
ROWS = ("deepgemm/linear", "flashmla/attention.mla_decode", "deepep/comm.dispatch", "deepep/comm.combine")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_a_library_that_is_not_here_is_shown(row: str) -> None:
    """Catches: a row that is not listed, or whose limits do not keep it from a device that it has no code for."""
    found = next(r for r in explain(get_row(row).op, device="cpu").json()["rows"] if r["name"] == row)
    assert not found["admitted"]
    assert "device" in {reason["code"] for reason in found["reasons"]}


def test_the_probes_import_nothing() -> None:
    """Catches: torch, or the library, imported by the question whether it is here."""
    code = (
        "import sys\n"
        "from rapid_llm.kernels.backend import deepep, deepgemm, flashmla\n"
        "for library in (deepep, deepgemm, flashmla):\n"
        "    probe = library.available()\n"
        "    assert not probe.ok and not probe.installed and probe.fix == str(library.RECIPE), probe\n"
        "assert not {'torch', 'deep_ep', 'deep_gemm', 'flash_mla'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

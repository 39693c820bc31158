"""Triton comes late where no kernel can run, and then nothing of what was declared before is left behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.kernels.ops import deferred_triton
from rapid_llm.kernels.ops.deferred_triton import Kernel, Name, settle
from tests import warm

ROOT = Path(__file__).resolve().parents[2]

DECLARED = """
@triton.jit
def helper(x):
    return x

@triton.jit(do_not_specialize=["n"])
def kernel(x, n):
    return helper(x)

LIMIT = tl.constexpr(7)
"""


class Jit:
    """What the real `jit` is here: it keeps the function and the options."""

    def __init__(self, function: Any, **options: Any) -> None:
        self.function, self.options = function, options


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The globals of a module that declares kernels while Triton waits."""
    monkeypatch.setattr(deferred_triton, "_kernels", [])
    made: dict[str, Any] = {"__name__": "m", "triton": Name("triton"), "tl": Name("triton", "language")}
    exec(DECLARED, made)
    return made


def test_everything_becomes_real(space: dict[str, Any]) -> None:
    """Catches a helper, a constant or `tl` left as a stand-in: Triton reads them from the kernel's globals."""
    elsewhere = space["kernel"]
    assert isinstance(elsewhere, Kernel)
    language = SimpleNamespace(constexpr=lambda value: ("constexpr", value))
    triton = SimpleNamespace(jit=Jit, language=language)
    settle(triton)
    assert [type(space[name]) for name in ("helper", "kernel")] == [Jit, Jit]
    assert space["kernel"].function.__globals__ is space
    assert space["kernel"].options == {"do_not_specialize": ["n"]}
    assert (space["triton"], space["tl"], space["LIMIT"]) == (triton, language, ("constexpr", 7))
    assert elsewhere.real is space["kernel"]


def test_without_triton_functions_stay_functions(space: dict[str, Any]) -> None:
    """Catches a stand-in that is called where Triton cannot be imported after all."""
    settle(None)
    assert space["helper"](3) == 3
    assert space["kernel"](3, 1) == 3


def test_ops_on_a_cpu_leave_triton_out() -> None:
    """Catches an import of Triton, 80 MB and 0.2 s, by an op on the CPU; and kernels that cannot be had then."""
    pytest.importorskip("triton")
    code = (
        "import sys, torch\n"
        "assert 'triton' not in sys.modules, 'it was there before'\n"
        "if torch.version.cuda or torch.version.hip: raise SystemExit\n"
        "from rapid_llm import kernels\n"
        "with kernels.use_backend('native'): kernels.silu_and_mul(torch.ones(2, 8))\n"
        "assert 'triton' not in sys.modules, 'an op imported it'\n"
        "from rapid_llm.kernels.ops import triton_support\n"
        "triton_support.load()\n"
        "module = sys.modules['rapid_llm.kernels.ops.activation.silu_and_mul']\n"
        "assert 'JITFunction' in {type(v).__name__ for v in vars(module).values()}, vars(module)\n"
        "assert triton_support.triton is sys.modules['triton']\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [warm.executable(), "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr

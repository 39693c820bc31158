"""A third party's package whose rows are faulty: right on square inputs, wrong in a last tile that is not full.

It is installed as users install a plugin, a distribution with an entry point, so that nothing of the test is known to
the package under test but the rows' names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rapid_llm.kernels.registry import plugins, registry
from tests import scratch, warm
from tests.engine.text import tiny as tiny_text
from tests.models import tiny

ROWS = ("acme/rmsnorm", "acme/linear", "acme/silu_and_mul", "acme/silu_and_mul.shy", "acme/silu_and_mul.raising")

SOURCE = '''
import torch
from rapid_llm.kernels import KernelSpec
from rapid_llm.kernels.ops.activation.silu_and_mul import silu_and_mul as right_silu
from rapid_llm.kernels.ops.gemm.linear import linear as right_linear
from rapid_llm.kernels.ops.layernorm.rmsnorm import rmsnorm as right_rmsnorm

TILE = 128

def _tail(size):
    """Columns of the last tile if it is not full and not the only one."""
    return size % TILE if size > TILE else 0

def rmsnorm(input, weight, eps=1e-6, out=None):
    """Forgets the weight in the last tile."""
    tail = _tail(input.shape[-1])
    if tail:
        weight = weight.clone()
        weight[-tail:] = 1
    return right_rmsnorm(input, weight, eps, out)

def linear(input, weight, bias=None, out=None, *, scheme="unquantized"):
    """Sums too little of the last tile."""
    tail = _tail(input.shape[-1])
    if tail:
        input = input.clone()
        input[..., -tail // 4:] = 0
    return right_linear(input, weight, bias, out, scheme=scheme)

def silu_and_mul(input, out=None):
    """Right, and then uses its input as scratch memory."""
    result = right_silu(input, out)
    input.view(-1)[0] = 0
    return result

def shy(input, out=None):
    """Right on copies that do not begin their memory, as a test's often do not; wrong in place."""
    result = right_silu(input, out)
    return result if input.storage_offset() else result.mul_(1.5)

def raising(input, out=None):
    raise IndexError("tile 3 of 2")

def yes():
    return True

def rows():
    schemes = ("unquantized", "q8_0", "q4_0", "q4_1")
    made = [
        KernelSpec(f"acme/{row}", op, "acme", f"acme_planted:{function}", available="acme_planted:yes")
        for row, op, function in (
            ("rmsnorm", "rmsnorm", "rmsnorm"),
            ("silu_and_mul", "silu_and_mul", "silu_and_mul"),
            ("silu_and_mul.shy", "silu_and_mul", "shy"),
            ("silu_and_mul.raising", "silu_and_mul", "raising"),
        )
    ]
    return [*made, KernelSpec("acme/linear", "linear", "acme", "acme_planted:linear", available="acme_planted:yes",
                              schemes=schemes)]
'''


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """The distribution on `sys.path`, found as a first dispatch finds it; gone afterwards."""
    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.syspath_prepend(str(folder))
        m.setattr(sys, "executable", warm.executable())
        m.setattr(plugins, "_plugins", [])
        scratch.make_module(folder, "acme_planted", SOURCE)
        info = folder / "acme_planted-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-planted\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[rapid_llm.kernels]\nacme = acme_planted:rows\n")
        m.setitem(plugins._state, "scanned", False)
        (found,) = plugins.plugins()
        assert found.failure is None, found.failure
        try:
            yield
        finally:
            registry.unregister(*ROWS)


def model(path: Path) -> Path:
    """A tiny model with a tokenizer. hidden is one full tile, wide is one and a half: of all matrices, only `down` has
    a last tile that is not full."""
    entries = tiny_text.metadata()
    shape = replace(tiny.Shape(), hidden=128, wide=192, heads=4, kv_heads=2, head_dim=32)
    shape = replace(shape, vocab=len(entries["tokenizer.ggml.tokens"]), context=512)
    tiny.make(path, shape, quant=tiny.Ggml.Q4_1, entries=entries)
    return path

"""The device code of linear for few rows in other shapes than its launcher chooses, run on the CPU: see emulation/.

Small blocks and few of them: so they walk over several tiles, and a test says what happens at the seams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels.ops.gemm.linear_tiled_jit import pack
from rapid_llm.verify.formats import random_blocks
from rapid_llm.verify.oracles import linear as oracle

from .emulation.units import HERE, compile_unit, copy_sources, precompiled, shared, unavailable

RECORDS = {"q8_0": 3, "q4_0": 4, "q4_1": 5}

pytestmark = pytest.mark.emulated

Run = Callable[..., Tensor]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Calls a kernel: (kind, blocks, weight, input, bias, outputs, early) -> out."""
    if missing := unavailable():
        pytest.skip(f"nothing can be emulated here: {missing}")
    sources, library = tmp_path_factory.mktemp("csrc"), tmp_path_factory.mktemp("emulation") / "linear.so"
    copy_sources(sources)
    done = compile_unit(sources, HERE / "linear.cpp", library, first=precompiled(shared(tmp_path_factory) / "first"))
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).linear_emulated

    def call(
        kind: int, blocks: int, weight: Tensor, input: Tensor, bias: Tensor | None, outputs: int, early: bool
    ) -> Tensor:
        rows, features = input.shape
        guarded = torch.full((rows + 1, outputs), torch.nan, dtype=torch.bfloat16)
        pointers = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (weight, input, bias, guarded)]
        function(kind, blocks, *pointers, outputs, features, rows, int(early))
        assert guarded[rows].isnan().all()
        return guarded[:rows]

    return call


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _assert_close(result: Tensor, **arguments: Tensor | str | None) -> None:
    exact = oracle(**arguments)
    assert not result.isnan().any()
    assert (result.double() - exact).norm() <= 2.0**-8 * exact.norm()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("kind", "outputs", "features", "rows", "blocks"),
    [
        *((0, 33, 64, 3, 3), (0, 40, 520, 8, 1), (0, 16, 8, 1, 1)),
        *((1, 20, 328, 5, 3), (1, 9, 1000, 8, 2)),
        *((2, 9, 37, 7, 2), (2, 3, 1, 2, 1), (2, 5, 0, 1, 1)),
        *((6, 20, 2056, 1, 4), (6, 6, 8, 1, 1), (7, 5, 1288, 1, 3)),
    ],
)
def test_dense(run: Run, kind: int, outputs: int, features: int, rows: int, blocks: int, early: bool) -> None:
    """Catches: operands in another's place, a lost tail of features or outputs, a tile skipped, sums of a past tile."""
    weight, x, bias = _draw(outputs, features), _draw(rows, features), _draw(outputs)
    _assert_close(run(kind, blocks, weight, x, bias, outputs, early), input=x, weight=weight, bias=bias)


@pytest.mark.parametrize("scheme", RECORDS)
@pytest.mark.parametrize(("outputs", "features", "rows", "blocks"), [(5, 32, 1, 1), (33, 160, 3, 2), (24, 512, 8, 2)])
def test_records(run: Run, scheme: str, outputs: int, features: int, rows: int, blocks: int) -> None:
    """Catches: codes, scales or minima that kernel and `pack` place differently, codes not exact in bf16."""
    weight = random_blocks(torch.Generator().manual_seed(outputs), outputs, features, scheme)
    x = _draw(rows, features)
    result = run(RECORDS[scheme], blocks, pack(weight, scheme).records, x, None, outputs, True)
    _assert_close(result, input=x, weight=weight, scheme=scheme)


def test_rows_do_not_depend_on_each_other(run: Run) -> None:
    """Catches: an order of summation that depends on how many rows there are."""
    weight, x = _draw(24, 264), _draw(8, 264)
    together = run(0, 2, weight, x, None, 24, False)
    for row in range(8):
        assert torch.equal(run(0, 2, weight, x[row : row + 1].clone(), None, 24, False)[0], together[row])

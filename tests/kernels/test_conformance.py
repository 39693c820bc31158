"""Every registered row that can run on this machine, over every case of its op.

One test is one row, dtype and scheme; it goes red where the row is wrong for any shape, layout, number or aliasing in
the cases of `rapid_llm.verify.cases`. A fresh record says that the row's very source passed them on this class of CPU
with two seeds; where it is of this torch and of as many cases, they are run with a third seed here, else with both.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.block_formats import DECODED
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import KernelSpec, evidence
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.kernels.registry.records import Proof
from rapid_llm.verify.conformance import SEEDS, check_row, unavailable, variants
from tests import truths

ROWS = [
    pytest.param(row, dtype, scheme, id=f"{row.name}-{dtype}{f'-{scheme}' if scheme else ''}")
    for op in registry.ops()
    for row in registry.rows(op.id)
    for dtype, scheme in variants(op, row)
    # In 16 bits the native rows of these round once more, as they do for other schemes; `kernels verify` runs them.
    if not (op.id == "linear" and scheme in DECODED and dtype != "fp32")
]
ROWS.sort(key=lambda p: (p.values[0].op, str(p.values[2]), p.values[1]))  # rows of the same cases one after another
NOT_INTERPRETED = pytest.mark.skipif(INTERPRETED, reason="test_triton_interpreter runs the interpreter's own set")
THREADED = [p for p in ROWS if not p.values[0].is_native]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Cases are small; threads that wait for each other on a busy machine would multiply the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


KNOWN_WRONG = dict.fromkeys(
    ("flashinfer/attention.prefill", "flashinfer/attention.prefill.fp16"),
    "flashinfer masks by a score of -5e4, which swallows real scores below it; the row stays unproven",
)


def _proof(row: KernelSpec, dtype: str, scheme: str | None) -> Proof | None:
    """What the record of the row as it is says of these cases, on this class of CPU and with this torch."""
    found = evidence.of(row, Facts(row.op, "cpu", None, dtype=dtype, scheme=scheme))
    proof = found.proof if found.state == "record" else None
    good = proof is not None and proof.torch == torch.__version__ and proof.seeds >= len(SEEDS["full"])
    return proof if good else None


def _check(row: KernelSpec, dtype: str, scheme: str | None, device: str, budget: str) -> None:
    if reason := unavailable(row, device):
        pytest.skip(f"{row.name}: {reason}")
    shared = truths.SHARED if device == "cpu" else None
    proof = _proof(row, dtype, scheme) if device == "cpu" and budget == "full" else None
    seeds = None if proof is None else (len(SEEDS["full"]),)
    report = check_row(
        row.op, row.name, device=device, dtype=dtype, scheme=scheme, budget=budget, seeds=seeds, truths=shared
    )
    if proof is not None and proof.cases != report.cases:  # the cases are others than when it was made
        report = check_row(row.op, row.name, device=device, dtype=dtype, scheme=scheme, budget=budget, truths=shared)
    if row.name in KNOWN_WRONG and budget == "full":
        assert not report.ok, f"{row.name} is right now; it was not, because {KNOWN_WRONG[row.name]}"
        pytest.xfail(KNOWN_WRONG[row.name])
    assert report.ok, str(report)


@pytest.mark.skipif(
    INTERPRETED, reason="Triton's interpreter stands in for the CPU path; test_triton_interpreter runs it"
)
@pytest.mark.parametrize(("row", "dtype", "scheme"), ROWS)
def test_row_on_cpu(row: KernelSpec, dtype: str, scheme: str | None) -> None:
    """Would go red if the row were wrong, or wrote, read or returned anything but what the op says."""
    _check(row, dtype, scheme, "cpu", "full")


@pytest.mark.skipif(
    INTERPRETED, reason="Triton's interpreter stands in for the CPU path; test_triton_interpreter runs it"
)
@pytest.mark.parametrize(("row", "dtype", "scheme"), THREADED)
def test_row_on_cpu_with_threads(row: KernelSpec, dtype: str, scheme: str | None) -> None:
    """Would go red if a row that divides its work among threads left some of it undone, or did some twice."""
    torch.set_num_threads(3)
    _check(row, dtype, scheme, "cpu", "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize(("row", "dtype", "scheme"), ROWS)
def test_row_on_gpu(row: KernelSpec, dtype: str, scheme: str | None) -> None:
    """As on the CPU, on the first GPU."""
    _check(row, dtype, scheme, "cuda", "full")

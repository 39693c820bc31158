"""flashinfer's rows on a GPU that has flashinfer: at the sizes it takes, under capture, on other streams and devices.

The ops' own cases run in `test_conformance`, as for every row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rapid_llm.kernels import dispatch, registry
from rapid_llm.kernels.registry import ForcedRowError, KernelSpec
from rapid_llm.verify.conformance import check_callable
from tests.kernels import test_cuda_rows as common
from tests.kernels.gpu_rows import built_rows, need, parameters

pytestmark = pytest.mark.gpu

OWN_CASES = ("attention.decode", "attention.prefill", "rope", "silu_and_mul", "rmsnorm")
WIDE = [row for row in built_rows("flashinfer") if row.op in OWN_CASES]
PLAIN = ("fused_add_rmsnorm", "rmsnorm", "rope", "silu_and_mul")
NUMBERS = [param for param in parameters("flashinfer") if param.values[0].op in PLAIN]
"""Rows that may be captured and whose results are numbers, not a choice."""


@pytest.mark.parametrize("row", WIDE, ids=lambda row: row.name)
def test_row_at_its_own_sizes(row: KernelSpec) -> None:
    """Catches: a limit, a rounding or a layout of flashinfer's that the row does not declare."""
    function, op = need(row), registry.get_op(row.op)
    op = replace(op, cases=f"tests.kernels.backend.flashinfer_cases:{op.function}")
    report = check_callable(op, function, device="cuda", dtype=row.dtypes[0], row=row)
    assert report.ok, str(report)
    assert report.skipped == 0


@pytest.mark.parametrize("row", NUMBERS)
def test_capture_and_replay(row: KernelSpec) -> None:
    """Catches: host work in a row that says it may be captured."""
    common.test_capture_and_replay_with_changed_inputs(row)


@pytest.mark.parametrize("row", NUMBERS)
def test_current_stream(row: KernelSpec) -> None:
    """Catches: a launch, or a plan's upload, on another stream than the current one."""
    common.test_runs_on_the_current_stream(row)


@pytest.mark.parametrize("row", NUMBERS)
def test_device(row: KernelSpec) -> None:
    """Catches (P51): a launcher that sets the current device and leaves it so."""
    common.test_follows_the_tensors_device(row)


@pytest.mark.parametrize("op", ["attention.decode", "attention.prefill"])
def test_a_planning_row_is_not_captured(op: str) -> None:
    """Catches: a synchronisation within a capture, which CUDA answers by failing the whole graph."""
    row = registry.get_row(f"flashinfer/{op}")
    need(row)
    dims = {"head_dim": 128, "tokens": 4, "sequences": 4, "query_heads": 8, "kv_heads": 2, "page_size": 16}
    known = {name: size for name, size in dims.items() if name in registry.get_op(op).dims}
    with pytest.raises(ForcedRowError, match="CUDA graph cannot capture it"):
        dispatch(op, device="cuda", dtype="bf16", dims=known, allow=row.roundings, capturing=True, backend=row.name)


def test_two_streams_keep_their_plans_apart() -> None:
    """Catches: one stream's plan overwritten while another stream's kernel still reads it."""
    row = registry.get_row("flashinfer/attention.decode")
    decode, native = need(row), registry.load_target("native/attention.decode")
    calls = []
    for lengths in ((700, 3), (5, 333), (64, 1000)):
        query = torch.randn(2, 8, 128, device="cuda").bfloat16()
        k_cache, v_cache = torch.randn(2, 128, 16, 2, 128, device="cuda").bfloat16()
        table = torch.randperm(128, device="cuda").int().view(2, 64)
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        calls.append((query, k_cache, v_cache, lens, table, 128**-0.5))
    decode(*calls[0])  # builds
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[torch.Tensor]] = [[] for _ in calls]
    for _ in range(5):
        for stream, call, found in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(decode(*call))
    torch.cuda.synchronize()
    for call, found in zip(calls, results, strict=True):
        for result in found:
            torch.testing.assert_close(result, native(*call), rtol=0.02, atol=0.02)

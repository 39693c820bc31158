"""What every CUDA row of this package must stand beyond plain calls: capture and replay, other streams and devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels.registry import KernelSpec
from tests.kernels.gpu_rows import Call, need, parameters

pytestmark = pytest.mark.gpu


def _dtype(row: KernelSpec) -> str:
    return "bf16" if not row.dtypes or "bf16" in row.dtypes else row.dtypes[0]


@pytest.mark.parametrize("row", parameters())
def test_capture_and_replay_with_changed_inputs(row: KernelSpec) -> None:
    """Catches: a launch on another stream, host values baked into the graph, memory read at capture, not at replay."""
    function = need(row)
    if not row.graph_safe:
        pytest.skip(f"{row.name} declares that a CUDA graph cannot capture it")
    call = Call.of(row, _dtype(row))
    call.run(function)  # builds and loads
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run(function)
    for seed in (1, 2, 3):
        call.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        call.check(result)


FIRST_LAUNCH = """
import torch
from tests.kernels.gpu_rows import Call, need
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import dispatcher, probes
row = registry.get_row({row!r})
function = need(row)
if row.prepare:
    probes.load(row.prepare)(dispatcher.facts_of(row.op, (), {{"device": "cuda:0", "dtype": {dtype!r}}}))
call = Call.of(row, {dtype!r})
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = call.run(function)
call.fill(1)
graph.replay()
torch.cuda.synchronize()
call.check(result)
"""


@pytest.mark.parametrize("row", [p for p in parameters() if p.values[0].op == "scale"])
def test_the_first_launch_of_a_prepared_row_may_be_captured(row: KernelSpec) -> None:
    """Catches (P65): device code that the driver loads at the first launch, where a capture forbids it."""
    need(row)
    code = FIRST_LAUNCH.format(row=row.name, dtype=_dtype(row))
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("row", parameters())
def test_runs_on_the_current_stream(row: KernelSpec) -> None:
    """Catches: a launch on the default stream, which would read the arguments before they are there."""
    function = need(row)
    call = Call.of(row, _dtype(row))
    call.run(function)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the arguments arrive some 25 ms later, in stream order
        call.fill(5)
        result = call.run(function)
    stream.synchronize()
    call.check(result)


@pytest.mark.parametrize("row", parameters())
def test_follows_the_tensors_device(row: KernelSpec) -> None:
    """Catches (P51): device 0 assumed, and a current device that is another one after the call."""
    function = need(row)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    call = Call.of(row, _dtype(row), device="cuda:1")
    with torch.cuda.device(0):
        call.fill(7)
        result = call.run(function)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    call.check(result)

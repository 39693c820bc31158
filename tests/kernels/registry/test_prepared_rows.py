"""Public functions over rows that are built before they are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rapid_llm.kernels as kernels
from rapid_llm.kernels import register
from rapid_llm.kernels.registry import dispatcher
from rapid_llm.kernels.registry.codegen import cache_of
from tests import scratch

MODULE = """
from rapid_llm.kernels.registry import NotReadyError

CALLS = []
CAPTURING = [True]

def built(input, weight, factor=1.0, out=None):
    return "built"

def prepare(facts):
    CALLS.append(facts.device)
    if CAPTURING[0]:
        raise NotReadyError("a CUDA graph is being captured")
"""


def test_a_floor_taken_in_a_capture_is_not_what_later_calls_take(op: str, tmp_path: Path) -> None:
    """Catches (P65): the choice made while nothing could be built kept under the function's own key; and a build
    for each call where the row is ready."""
    name = scratch.make_module(tmp_path, "scratch_prepared", MODULE)
    row = scratch.row("fast/scratch", f"{name}:built", prepare=f"{name}:prepare", available=f"{op}:yes", priority=5)
    register(row)
    scratch.prove("fast/scratch")
    module = __import__(name)
    x, weight = torch.ones(4, 64), torch.ones(64)
    assert [kernels.scratch(x, weight) for _ in range(2)] == ["native", "native"]
    assert len(cache_of("scratch")) == 0
    module.CAPTURING[0] = False
    module.CALLS.clear()
    assert [kernels.scratch(x, weight) for _ in range(3)] == ["built"] * 3
    assert module.CALLS == ["cpu"]


def test_a_floor_taken_while_frozen_is_not_kept_by_a_thaw_that_came_between(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches (P54): a thread that decides while another one thaws, and puts its frozen choice where it stays."""
    text = MODULE.replace("NotReadyError(", "FrozenError(").replace(
        "from rapid_llm.kernels.registry import NotReadyError", "from rapid_llm.kernels import FrozenError"
    )
    name = scratch.make_module(tmp_path, "scratch_thawed", text)
    row = scratch.row("fast/scratch", f"{name}:built", prepare=f"{name}:prepare", available=f"{op}:yes", priority=5)
    register(row)
    scratch.prove("fast/scratch")
    module = __import__(name)
    real = dispatcher.guarded

    def thawed_meanwhile(decision: dispatcher.Decision) -> Any:
        function = real(decision)
        if module.CAPTURING[0]:
            module.CAPTURING[0] = False
            kernels.thaw()
        return function

    monkeypatch.setattr(dispatcher, "guarded", thawed_meanwhile)
    x, weight = torch.ones(4, 64), torch.ones(64)
    assert [kernels.scratch(x, weight) for _ in range(2)] == ["native", "built"]

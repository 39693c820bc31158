"""Triton kernels under freeze() and capture: counted when made, never made when they must not be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from rapid_llm import kernels
from rapid_llm.kernels.ops import triton_support
from rapid_llm.kernels.ops.elementwise import scale as scale_module
from rapid_llm.kernels.registry import NotReadyError, notes, trace
from tests.kernels import triton_standin

pytestmark = pytest.mark.skipif(
    bool(triton_support.MISSING_REASON) or triton_support.INTERPRETED, reason="needs Triton, not its interpreter"
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was compiled, by kernel; `scale` takes its Triton path on the CPU."""
    made = triton_standin.install(monkeypatch)
    monkeypatch.setattr(scale_module, "use_triton", lambda op, tensor: True)
    monkeypatch.setattr(notes, "_notes", {})
    yield made
    kernels.thaw()


def scale(size: int) -> torch.Tensor:
    return scale_module.scale(torch.full((size,), 3.0), 2.0)


def test_each_kind_of_arguments_is_counted_once(compiled: list[str]) -> None:
    """Catches: a count that misses a compile, or that takes a launch for one."""
    before = kernels.compiles()
    for size in (1000, 1001, 999, 1600, 1):  # plain, plain, plain, a multiple of 16, one
        scale(size)
    assert compiled == ["_scale_dense", "_scale_dense", "_scale_strided"]
    assert kernels.compiles() - before == 3


def test_frozen_a_new_kind_of_arguments_goes_through_pytorch(
    compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """P66: a compile while serving; a wrong or silent answer instead; a known kernel that freeze() takes away."""
    scale(1001)
    kernels.freeze()
    before, falls = kernels.compiles(), trace.falls().get("scale", 0)
    scale(999)
    assert trace.falls().get("scale", 0) == falls
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(scale(1600), torch.full((1600,), 6.0))
    assert (len(compiled), kernels.compiles()) == (1, before)
    assert trace.falls()["scale"] == falls + 2
    assert len(caplog.records) == 1
    assert "kernels are frozen" in notes.of("native/scale")[0]
    assert "scale" not in triton_support.broken()
    kernels.thaw()
    scale(1600)
    assert len(compiled) == 2


def test_strict_and_frozen_it_is_a_typed_error(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: strict mode that answers through PyTorch."""
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    kernels.freeze()
    with pytest.raises(kernels.FrozenError, match="_scale_dense is not loaded"):
        scale(10)
    assert compiled == []


def test_in_a_capture_nothing_compiles(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """P65: a compile within a capture, which fails it or, worse, is captured."""
    monkeypatch.setattr(triton_support, "capturing", lambda: True)
    assert torch.equal(scale(10), torch.full((10,), 6.0))
    monkeypatch.setenv("RAPID_LLM_STRICT", "1")
    with pytest.raises(NotReadyError, match="a CUDA graph is being captured"):
        scale(10)
    assert compiled == []


def test_a_path_that_no_graph_captures_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """P65: a PyTorch path that reads the host within a capture, which ends in an error of CUDA that names neither."""
    monkeypatch.setattr(triton_support, "capturing", lambda: True)
    monkeypatch.setattr(notes, "_notes", {})

    def refuse() -> None:
        raise NotReadyError("kernel x is not loaded")

    with pytest.raises(NotReadyError, match="kernel x is not loaded"):
        triton_support.attempt("attention.prefill", refuse)
    assert not triton_support.attempt("attention.decode", refuse)


class Info(NamedTuple):
    """As Triton describes a kernel to its hooks."""

    module: str
    name: str = "kernel"


def test_other_packages_kernels_and_hooks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a foreign kernel that fails because ours are frozen; a profiler's hook that is lost."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_support, "_next_hook", lambda **info: told.append(info))
    before = kernels.compiles()
    kernels.freeze()
    try:
        triton_support.before_build(fn=Info("elsewhere"), key="k")
    finally:
        kernels.thaw()
    assert told == [{"fn": Info("elsewhere"), "key": "k"}]
    assert kernels.compiles() == before

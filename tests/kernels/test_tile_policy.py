"""Tiles: one answer per question, whatever else is asked; limits of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from rapid_llm.kernels.ops import tile_policy
from rapid_llm.kernels.ops.tile_policy import assume_sm, has_native_fp8, resolve_tiles, sm_version, tiles
from rapid_llm.kernels.ops.triton_support import launch


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_policy, "_heuristics", {})
    monkeypatch.setattr(tile_policy, "_resolved", {})

    @tiles("op")
    def _(sm: int, *, rows: int, columns: int) -> Mapping[str, int]:
        return {"BLOCK": sm + 100 * rows + columns}


def test_sm_version_without_a_gpu() -> None:
    """Catches: a CUDA context made, or None returned, for a tensor on the CPU."""
    cpu = torch.device("cpu")
    assert sm_version(cpu) == 80
    assert not has_native_fp8(cpu)
    with assume_sm(90):
        assert sm_version(cpu) == 90
        assert has_native_fp8(cpu)
    assert sm_version(cpu) == 80


@pytest.mark.gpu
def test_sm_version_of_this_gpu() -> None:
    """Catches: major and minor swapped; a bare "cuda" remembered for another device."""
    major, minor = torch.cuda.get_device_capability()
    assert sm_version() == sm_version(torch.device("cuda")) == sm_version(torch.device("cuda:0")) == 10 * major + minor


@pytest.mark.usefixtures("policy")
def test_answers_depend_on_names_and_architecture() -> None:
    """Catches: a memo that confuses two dimensions of equal value, or two architectures."""
    cpu = torch.device("cpu")
    assert resolve_tiles("op", cpu, rows=1, columns=2)["BLOCK"] == 182
    assert resolve_tiles("op", cpu, columns=1, rows=2)["BLOCK"] == 281
    with assume_sm(90):
        assert resolve_tiles("op", cpu, rows=1, columns=2)["BLOCK"] == 192
    with pytest.raises(TypeError):
        resolve_tiles("op", cpu, rows=1, columns=2)["BLOCK"] = 0  # type: ignore[index]


@pytest.mark.usefixtures("policy")
def test_memo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: token counts as dimensions growing the memo for as long as a server runs."""
    monkeypatch.setattr(tile_policy, "MEMO_LIMIT", 10)
    for rows in range(100):
        assert resolve_tiles("op", torch.device("cpu"), rows=rows, columns=0)["BLOCK"] == 80 + 100 * rows
    assert len(tile_policy._resolved) <= 10


@pytest.mark.usefixtures("policy")
def test_mistakes() -> None:
    """Catches: a typo answered with some default; two modules choosing for one op."""
    with pytest.raises(KeyError, match="no tile heuristic for 'opp'; registered: op"):
        resolve_tiles("opp", torch.device("cpu"), rows=1)
    with pytest.raises(TypeError, match="column"):
        resolve_tiles("op", torch.device("cpu"), rows=1, column=1)
    with pytest.raises(ValueError, match="already chosen"):
        tiles("op")(lambda sm: {})


def test_launch_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a kernel for cuda:1 launched on cuda:0, which is current; a needless switch; the switch not undone."""
    current = [0]
    launched = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **meta: launched.append((current[0], grid, args, meta))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    launch(Kernel(), (3,), torch.device("cuda", 1), "x", BLOCK=4)
    launch(Kernel(), (2,), torch.device("cuda", 0), "y")
    launch(Kernel(), (1,), torch.device("cpu"), "z")
    assert launched == [(1, (3,), ("x",), {"BLOCK": 4}), (0, (2,), ("y",), {}), (0, (1,), ("z",), {})]
    assert current == [0]


def test_grid_limits() -> None:
    """Catches: a grid that CUDA refuses, or that wraps, found out only at a size nobody tests."""

    def kernel() -> None:
        raise NotImplementedError

    for grid in ((1, 65_536), (1, 1, 65_536), (2**31,)):
        with pytest.raises(ValueError, match=r"kernel: grid .* exceeds"):
            launch(kernel, grid, torch.device("cpu"))
    launch(kernel, (5, 0), torch.device("cpu"))

"""How big a tile each kernel works on: one place that knows the architecture, so no kernel tunes itself at run time.

An op registers its heuristic with `@tiles("op")`, a pure function of the SM version and named integers; its wrapper
asks `resolve_tiles("op", device, **dims)` and passes the answer to the launch. On a GPU whose records hold tuned tiles
for just these dimensions (`rapid-llm kernels tune`), those are the answer. Answers are memoised and depend on nothing
but these arguments and the records, so the same call compiles the same kernel in every process and on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch

from rapid_llm.kernels.registry import tile_records

ASSUMED_SM: Final = 80
"""The SM version taken where the tensor is on no GPU: the interpreter, and launches recorded for a compile check."""

MEMO_LIMIT: Final = 4096
"""Answers kept; beyond it the memo starts afresh, so that token counts passed as dimensions cannot grow it for ever."""

Tiles = Mapping[str, int]
Heuristic = Callable[..., Tiles]
Choose = Callable[[str, Mapping[str, int], Tiles], Tiles]
"""Of a name, dimensions and the heuristic's answer: the answer to give."""

_heuristics: dict[str, Heuristic] = {}
_resolved: dict[tuple[object, ...], Tiles] = {}
_sm_of: dict[torch.device, int] = {}
_assumed = ASSUMED_SM
_choose: Choose | None = None


def sm_version(device: torch.device | None = None) -> int:
    """The SM version of `device` as 10 * major + minor (H200: 90); `ASSUMED_SM` for a device that is no GPU.

    None means the current CUDA device, or no GPU where there is none.
    """
    if device is None:
        if not torch.cuda.is_available():
            return _assumed
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return _assumed
    sm = _sm_of.get(device)
    if sm is None:
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
        if device.index is not None:  # a bare "cuda" means whichever device is current
            _sm_of[device] = sm
    return sm


def has_native_fp8(device: torch.device | None = None) -> bool:
    """Whether the tensor cores multiply fp8 (Ada, Hopper and later)."""
    return sm_version(device) >= 89


@contextmanager
def assume_sm(sm: int) -> Iterator[None]:
    """Within the block, tensors that are on no GPU get the tiles of SM `sm`: to compile for a GPU that is not here."""
    global _assumed
    previous, _assumed = _assumed, sm
    try:
        yield
    finally:
        _assumed = previous


def tiles(op: str) -> Callable[[Heuristic], Heuristic]:
    """Register `fn(sm, **dims) -> {constexpr or launch option: int}` as the tile heuristic of `op`."""

    def register(fn: Heuristic) -> Heuristic:
        if op in _heuristics:
            raise ValueError(f"tiles of {op!r} are already chosen by {_heuristics[op].__module__}")
        _heuristics[op] = fn
        return fn

    return register


def resolve_tiles(op: str, device: torch.device | None = None, **dims: int) -> Tiles:
    """Tile sizes and launch options for `op` at these dimensions, as keyword arguments of the launch.

    Raises `KeyError` for an op that registered no heuristic, `TypeError` for dimensions that it does not take.
    """
    sm = _sm_of.get(device) or sm_version(device)  # type: ignore[arg-type]
    key = (op, sm, device, *dims.items())
    found = _resolved.get(key)
    if found is None:
        if op not in _heuristics:
            raise KeyError(f"no tile heuristic for {op!r}; registered: {', '.join(sorted(_heuristics)) or 'none'}")
        found = MappingProxyType(dict(_decide(op, sm, device, dims)))
        if len(_resolved) >= MEMO_LIMIT:
            _resolved.clear()
        _resolved[key] = found
    return found


def _decide(op: str, sm: int, device: torch.device | None, dims: Mapping[str, int]) -> Tiles:
    stated = _heuristics[op](sm, **dims)
    if _choose is not None:
        return _choose(op, dims, stated)
    kind, index = ("cpu", None) if device is None else (device.type, device.index)
    if device is None and torch.cuda.is_available():
        kind = "cuda"
    if kind != "cuda":  # records are of what ran on a device, and the tensor is on none
        return stated
    tuned = tile_records.find(op, dims, kind, index)
    return stated if tuned is None or set(tuned.meta) != set(stated) else tuned.meta


def forget() -> None:
    """Ask heuristics and records again."""
    _resolved.clear()


@contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """Within the block `choose` answers, in every thread, instead of the records: for whoever measures tiles."""
    global _choose
    previous, _choose = _choose, choose
    forget()
    try:
        yield
    finally:
        _choose = previous
        forget()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def warps_for(elements: int, *, per_thread: int) -> int:
    """Warps (1 to 16) for a program of `elements`, a power of two, so that each thread holds about `per_thread`."""
    return max(1, min(16, elements // (32 * per_thread)))

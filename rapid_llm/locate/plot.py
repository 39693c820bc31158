"""Error by layer as a picture: a PNG by matplotlib, bars of text without it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .diagnosis import LayerError

WIDTH: Final = 40
"""Characters of a full bar."""


class NoMatplotlibError(ValueError):
    """A PNG was asked for and matplotlib is not installed."""


def bars(layers: Sequence[LayerError]) -> list[str]:
    """A line a layer: what it adds (`#`) and what has gathered (`.`), on one logarithmic scale."""
    finite = [v for e in layers for v in (e.own, e.drift) if 0.0 < v < math.inf]
    if not finite:
        return ["no layer differs"] if all(e.own == e.drift == 0.0 for e in layers) else []
    low, high = math.log10(min(finite)), math.log10(max(finite))
    lines = [f"error by layer, {10**low:.0e} to {10**high:.0e} (logarithmic): # added by the layer, . gathered so far"]
    for e in layers:
        own, drift = _length(e.own, low, high), _length(e.drift, low, high)
        bar = "#" * own + "." * max(0, drift - own)
        lines.append(f"{e.layer:>5} {bar:<{WIDTH}} {e.own:.1e} {e.drift:.1e}")
    return lines


def _length(value: float, low: float, high: float) -> int:
    if value == 0.0:
        return 0
    if math.isinf(value):
        return WIDTH
    return 1 + round((WIDTH - 1) * (math.log10(value) - low) / max(high - low, 1e-9))


def check_png(path: str) -> None:
    """Raise `NoMatplotlibError` where no PNG can be drawn: before the work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlibError(f"--plot {path} needs matplotlib: pip install matplotlib, or leave it out for text")


def png(path: Path, layers: Sequence[LayerError], title: str) -> None:
    """Draw to `path`; `check_png` has been asked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    at = [e.layer for e in layers]
    lines: tuple[tuple[str, list[float], str], ...] = (
        ("added by the layer", [e.own for e in layers], "o-"),
        ("gathered so far", [e.drift for e in layers], "--"),
    )
    for label, values, style in lines:
        axes.plot(at, [_drawn(v) for v in values], style, label=label)
    axes.set(xlabel="layer", ylabel="relative difference", yscale="log", title=title)
    axes.legend()
    _save(figure, path)
    pyplot.close(figure)


def _drawn(value: float) -> float:
    """A logarithmic axis has no 0 and no infinity: a gap."""
    return value if 0.0 < value < math.inf else math.nan


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, format="png", dpi=120)

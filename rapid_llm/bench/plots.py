"""Pictures of a sweep: time and bandwidth over a parameter, and each arm under the roofline of its device.

PNG by matplotlib where it is installed (the `bench` extra), and the roofline as bars on a terminal in any case.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kernel import KernelResult
from .sweep import Benchmark, CaseResult
from .work import amount_text

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 40


def print_roofline(cases: Sequence[CaseResult], environment: dict[str, Any], console: Console) -> None:
    """For each case its arms' shares of what memory gives: a full bar is the ceiling that was measured in this run."""
    measured = [case for case in cases if case.comparison]
    ceiling = environment["calibration"]["bytes_per_second"]
    if not any(r.share for case in measured if case.comparison for r in case.comparison.results.values()):
        return
    console.print(f"share of {amount_text(ceiling, 'B/s')}", style="bold")
    for case in measured:
        console.print(case.title, markup=False)
        for name, result in case.comparison.results.items() if case.comparison else ():
            console.print(f"  {name:<28} {bar(result.share)}", markup=False)


def bar(share: float | None) -> str:
    """A bar of `share` of the width, and the figure."""
    if share is None:
        return "(warm: not from memory)"
    full = min(max(round(share * WIDTH), 0), WIDTH)
    return "█" * full + "·" * (WIDTH - full) + f" {share:.0%}"


def plot_sweep(sweep: Benchmark, cases: Sequence[CaseResult], environment: dict[str, Any], path: Path) -> list[Path]:
    """PNG files beside `path`; none where matplotlib is missing or nothing was measured."""
    measured = [case for case in cases if case.comparison]
    if not measured or importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    made = []
    if any(r.flops_per_second and r.work.bytes for case in measured for r in _results(case).values()):
        made.append(_roofline(sweep, measured, environment, path.with_suffix(".roofline.png")))
    axis = _axis(sweep, measured)
    if axis is not None:
        made.append(_lines(sweep, measured, axis, path.with_suffix(".png")))
    return made


def _axis(sweep: Benchmark, cases: Sequence[CaseResult]) -> str | None:
    """The numeric parameter with the most values, if it has more than one."""
    counts = {
        p.name: len({case.parameters[p.name] for case in cases})
        for p in sweep.parameters
        if all(isinstance(case.parameters[p.name], int) for case in cases)
    }
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] > 1 else None


def _results(case: CaseResult) -> dict[str, KernelResult]:
    return case.comparison.results if case.comparison else {}


def _lines(sweep: Benchmark, cases: Sequence[CaseResult], axis: str, path: Path) -> Path:
    """One panel for each combination of the other parameters, one line an arm, p10 to p90 shaded."""
    from matplotlib import pyplot

    panels: dict[str, list[CaseResult]] = {}
    for case in cases:
        rest = ", ".join(f"{k}={v}" for k, v in case.parameters.items() if k != axis)
        panels.setdefault(rest, []).append(case)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, sharey=True)
    for panel, (rest, members) in zip(axes[0], panels.items(), strict=True):
        members.sort(key=lambda case: case.parameters[axis])
        for name in dict.fromkeys(name for case in members for name in _results(case)):
            having = [case for case in members if name in _results(case)]
            at = [case.parameters[axis] for case in having]
            found = [_results(case)[name].seconds for case in having]
            (line,) = panel.plot(at, [s.median * 1e6 for s in found], marker="o", markersize=3, label=name)
            low, high = [s.p10 * 1e6 for s in found], [s.p90 * 1e6 for s in found]
            panel.fill_between(at, low, high, alpha=0.2, color=line.get_color())
        panel.set(title=rest or sweep.op, xlabel=axis, xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds a call")
    axes[0][-1].legend(fontsize=7)
    return _save(figure, path)


def _roofline(sweep: Benchmark, cases: Sequence[CaseResult], environment: dict[str, Any], path: Path) -> Path:
    """FLOP/s over FLOPs a byte, under the memory ceiling measured in this run and the dtype's nominal peak."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    ceiling = environment["calibration"]["bytes_per_second"]
    points: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        for name, result in _results(case).items():
            if result.work.bytes and result.flops_per_second:
                intensity = result.work.flops / result.work.bytes
                points.setdefault(name, []).append((intensity, result.flops_per_second))
    every = [x for members in points.values() for x, _ in members]
    at = [min(every) / 2 * (4 * max(every) / min(every)) ** (i / 100) for i in range(101)]
    flops = environment["device"]["peaks"]["flops"]
    for label in sorted({r.dtype for case in cases for r in _results(case).values()}):
        roof = [min(x * ceiling, flops.get(label, x * ceiling)) for x in at]
        axes.plot(at, roof, label=f"{label}: {amount_text(ceiling, 'B/s')} measured, {environment['device']['name']}")
    for name, members in points.items():
        axes.scatter(*zip(*members, strict=True), s=14, label=name)
    axes.set(title=f"{sweep.op} on {environment['device']['name']}", xlabel="FLOPs a byte", ylabel="FLOP/s")
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path

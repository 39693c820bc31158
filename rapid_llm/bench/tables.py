"""A sweep's results on a terminal: one table a case, one line an arm, and each refusal with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .kernel import KernelResult
from .sweep import CaseResult
from .work import amount_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"FAST": "green", "SLOW": "red", "SAME": "cyan", "UNDECIDED": "yellow"}
_COLUMNS = ("time", "p10 to p90", "of baseline", "verdict", "memory", "of ceiling", "compute", "")


def print_case(case: CaseResult, line_arg: str, console: Console) -> None:
    """The baseline, which dispatch chooses, stands first and carries a star."""
    from rich.table import Table

    table = Table(title=case.title, title_justify="left")
    table.add_column(line_arg, no_wrap=True)
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading in ("verdict", "") else "right", no_wrap=heading != "")
    if case.comparison is None:
        console.print(f"[bold]{case.title}[/]: refused ({case.code}): {case.failure}", soft_wrap=True)
        return
    comparison = case.comparison
    for name, result in comparison.results.items():
        ratio, word = comparison.ratios[name], comparison.verdict(name)
        own = name == comparison.baseline
        table.add_row(
            f"{name} *" if own else name,
            *_figures(result),
            "" if own else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]".replace("[", "\\["),
            "baseline" if own else f"[{_COLOURS[word]}]{word}[/]",
            *_rates(result),
            " ".join(flags(result)),
        )
    console.print(table)
    control, floor = comparison.control, max(r.floor_seconds for r in comparison.results.values())
    console.print(
        f"  the baseline over itself: {control.median:.3f} ({control.low:.3f} to {control.high:.3f}); "
        f"a call that does nothing: {seconds_text(floor)}",
        style="dim",
    )
    for name, notes in case.notes.items():
        console.print(f"  {name}: note: {'; '.join(notes)}", style="dim", markup=False, soft_wrap=True)
    for name, error in comparison.refused.items():
        console.print(f"  {name}: refused ({error.code}): {error}", style="dim", markup=False, soft_wrap=True)


def _figures(result: KernelResult) -> tuple[str, str]:
    seconds = result.seconds
    return seconds_text(seconds.median), f"{seconds_text(seconds.p10)} to {seconds_text(seconds.p90)}"


def _rates(result: KernelResult) -> tuple[str, str, str]:
    memory, compute, share = result.bytes_per_second, result.flops_per_second, result.share
    return (
        "" if memory is None else amount_text(memory, "B/s"),
        "" if share is None else f"{share:.0%}",
        "" if compute is None else amount_text(compute, "FLOP/s"),
    )


def flags(result: KernelResult) -> list[str]:
    """What a reader must know beside the figure."""
    words = [result.label, *result.flags]
    if result.launches_a_call is not None and result.launches_a_call > 1:
        words.append(f"{result.launches_a_call:g} launches")
    return words


def print_sweep(cases: list[CaseResult], console: Console) -> None:
    """All cases at a glance: a row each, a column an arm, the fastest in green; for sweeps of several cases."""
    from rich.table import Table

    measured = [case for case in cases if case.comparison]
    if len(measured) < 2:
        return
    names = list(dict.fromkeys(name for case in measured if case.comparison for name in case.comparison.results))
    table = Table(title="median time of a call", title_justify="left")
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
    for case in measured:
        found = {n: r.seconds.median for n, r in case.comparison.results.items()} if case.comparison else {}
        best = min(found.values())
        cells = [seconds_text(found[n]) if n in found else "" for n in names]
        marked = [f"[green]{text}[/]" if found.get(n) == best else text for n, text in zip(names, cells, strict=True)]
        table.add_row(case.title, *marked)
    console.print(table)


def print_missing(cases: list[CaseResult], console: Console) -> None:
    """Arms that could not run in any case, once each with the first reason."""
    ran = {name for case in cases if case.comparison for name in case.comparison.results}
    reasons: dict[str, str] = {}
    for case in cases:
        for name, reason in case.missing.items():
            if name not in ran:
                reasons.setdefault(name, reason)
    for name, reason in sorted(reasons.items()):
        console.print(f"  {name}: not measured: {reason.splitlines()[-1].strip()}", style="dim", markup=False)


def environment_text(environment: dict[str, Any]) -> str:
    """One line on the device and on how cold cold was."""
    device, calibration = environment["device"], environment["calibration"]
    reached = amount_text(calibration["bytes_per_second"], "B/s")
    text = (
        f"{device['name']}: cache {device['cache_bytes'] / 1e6:.1f} MB; memory gave {reached} ({calibration['by']}), "
        f"peaks: {device['peaks']['source']}; "
        f"a small copy takes {calibration['ratio']:.2f} times as long cold"
    )
    return text if calibration["cold_is_colder"] else text + " - no proof of coldness, so all is labelled warm"

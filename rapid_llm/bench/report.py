"""A run's figures as a table that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .results import Figure

if TYPE_CHECKING:
    from rich.console import Console


def print_figures(
    title: str, figures: Sequence[Figure], record: dict[str, Any], console: Console | None = None
) -> None:
    """Print one row a figure with its target and verdict, and the state of the machine below."""
    from rich.console import Console
    from rich.table import Table

    out = console if console is not None else Console()
    table = Table(title=title, title_justify="left")
    for heading, justify in (("figure", "left"), ("value", "right"), ("target", "right"), ("verdict", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "figure")  # type: ignore[arg-type]
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}", target_text(figure), verdict_text(figure))
    out.print(table)
    out.print(machine_text(record), style="dim")


def target_text(figure: Figure) -> str:
    parts = []
    if figure.at_most is not None:
        parts.append(f"<= {figure.at_most:g}")
    if figure.at_least is not None:
        parts.append(f">= {figure.at_least:g}")
    return " and ".join(parts)


def verdict_text(figure: Figure) -> str:
    return {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met]


def machine_text(record: dict[str, Any]) -> str:
    """One line on where and how quietly the figures were measured."""
    machine, load = record["machine"], record["load"]["during"]
    others = "load unknown" if load["others"] is None else f"others used {load['others']:.2f} CPUs"
    words = [machine["cpu"]["model"], f"{machine['threads']} threads", others]
    if record["disturbed"]:
        words.append("DISTURBED: other programs ran, read the figures as lower bounds")
    return ", ".join(words)

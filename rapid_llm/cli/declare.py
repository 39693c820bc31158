"""How commands are declared: groups, examples, and the option that all of them share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def group(help_text: str) -> typer.Typer:
    """A group of commands that shows its help when called bare."""
    return typer.Typer(
        help=help_text,
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)

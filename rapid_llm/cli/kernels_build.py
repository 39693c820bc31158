"""`rapid-llm kernels build`: compile rows ahead of their first use, and say how sources are compiled."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .support import BAD, USAGE, fail, print_json

if TYPE_CHECKING:
    from rapid_llm.authoring.builds import Built

_SM = re.compile(r"(?:sm_)?(\d{2,3}|\d{1,2}\.\d)[af]?")


def build(names: list[str], *, sm: list[str], every: bool, compile_commands: Path | None, json: bool) -> None:
    """Build the rows of `names`, or all; status 1 if one fails."""
    from rapid_llm.authoring import builds

    for text in sm:
        if _SM.fullmatch(text) is None:
            fail(f"--sm {text}: use an SM version such as 90 or 9.0", USAGE)
    if compile_commands is not None:
        from rapid_llm.authoring.compile_commands import write

        count = write(compile_commands)
        print(f"{compile_commands}: {count} sources", file=sys.stderr if json else sys.stdout)
        if not names and not every:
            return
    if bool(names) == every:
        fail("name rows, ops or paths to build (jit, nvrtc, cpp, aot), or give --all", USAGE)
    listed = builds.chosen(("jit", "nvrtc", "cpp") if every else names)
    sms = builds.architectures(sm)
    wanted = builds.builds(listed, sms)
    for_gpu = [row.name for row in listed if row.backend in ("jit", "nvrtc")]
    if for_gpu and not sms:
        if not every:
            fail(f"{for_gpu[0]}: no GPU is here, so say for which to build: --sm 90", USAGE)
        print("no GPU is here: rows for CUDA are left out; --sm 90 builds them for that one", file=sys.stderr)
    if not wanted:
        fail(f"nothing to build: {', '.join(names)} has no compiled row", USAGE)
    named = {name.partition("/")[0] for name in names}
    skip = [path for path in builds.PATHS if path not in named]
    results = builds.run(wanted, lambda built: None if json else _show(built), skip=skip)
    if json:
        print_json([dataclasses.asdict(built) for built in results])
    failed = [built for built in results if built.status == "failed"]
    if not json:
        skipped = {built.name.partition("/")[0]: built.text for built in results if built.status == "skipped"}
        for path, text in skipped.items():
            print(f"skipped  {path}: {text}")
        counts = [f"{sum(b.status == s for b in results)} {s}" for s in ("built", "cached", "skipped", "failed")]
        print(", ".join(counts))
    if failed:
        raise typer.Exit(BAD)


def _show(built: Built) -> None:
    shown = ", ".join(built.rows[:3]) + (f" and {len(built.rows) - 3} more" if len(built.rows) > 3 else "")
    print(f"{built.status:<6}  {built.seconds:6.2f} s  {built.name} {built.arch}  for {shown}", flush=True)
    for line in (built.text or built.path).splitlines():
        print(f"    {line}")

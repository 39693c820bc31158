"""`rapid-llm kernels check`: the conventions of kernels, each finding with its place, its reason and its fix."""

from __future__ import annotations

from pathlib import Path

import typer

from .support import BAD, USAGE, fail, print_json


def check(paths: list[Path], *, json: bool) -> None:
    """Check the project that `paths` belong to; status 1 if there is a finding."""
    from rapid_llm.authoring.check import check as run
    from rapid_llm.authoring.findings import shown
    from rapid_llm.authoring.request import AuthoringError, checkout, is_checkout

    if not paths:
        here = Path.cwd().resolve()
        paths = [checkout() if is_checkout(checkout()) and here.is_relative_to(checkout()) else here]
    try:
        done = run(paths)
    except AuthoringError as error:
        fail(error, USAGE)
    if json:
        findings = [finding.json(done.root) for finding in done.findings]
        data = {"root": str(done.root), "files": done.files, "rows": done.rows, "notes": list(done.notes)}
        print_json({**data, "findings": findings})
    else:
        for found in done.findings:
            print(f"{shown(found.path, Path.cwd())}:{found.line}: {found.rule}: {found.text}. Fix: {found.fix}")
        for note in done.notes:
            print(f"note: {note}")
        count = "1 finding" if len(done.findings) == 1 else f"{len(done.findings)} findings"
        print(f"{done.files} files, {done.rows} rows, {count}")
    if done.findings:
        raise typer.Exit(BAD)

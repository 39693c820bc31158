"""`rapid-llm kernels new`: a kernel's files, ready to run, to be filled with its arithmetic."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from .support import USAGE, fail, print_json


def new(
    op: str,
    *,
    group: str | None,
    path: str,
    why: str | None,
    into: Path | None,
    library: str | None,
    variant: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    """Write the scaffold, or with `dry_run` only list it; then say what to type next."""
    from rapid_llm.authoring import request as asked
    from rapid_llm.authoring.plan import Plan
    from rapid_llm.authoring.scaffold import plan

    try:
        made = asked.request(
            op, group=group, path=path, why=_why(path, why, asked.PATHS), into=into, library=library, variant=variant
        )
        what: Plan = plan(made)
        if not dry_run:
            what.write()
            _tidy([*what.files, *what.edits])
    except asked.AuthoringError as error:
        fail(error, USAGE)
    notes = [] if dry_run or not made.in_checkout else _write_docs(made.root)
    files = [str(path) for path in what.files]
    edits = [str(path) for path in [*what.edits, *([made.root / "docs" / "ops.md"] if made.in_checkout else [])]]
    if json:
        print_json(
            {
                "row": made.row,
                "place": "checkout" if made.in_checkout else "package",
                "root": str(made.root),
                "dry_run": dry_run,
                "files": files,
                "edits": edits,
                "next": what.commands,
            }
        )
        return
    place = "this checkout" if made.in_checkout else f"a package of its own, {made.package}"
    print(f"{made.row} in {place} ({made.root}){': nothing is written, this would be' if dry_run else ''}")
    for word, listed in (("new ", files), ("edit", edits)):
        for file in listed:
            print(f"  {word}  {os.path.relpath(file, made.root)}")
    for note in notes:
        print(f"note: {note}")
    print("next:")
    for command in what.commands:
        print(f"  {command}")


def _why(path: str, given: str | None, known: tuple[str, ...]) -> str:
    """Why the kernel isn't Triton, asked for where somebody can answer."""
    if path == "triton" or path not in known:  # of a path that there is not, the request says so
        return ""
    text = (given or "").strip()
    if not text and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"A kernel that isn't Triton says why. Why is this one {path}? ", end="", file=sys.stderr, flush=True)
        text = sys.stdin.readline().strip()
    if not text:
        example = '--why "needs inline PTX for ..."'
        fail(f"--path {path}: a kernel that isn't Triton says why in its source; give {example}", USAGE)
    return text


def _tidy(paths: list[Path]) -> None:
    """Lines broken and imports sorted as the linter has it, which depends on how long the names are."""
    if importlib.util.find_spec("ruff") is None:
        return
    python = [str(path) for path in paths if path.suffix == ".py"]
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        linter = [sys.executable, "-m", "ruff", *command, "--no-cache", "-q"]
        subprocess.run([*linter, *python], capture_output=True, check=False)


def _write_docs(root: Path) -> list[str]:
    """Bring the generated pages up to date; a failure is a note, the scaffold stands."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, root / "docs" / "generate.py"], capture_output=True, text=True, env=env)
    if done.returncode == 0:
        return []
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return [f"docs/ops.md could not be written ({reason}); run make docs"]

"""`rapid-llm cache`: the kernels that were compiled on this machine. Imports no torch and compiles nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from .support import BAD, USAGE, fail, print_json, print_table, size


def list_artifacts(*, json: bool) -> None:
    """Print every artifact of every layer."""
    from rapid_llm.kernels.build import upkeep

    records = upkeep.artifacts()
    states = upkeep.states(records)
    listed: list[dict[str, Any]] = [
        {
            "path": r.path,
            "name": r.name,
            "key": r.key,
            "arch": r.arch,
            "bytes": r.size,
            "age_s": round(max(0.0, time.time() - r.created)),
            "unused_s": round(max(0.0, time.time() - upkeep.last_used(r))),
            "seconds": r.seconds,
            "layer": r.layer,
            "state": states[r.folder],
            "file": str(r.file),
        }
        for r in records
    ]
    if json:
        print_json(listed)
        return
    print_table(
        ("kernel", "key", "for", "size", "age", "built in", "layer", "state"),
        (
            (
                f"{a['path']}/{a['name']}",
                a["key"][:12],
                a["arch"],
                size(a["bytes"]),
                _age(a["age_s"]),
                f"{a['seconds']:.1f} s",
                a["layer"],
                a["state"],
            )
            for a in listed
        ),
    )


def export(file: Path, *, name: str | None, force: bool) -> None:
    """Write all artifacts, or those of one name, to a tar file."""
    from rapid_llm.kernels.build import archive, upkeep

    if file.exists() and not force:
        fail(f"{file} exists; choose another name, or give --force", USAGE)
    if not file.parent.is_dir():
        fail(f"there is no folder {file.parent} to write {file.name} to; make it, or choose another", USAGE)
    records = upkeep.artifacts()
    chosen = [r for r in records if name is None or name in (r.name, f"{r.path}/{r.name}") or r.key.startswith(name)]
    if not chosen:
        known = sorted({f"{r.path}/{r.name}" for r in records})
        fail(f"nothing to export{'' if name is None else f' named {name}'}; here are: {', '.join(known) or 'none'}")
    unique = {(r.path, r.name, r.key): r for r in reversed(chosen)}  # of one key in two layers, the first
    archive.export(list(unique.values()), file)
    print(f"{file}: {len(unique)} of {len(records)} artifacts, {size(file.stat().st_size)}")


def load(file: Path) -> None:
    """Bring the artifacts of a tar file into this user's cache."""
    from rapid_llm.kernels.build import archive

    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist" if not file.exists() else "is no regular file"
        fail(f"{file} {what}; name a file that `rapid-llm cache export FILE` wrote", USAGE)
    added, known = archive.load(file)
    for key in added:
        print(f"added {key}")
    print(f"{len(added)} added, {len(known)} were here")


def verify(*, json: bool) -> None:
    """Compare every artifact with its digest; status 1 if one differs."""
    from rapid_llm.kernels.build import upkeep

    bad = upkeep.faults()
    good = len({record.folder for record in upkeep.artifacts()} - {folder for folder, _ in bad})
    if json:
        print_json({"good": good, "bad": [{"folder": str(f), "fault": text} for f, text in bad]})
    else:
        for folder, text in bad:
            print(f"bad: {folder}: {text}")
        print(f"{good} good, {len(bad)} bad")
        if bad:
            print("take the bad ones away with: rapid-llm cache gc")
    if bad:
        raise typer.Exit(BAD)


def gc(*, older_than: float | None, newest_only: bool, dry_run: bool, json: bool) -> None:
    """Take away left-overs, and what the options name."""
    from rapid_llm.kernels.build import upkeep

    if older_than is not None and older_than < 0:
        fail(f"--older-than {older_than:g}: use a number of days of at least 0", USAGE)
    removed = upkeep.gc(older_than_days=older_than, newest_only=newest_only, dry_run=dry_run)
    total = sum(r.size for r in removed)
    if json:
        print_json(
            {
                "dry_run": dry_run,
                "bytes": total,
                "removed": [
                    {"kind": r.kind, "path": str(r.path), "bytes": r.size, "reason": r.reason} for r in removed
                ],
            }
        )
        return
    for r in removed:
        print(f"{r.kind} {r.path}: {r.reason}")
    verb = "would be" if dry_run else "was" if len(removed) == 1 else "were"
    print(f"{len(removed)} {verb} taken away, {size(total)}")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

"""`rapid-llm kernels doctor`: what compiled kernels need here, and what is wrong with it."""

from __future__ import annotations

import typer

from .support import BAD, print_json, print_pairs


def doctor(*, json: bool) -> None:
    """Print the diagnosis; status 1 if there is a finding."""
    from rapid_llm.authoring.diagnosis import diagnose

    found = diagnose()
    findings = [{"what": what, "fix": fix} for what, fix in found.findings]
    if json:
        print_json({"facts": found.facts, "findings": findings, "notes": found.notes})
    else:
        for name, section in found.facts.items():
            print(name)
            print_pairs((f"  {key}", value) for key, value in section.items())
        for note in found.notes:
            print(f"note: {note}")
        for finding in findings:
            print(f"FINDING: {finding['what']}. Fix: {finding['fix']}")
        if not findings:
            print("no findings")
    if findings:
        raise typer.Exit(BAD)

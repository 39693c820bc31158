"""`rapid-llm kernels lock`: decisions pinned in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .support import BAD, USAGE, fail, print_json

if TYPE_CHECKING:
    from rapid_llm.kernels.registry.dispatcher import Decision
    from rapid_llm.kernels.registry.facts import Facts


def export(file: Path, *, trace: Path | None, model: str | None, dtype: str, device: str, json: bool) -> None:
    """Decide for the calls of a trace or a model, and write what was decided."""
    from rapid_llm.kernels.registry import lockfile

    if (trace is None) == (model is None):
        fail("give --trace or --model: whose decisions?", USAGE)
    lock = lockfile.export(_of_trace(trace) if trace is not None else _of_model(str(model), dtype, device), str(file))
    if not lock.entries:
        fail("no decision to pin: every row was forced by name, or nothing was called")
    lockfile.write(lock, file)
    if json:
        print_json({"file": str(file), "decisions": len(lock.entries)})
    else:
        print(f"{len(lock.entries)} decisions written to {file}")


def _of_trace(path: Path) -> list[Decision]:
    import json

    try:
        keys: list[dict[str, Any]] = [entry["key"] for entry in json.loads(path.read_text())["decisions"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"--trace {path}: not a trace that RAPID_LLM_TRACE wrote ({error})", USAGE)
    return [_settle(_facts(key)) for key in keys]


def _of_model(model: str, dtype: str, device: str) -> list[Decision]:
    from .generate import make_llm

    llm = make_llm(model, {"dtype": dtype, "device": device})
    return [handle.decision for _, _, handle in llm.bindings()]


def _facts(key: Mapping[str, Any]) -> Facts:
    """The facts of a traced call, on this machine."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import dispatcher

    stated = {name: value for name, value in key.items() if name not in ("op", "sm")}
    return dispatcher.facts_of(key["op"], (), stated)


def _settle(facts: Facts) -> Decision:
    from rapid_llm.kernels.registry import dispatcher, overrides, plugins

    plugins.scan()
    dispatcher.notice_environment()
    return dispatcher.settle(facts, overrides.current(facts.op))


def replay(file: Path, *, json: bool) -> None:
    """Decide every call of the file with its rows pinned; status 1 if one of them does not hold."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import lockfile

    lock = lockfile.load(file)
    wrong = lockfile.replay(lock, _settle)
    if json:
        print_json({"file": str(file), "decisions": len(lock.entries), "wrong": wrong})
    else:
        for text in wrong.values():
            print(text)
        print(f"{len(lock.entries) - len(wrong)} of {len(lock.entries)} decisions hold here")
    if wrong:
        raise typer.Exit(BAD)


def diff(file: Path, other: Path | None, *, json: bool) -> None:
    """Print what differs; status 1 if anything does."""
    import rapid_llm.kernels  # noqa: F401 - declares the ops
    from rapid_llm.kernels.registry import lockfile

    one = lockfile.load(file)
    two = lockfile.load(other) if other is not None else lockfile.export(_decided(one), "here")
    found = lockfile.differences(one, two)
    if json:
        print_json([{"call": d.title, "here": d.here, "there": d.there, "text": str(d)} for d in found])
    else:
        for difference in found:
            print(difference)
        print(f"{len(found)} differences in {len({*one.entries, *two.entries})} decisions")
    if found:
        raise typer.Exit(BAD)


def _decided(lock: Any) -> Iterable[Decision]:
    """What dispatch chooses for the calls of a lock on this machine; a call that no row can take is left out."""
    from rapid_llm.kernels.registry import KernelError

    for entry in lock.entries.values():
        try:
            yield _settle(entry.facts)
        except KernelError:  # then it is missing on one side, which the comparison shows
            continue

"""What tools say of themselves, kept on disk until one of the files that say it changes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rapid_llm import settings

from .digests import text_digest, write_quietly

_memo: Final[dict[str, tuple[list[str], list[str]]]] = {}


def remembered(
    question: str,
    command: Sequence[str],
    ask: Callable[[], list[str]],
    behind: Callable[[list[str]], Sequence[str]] = lambda answer: (),
) -> list[str]:
    """The answer of `ask()`, kept under the files of `command`: paths as resolved, sizes, times.

    `behind(answer)` names further files that the answer depends on: the tool that a wrapper starts.
    """
    found = [os.path.realpath(path) for word in command if (path := shutil.which(word))]
    name = text_digest(question, *command, *found, length=24)
    file = settings.cache_dir() / "builds" / "digests" / f"{question}-{name}.json"
    known = _memo.get(str(file)) or _recall(file)
    if known is not None and known[0] == _stamps([*found, *behind(known[1])]):
        _memo[str(file)] = known
        return known[1]
    answer = ask()
    stamps = _stamps([*found, *behind(answer)])
    _memo[str(file)] = (stamps, answer)
    write_quietly(file, json.dumps({"stamps": stamps, "answer": answer}))
    return answer


def _recall(file: Path) -> tuple[list[str], list[str]] | None:
    try:
        kept = json.loads(file.read_text())
        return [str(s) for s in kept["stamps"]], [str(a) for a in kept["answer"]]
    except (OSError, ValueError, KeyError, TypeError):  # absent or damaged: asked again
        return None


def _stamps(paths: Sequence[str]) -> list[str]:
    found = []
    for path in paths:
        try:
            state = os.stat(path)
            found.append(f"{path}:{state.st_size}:{state.st_mtime_ns}")
        except OSError:
            found.append(f"{path}:absent")
    return found

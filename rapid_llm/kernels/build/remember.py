"""What tools say of themselves, kept on disk until one of the files that say it changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Final

from .digests import recall, remember, text_digest

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
    name = f"{question}-{text_digest(question, *command, *found, length=24)}"
    known = _memo.get(name) or _recall(name)
    if known is not None and known[0] == _stamps([*found, *behind(known[1])]):
        _memo[name] = known
        return known[1]
    answer = ask()
    stamps = _stamps([*found, *behind(answer)])
    _memo[name] = (stamps, answer)
    remember(name, {"stamps": stamps, "answer": answer})
    return answer


def _recall(name: str) -> tuple[list[str], list[str]] | None:
    try:
        kept = recall(name)
        return [str(s) for s in kept["stamps"]], [str(a) for a in kept["answer"]]
    except (KeyError, TypeError):  # absent or damaged: asked again
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

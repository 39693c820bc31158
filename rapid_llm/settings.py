"""Every environment variable of the package: typed, documented, read in one place.

Values are read from the environment when asked for. Dispatch takes them at its first decision and again at every
explicit `dispatch` or `explain`; a public op function that has already decided for the same arguments does not look
again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

PREFIX: Final = "RAPID_LLM_"


class SettingError(ValueError):
    """An environment variable holds a value that it does not take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: its name, the values it takes, what holds while it is unset, and what it does."""

    name: str
    takes: str
    default: str
    doc: str


TABLE: Final = (
    Setting(
        "RAPID_LLM_BUILD_EXT",
        "1 or 0",
        "0",
        "Read when the package is installed: 1 builds the CUDA extension rapid_llm._C with it.",
    ),
    Setting(
        "RAPID_LLM_CACHE_DIR",
        "a directory",
        "$XDG_CACHE_HOME/rapid_llm, else ~/.cache/rapid_llm",
        "Where models, compiled kernels and remembered probe results are kept.",
    ),
    Setting(
        "RAPID_LLM_FORCE_BACKEND",
        "a backend, such as native or torch",
        "unset",
        "Every op that has rows of this backend runs one of them, or fails with the reasons.",
    ),
    Setting(
        "RAPID_LLM_<OP>_BACKEND",
        "a backend or a row name",
        "unset",
        "The same for one op, whose dots become underscores: RAPID_LLM_ATTENTION_DECODE_BACKEND=native.",
    ),
    Setting(
        "RAPID_LLM_JIT",
        "auto or off",
        "auto",
        "off: no kernel is compiled on this machine, and rows that would need it are out.",
    ),
    Setting(
        "RAPID_LLM_LOCK",
        "a file",
        "unset",
        "Run the rows that this file of `rapid-llm kernels lock export` pins; what it pins and is not so is an error.",
    ),
    Setting(
        "RAPID_LLM_STRICT",
        "1 or 0",
        "0",
        "A fall to the native floor because a faster row is missing or broken is an error, not a warning.",
    ),
    Setting(
        "RAPID_LLM_TRACE",
        "a file",
        "unset",
        "Write every decision (op, row, shape, count) as JSON to this file when the process ends.",
    ),
)


def cache_dir() -> Path:
    """The cache directory; not created here."""
    from pathlib import Path  # here and below, because it would be a tenth of the package's import

    text = os.environ.get("RAPID_LLM_CACHE_DIR")
    if text:
        return _path("RAPID_LLM_CACHE_DIR", text)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rapid_llm"


def strict() -> bool:
    """Whether a fall to the floor is an error."""
    return _flag("RAPID_LLM_STRICT")


def jit() -> str:
    """`auto` (kernels may be compiled on first use) or `off`."""
    text = os.environ.get("RAPID_LLM_JIT", "").strip().lower() or "auto"
    if text not in ("auto", "off"):
        raise SettingError(f"RAPID_LLM_JIT={text!r}: use auto or off")
    return text


def trace_file() -> Path | None:
    """Where the decision trace goes, or None."""
    text = os.environ.get("RAPID_LLM_TRACE")
    return _path("RAPID_LLM_TRACE", text) if text else None


def lock_file() -> Path | None:
    """The file of pinned decisions, or None."""
    text = os.environ.get("RAPID_LLM_LOCK")
    return _path("RAPID_LLM_LOCK", text) if text else None


def op_variable(op_id: str) -> str:
    """The variable that forces a backend for one op."""
    return f"{PREFIX}{op_id.replace('.', '_').upper()}_BACKEND"


def forced_backend(op_id: str) -> tuple[str, str] | None:
    """(backend or row name, the variable that says so) for an op, the op's own variable first; None if unset."""
    for variable in (op_variable(op_id), "RAPID_LLM_FORCE_BACKEND"):
        value = os.environ.get(variable, "").strip()
        if value:
            return value, variable
    return None


def snapshot() -> tuple[tuple[str, str], ...]:
    """Every `RAPID_LLM_*` variable that is set, to notice a change."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(PREFIX)))


def unknown(op_ids: Iterable[str]) -> list[tuple[str, str | None]]:
    """Set `RAPID_LLM_*` variables that mean nothing, each with the nearest known name or None."""
    known = [s.name for s in TABLE if "<" not in s.name] + [op_variable(op) for op in op_ids]
    found: list[tuple[str, str | None]] = []
    for name, _ in snapshot():
        if name not in known and not name.startswith("RAPID_LLM_TEST_"):
            import difflib  # only a misspelling pays for it

            bare = {other.removeprefix(PREFIX): other for other in known}  # what all share says nothing
            nearest = difflib.get_close_matches(name.removeprefix(PREFIX), bare, n=1, cutoff=0.6)
            found.append((name, bare[nearest[0]] if nearest else None))
    return found


def _path(name: str, text: str) -> Path:
    from pathlib import Path

    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~ of a user that there is not
        raise SettingError(
            f"{name}={text!r}: {text.split('/')[0]} is no user's home; write the path in full"
        ) from error


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise SettingError(f"{name}={text!r}: use 1 or 0")

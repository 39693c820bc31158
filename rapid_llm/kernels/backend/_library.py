"""An external library as data: where it is had, which versions are taken, and which of its functions are called how.

`Library.probe()` tries the library without letting it harm this process. `Library.function()` imports one function and
holds its signature against the call that an adapter makes, so that an argument renamed upstream is a row that is out
with that argument's name, never a `TypeError` in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Final

from rapid_llm.kernels.registry import probes
from rapid_llm.kernels.registry.probes import Probe

_RELEASE: Final = re.compile(r"^\s*v?(?:\d+!)?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc|alpha|beta|pre|dev))?", re.IGNORECASE)
_DOCSTRING: Final = re.compile(r"^\w+\((?P<parameters>.*)\)\s*(?:->.*)?$")

_Version = tuple[tuple[int, ...], bool]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a library is installed. command: a shell command. url: where its own instructions are. notes: what else it
    needs, a sentence each."""

    command: str
    url: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.command} ({'; '.join((*self.notes, self.url))})"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that an adapter makes. target: `module:attr`, `module:Class` or `module:Class.method`.

    positional: the upstream names of the arguments passed by position, in order, without `self`; `a|b` where releases
    differ in the name alone. keywords: those passed by name.
    """

    target: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Library:
    """One external library. module: what is imported. distributions: the names it is installed under, any of them.

    Versions from `minimum` on and below `below` are taken; None is no bound. calls: name -> what adapters call.
    """

    module: str
    distributions: tuple[str, ...]
    minimum: str | None
    below: str | None
    recipe: Recipe
    calls: Mapping[str, Call]

    @property
    def bounds(self) -> str:
        """The versions taken, in words that pip understands."""
        parts = [f">={self.minimum}"] if self.minimum else []
        parts += [f"<{self.below}"] if self.below else []
        return ",".join(parts) or "any version"

    def version(self) -> str | None:
        """The installed version, without an import; None where no installer's record tells."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def probe(self) -> Probe:
        """Whether the library is here, of a version that is taken, and imports in a child process."""
        if not probes.installed(self.module):
            return Probe(False, f"{self.module} is not installed", installed=False, fix=str(self.recipe))
        version = self.version()
        if version is None:
            text = f"{self.module} is on the import path, but no installer's record tells its version"
            return Probe(False, text, fix=f"install it: {self.recipe}")
        if not _within(version, self.minimum, self.below):
            text = f"{self.module} is version {version}; this package calls {self.bounds}"
            return Probe(False, text, fix=str(self.recipe))
        tried = probes.library(self.module)
        if tried.ok:
            return tried
        return replace(tried, fix=f"repair what the text names, or install it anew: {self.recipe}")

    def function(self, name: str) -> Callable[..., Any]:
        """The function under `name` of `calls`, imported into this process; raises `ImportError` where it is missing
        or would not take the arguments that the adapters pass."""
        call = self.calls[name]
        module, _, path = call.target.partition(":")
        what = f"{self.module} {self.version() or '(unknown version)'}"
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            if not hasattr(found, part):
                raise ImportError(f"{what} has no {call.target}; this package calls {self.bounds}. {self.recipe}")
            found = getattr(found, part)
        problem = mismatch(found, call)
        if problem:
            raise ImportError(f"{what}: {call.target} {problem}; this package calls {self.bounds}. {self.recipe}")
        function: Callable[..., Any] = found
        return function


def mismatch(function: Callable[..., Any], call: Call) -> str:
    """Why `function` would not take the arguments of `call`, or nothing. A function that hides its signature passes."""
    parameters = _parameters(function)
    if parameters is None:
        return ""
    if "." in call.target.partition(":")[2] and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    shown = f"it takes ({', '.join(str(p.name) for p in parameters)})"
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    ordered = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for place, name in enumerate(call.positional):
        if place >= len(ordered):
            if not starred:
                return f"has no argument {name!r} in place {place + 1}: {shown}"
        elif ordered[place] not in name.split("|"):
            return f"has argument {ordered[place]!r} in place {place + 1}, where {name!r} is passed: {shown}"
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in call.keywords:
            if name not in named:
                return f"has no argument {name!r}: {shown}"
    passed = {*(part for name in call.positional for part in name.split("|")), *call.keywords}
    for p in parameters:
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in passed:
            return f"demands an argument {p.name!r} that is not passed: {shown}"
    return ""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a Python function, or of a pybind11 one, which has them in the first line of its docstring."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    found = _DOCSTRING.match(lines[0].strip()) if lines else None
    if found is None:
        return None
    return [_parameter(text) for text in _split(found["parameters"]) if text != "*"]


def _parameter(text: str) -> inspect.Parameter:
    """One parameter as pybind11 prints it: `name: type = default`."""
    left, _, default = text.partition("=")
    name = left.partition(":")[0].strip()
    if name.startswith("*"):
        kind = inspect.Parameter.VAR_KEYWORD if name.startswith("**") else inspect.Parameter.VAR_POSITIONAL
        return inspect.Parameter(name.lstrip("*"), kind)
    shown: Any = default.strip() or inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=shown)


def _split(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def _within(version: str, minimum: str | None, below: str | None) -> bool:
    """Whether minimum <= version < below. A version that is no number is not."""
    found = _parse(version)
    if found is None:
        return False
    lowest, highest = (None if bound is None else _parse(bound) for bound in (minimum, below))
    if lowest is not None and found < lowest:
        return False
    # 0.7.0rc1 is not below 0.7: a release candidate already has the next version's interface.
    return highest is None or found[0] < highest[0]


def _parse(version: str) -> _Version | None:
    """(release without trailing zeros, whether it is final); local parts such as +cu128 do not count."""
    found = _RELEASE.match(version)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), found[2] is None

"""A torch-free reader of the torch schema strings that `OpSpec` carries.

Grammar: `(Tensor input, Tensor(a!) cache, float eps=1e-06, *, str scheme='unquantized') -> Tensor`. Only the types that
ops of this package use are accepted; anything else is an error, so that a typo cannot become a silent `Any`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

TYPES = ("Tensor", "int", "float", "bool", "str", "ScalarType", "Scalar", "int[]", "float[]", "Tensor[]")

_ARG = re.compile(
    r"^(?P<type>[A-Za-z]+(?:\[\])?)(?:\((?P<alias>[a-z])(?P<mut>!?)\))?(?P<opt>\?)?\s+(?P<name>[A-Za-z_]\w*)"
    r"(?:\s*=\s*(?P<default>.+))?$"
)
_NO_DEFAULT = object()


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of an op schema. `default` is meaningful only where `has_default`."""

    name: str
    type: str
    optional: bool
    mutated: bool
    kw_only: bool
    has_default: bool
    default: object

    @property
    def is_tensor(self) -> bool:
        return self.type == "Tensor"


@dataclass(frozen=True, slots=True)
class Schema:
    """A parsed schema: arguments in order and the number of tensors returned (0, 1 or more)."""

    text: str
    args: tuple[Arg, ...]
    returns: int

    @property
    def positional(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if not a.kw_only)

    @property
    def keyword_only(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.kw_only)

    @property
    def tensors(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.is_tensor)

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.args if a.mutated)

    @property
    def takes_out(self) -> bool:
        """True for an op with one result: its Python form takes a trailing `out=None`."""
        return self.returns == 1 and not self.mutated

    def parameters(self) -> list[tuple[str, str, object]]:
        """Python parameters as (name, kind, default); kind is 'pos' or 'kw', default `REQUIRED` where there is none."""
        params: list[tuple[str, str, object]] = [
            (a.name, "pos", a.default if a.has_default else REQUIRED) for a in self.positional
        ]
        if self.takes_out:
            params.append(("out", "pos", None))
        params += [(a.name, "kw", a.default if a.has_default else REQUIRED) for a in self.keyword_only]
        return params


REQUIRED = _NO_DEFAULT


def _split(body: str) -> list[str]:
    """Split on commas that are outside quotes and brackets."""
    parts, depth, quote, start = [], 0, "", 0
    for i, ch in enumerate(body):
        if quote:
            quote = "" if ch == quote else quote
        elif ch in "'\"":
            quote = ch
        elif ch in "([":
            depth += 1
        elif ch in ")]":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(body[start:i].strip())
            start = i + 1
    parts.append(body[start:].strip())
    return [p for p in parts if p]


def _default(text: str) -> object:
    literal = {"None": None, "True": True, "False": False}
    return literal[text] if text in literal else ast.literal_eval(text)


def parse(text: str) -> Schema:
    """Parse `text`; raises `ValueError` naming the argument that is not understood."""
    match = re.match(r"^\((?P<args>.*)\)\s*->\s*(?P<ret>.+)$", text.strip(), re.S)
    if match is None:
        raise ValueError(f"schema {text!r} is not of the form '(args) -> returns'")
    args: list[Arg] = []
    kw_only = False
    for part in _split(match["args"]):
        if part == "*":
            kw_only = True
            continue
        m = _ARG.match(part)
        if m is None or m["type"] not in TYPES:
            raise ValueError(f"schema argument {part!r} is not understood; types are {', '.join(TYPES)}")
        has_default = m["default"] is not None
        args.append(
            Arg(
                name=m["name"],
                type=m["type"],
                optional=bool(m["opt"]),
                mutated=bool(m["mut"]),
                kw_only=kw_only,
                has_default=has_default,
                default=_default(m["default"]) if has_default else None,
            )
        )
    names = [a.name for a in args]
    if len(set(names)) != len(names) or "out" in names:
        raise ValueError(f"schema {text!r}: argument names must be unique, and 'out' is generated")
    return Schema(text.strip(), tuple(args), _returns(match["ret"].strip()))


def _returns(ret: str) -> int:
    if ret == "()":
        return 0
    items = _split(ret[1:-1]) if ret.startswith("(") else [ret]
    if any(i.split()[0] != "Tensor" for i in items):
        raise ValueError(f"schema result {ret!r}: only Tensor results are supported")
    return len(items)

"""Sources that an earlier row of the op brought: the paths on CUDA share kernel and launcher, and no row copies them.

The AOT extension gets doors of the launcher's own signature; NVRTC compiles the kernel that is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rapid_llm.kernels.registry import OpSpec
from rapid_llm.kernels.registry.facts import expression_names

from .request import AuthoringError, Request

_SCALARS: Final = {"double": "float", "int64_t": "int", "bool": "bool"}
"""What a launcher takes beside tensors, and the schema's name for it."""
_LETTERS: Final = {
    **dict.fromkeys(("i64", "int64_t"), "l"),
    **dict.fromkeys(("int", "i32", "int32_t"), "i"),
    **dict.fromkeys(("unsigned", "u32", "uint32_t"), "u"),
    "float": "f",
}
"""A kernel's parameters in the letters of `Kernels`; pointers are `p`."""
_VALUES: Final = {"class": "{TYPES[dtype]}", "typename": "{TYPES[dtype]}", "int": "1", "bool": "false"}
"""What stands for each template parameter in the first instance."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of a launcher's parameters: its type as written, and its name."""

    type: str
    name: str

    @property
    def is_tensor(self) -> bool:
        return self.type.endswith("Tensor&")

    @property
    def is_written(self) -> bool:
        return self.type == "Tensor&"

    @property
    def schema(self) -> str:
        kind = ("Tensor!" if self.is_written else "Tensor") if self.is_tensor else _SCALARS[self.type]
        return f"{kind} {self.name}"


UNARY: Final = (Parameter("Tensor&", "out"), Parameter("const Tensor&", "input"))
"""The launcher that a scaffold writes."""


def csrc(request: Request) -> str:
    """The folder of the row's sources, relative to the root."""
    return f"rapid_llm/kernels/csrc/{request.group}" if request.in_checkout else f"{request.package}/csrc"


def shares(request: Request) -> bool:
    """Whether the row takes sources that are there already."""
    wanted = {"nvrtc": (".cuh",), "aot": (".cuh", "_launch.h")}.get(request.path, ())
    folder = request.root / csrc(request)
    return bool(wanted) and all((folder / f"{request.symbol}{end}").is_file() for end in wanted)


def launcher(request: Request) -> tuple[Parameter, ...]:
    """The parameters of the launcher that is there, or of the one that the scaffold writes."""
    if not shares(request):
        return UNARY
    file = request.root / csrc(request) / f"{request.symbol}_launch.h"
    head = rf"inline\s+void\s+{request.symbol}\(([^)]*)\)\s*\{{"
    parts = _parameters(file, head, f"inline void {request.symbol}(...)")
    found = tuple(Parameter(kind, name) for kind, name in parts)
    for one in found:
        if not one.is_tensor and one.type not in _SCALARS:
            raise AuthoringError(
                f"{file.relative_to(request.root)}: no door can be made for `{one.type} {one.name}`, only for "
                f"Tensor&, const Tensor&, {', '.join(_SCALARS)}; write it by docs/guide-aot.md"
            )
    if found != UNARY and request.known is not None and not _takes(found, request.known):
        raise AuthoringError(
            f"{file.relative_to(request.root)}: {request.symbol}({', '.join(p.name for p in found)}) does not take "
            f"{request.op}'s arguments, {', '.join(_expected(request.known))}, in this order; give --variant NAME for "
            "a launcher of its own, or write the row by docs/guide-aot.md"
        )
    return found


def fits(request: Request, op: OpSpec) -> bool:
    """Whether a launcher is there that takes the op's own arguments, its result first, so that a row is one call."""
    if request.path != "aot" or not shares(request) or not _takes(launcher(request), op):
        return False
    if op.out is None:
        return True
    names = {name for text in (op.out.shape, op.out.dtype) for name in compile(text, "", "eval").co_names}
    return not names & expression_names().keys()


def _takes(parameters: tuple[Parameter, ...], op: OpSpec) -> bool:
    return [p.name for p in parameters] == _expected(op)


def doors(symbol: str, parameters: tuple[Parameter, ...]) -> dict[str, str]:
    """What the extension's unit says of the launcher, for its template."""
    written = [p.name for p in parameters if p.is_written]
    passed = [f"{p.name}_view" if p.is_written else f"view({p.name})" if p.is_tensor else p.name for p in parameters]
    return {
        "thin_parameters": declared(parameters, "Tensor"),
        "thin_call": f"rapid_llm::{symbol}({', '.join(p.name for p in parameters)});",
        "ext_parameters": declared(parameters, "StableTensor"),
        "ext_views": "\n".join(f"  Tensor {name}_view = view({name});" for name in written),
        "ext_call": f"rapid_llm::{symbol}({', '.join(passed)});",
    }


def declared(parameters: tuple[Parameter, ...], tensor: str) -> str:
    """The parameters in C++, their tensors of the type `tensor`."""
    return ", ".join(f"{p.type.replace('Tensor', tensor)} {p.name}" for p in parameters)


def schema(parameters: tuple[Parameter, ...]) -> str:
    """The schema of the torch op."""
    return f"({', '.join(p.schema for p in parameters)}) -> ()"


def instance(request: Request) -> tuple[str, str]:
    """The first instance of the kernel that is there, in braces for an f-string, and the letters of its arguments."""
    file = request.root / csrc(request) / f"{request.symbol}.cuh"
    name = f"{request.symbol}_kernel"
    head = rf"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?{name}\(([^)]*)\)\s*\{{"
    parts = _parameters(file, head, f"__global__ void {name}(...)")
    letters = ["p" if "*" in kind else _LETTERS.get(kind, "") for kind, _ in parts]
    made = re.search(rf"template\s*<([^>]*)>\s*{head}", file.read_text())
    kinds = [part.split()[0] for part in made[1].split(",")] if made else []
    if not all(letters) or any(kind not in _VALUES for kind in kinds):
        raise AuthoringError(
            f"{file.relative_to(request.root)}: {name}'s parameters are not all pointers, float and integers, or it is "
            "a template over more than types, int and bool; write the row by docs/guide-jit.md"
        )
    values = ", ".join(_VALUES[kind] for kind in kinds)
    return f"rapid_llm::{name}" + (f"<{values}>" if kinds else ""), "".join(letters)


def _expected(op: OpSpec) -> list[str]:
    return [*(["out"] if op.parsed.takes_out else []), *(arg.name for arg in op.parsed.args)]


def _parameters(file: Path, pattern: str, shown: str) -> list[tuple[str, str]]:
    """Type and name of each parameter of the function that `pattern` finds."""
    found = re.search(pattern, file.read_text())
    if found is None:
        raise AuthoringError(f"{file} exists and has no `{shown}`; name it so, or give --variant NAME")
    parts = (re.sub(r"\b__restrict__\b", "", part) for part in found[1].split(","))
    split = (re.fullmatch(r"\s*(.*?[\s*&])\s*(\w+)\s*", part, re.DOTALL) for part in parts)
    return [(" ".join(part[1].split()), part[2]) for part in split if part is not None]

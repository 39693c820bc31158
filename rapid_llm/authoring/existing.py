"""A row for an op that exists: the floor computes at first, the new kernel copies its result onto itself.

So every test passes at once while source, build, launch and row are real, and the author replaces the two by one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rapid_llm.kernels.registry import OpSpec, rows
from rapid_llm.kernels.registry.schema import Arg

from .request import AuthoringError, Request
from .shared import fits, instance, shares

_TYPES: Final = {"ScalarType": "torch.dtype", "Scalar": "float", "int[]": "list[int]", "float[]": "list[float]"}
_WAIVER: Final = "# check: allow thin-wrapper: the floor stands in until the kernel computes the op"


@dataclass(frozen=True, slots=True)
class _Kernel:
    """How a wrapper reaches its kernel: imports, module-level lines, and the call that copies {0} onto itself;
    none where a kernel was there that takes other arguments."""

    imports: tuple[str, ...]
    declarations: tuple[str, ...]
    call: str


def wrapper(request: Request, values: dict[str, str]) -> str:
    """The module of the row."""
    op = request.known
    if op is None:
        raise AuthoringError(f"{request.op} is not registered")
    if op.outs:
        raise AuthoringError(f"{op.id} returns several tensors, for which there is no scaffold; write the row by hand")
    module, name = _floor(request, op).split(":")
    kernel = _kernel(request, values)
    returned = "Tensor" if op.parsed.takes_out else "None"
    whole = fits(request, op)
    lines = [
        f'"""`{request.row}`: {"one call" if whole else "a scaffold of one kernel call"}; see {values["source_name"]}.',
        "",
        f"Why not Triton: {request.why}",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        *values["path_import"].splitlines(),
        *(["import torch"] if whole or any(_TYPES.get(a.type, "").startswith("torch") for a in op.parsed.args) else []),
        "from torch import Tensor",
        *(["from torch.compiler import is_compiling"] if whole else []),
        "",
        *sorted([*kernel.imports, *([] if whole else [f"from {module} import {name} as _floor", _refusal_import()])]),
        "",
        *kernel.declarations,
        "",
        "",
        f"def {request.function}(",
        *(f"    {line}," for line in _parameters(op)),
        f") -> {returned}:",
    ]
    lines += _call(request.symbol, op) if whole else _onto_itself(request, op, kernel)
    return "\n".join(lines) + "\n"


def _call(symbol: str, op: OpSpec) -> list[str]:
    """The body that calls a launcher with the op's own arguments, which is all that a row does."""
    lines = ['    """See the op, and the launcher for what it refuses."""']
    passed = ", ".join(arg.name for arg in op.parsed.args)
    if op.out is None:
        return [*lines, f"    (_op if is_compiling() else _kernel)({passed})"]
    first = next(arg.name for arg in op.parsed.args if arg.type == "Tensor")
    return [
        *lines,
        "    if out is None:",
        f"        out = torch.empty({op.out.shape}, dtype={op.out.dtype}, device={first}.device)",
        f"    (_op if is_compiling() else _kernel)(out, {passed})",
        "    return out",
    ]


def _onto_itself(request: Request, op: OpSpec, kernel: _Kernel) -> list[str]:
    """The body in which the floor computes, and the kernel copies its result onto itself."""
    result = "result" if op.parsed.takes_out else op.parsed.mutated[0]
    lines = [
        '    """Replace the body by one call of the kernel. See the op."""',
        *([f"    {_WAIVER}"] if request.path in ("jit", "aot") else []),
    ]
    if op.parsed.takes_out:
        lines += [
            "    if out is not None and not out.is_contiguous():",
            f'        raise ArgumentError("{op.id}: out must be contiguous")',
        ]
    else:
        lines += [
            f"    if not {result}.is_contiguous():",
            f'        raise ArgumentError("{op.id}: {result} must be contiguous")',
        ]
    floor = f"_floor({', '.join(_passed(op))})"
    if not kernel.call:
        lines.append("    # replace: launch _kernels[device, dtype][1] with what its letters stand for")
        return [*lines, f"    {'return ' if op.parsed.takes_out else ''}{floor}"]
    lines += [f"    result = {floor}" if op.parsed.takes_out else f"    {floor}"]
    lines.append(f"    {kernel.call.format(result)}")
    lines += ["    return result"] if op.parsed.takes_out else []
    return lines


def schemes(request: Request) -> str:
    """The row's `schemes` line: the op's first, the floor's own."""
    if request.known is None or not request.known.schemes:
        return ""
    return f'\n    schemes=("{request.known.schemes[0]}",),'


def _floor(request: Request, op: OpSpec) -> str:
    native = [r for r in rows(op.id) if r.is_native]
    fitting = [r for r in native if not op.schemes or op.schemes[0] in r.schemes]
    return (fitting or native)[0].target


def _kernel(request: Request, values: dict[str, str]) -> _Kernel:
    symbol, source = values["symbol"], values["source"]
    if request.path == "cpp":
        return _Kernel(
            ("from rapid_llm.kernels.cpp import load_cpp",),
            (f'_library: Final = load_cpp("{symbol}", {source})',),
            f"_library.{symbol}({{0}}, {{0}})",
        )
    if request.path == "external":
        return _Kernel(
            (f"from {values['library_package']} import LIBRARY",),
            (f'_call: Final = LIBRARY.function("{request.function}")',),
            "_call({0}, out={0})",
        )
    if request.path == "aot":
        whole = request.known is not None and fits(request, request.known)
        more = (f"_op: Final = torch.ops.rapid_llm.{symbol}.default",) if whole else ()
        return _Kernel(
            ("from rapid_llm.kernels import aot",),
            (f"_kernel: Final = aot.load().{symbol}", *more),
            "_kernel({0}, {0})",
        )
    if request.path == "nvrtc":
        return _nvrtc(request, values["nvrtc_source"])
    return _Kernel(
        (f"from rapid_llm.kernels.{request.path} import Kernel",),
        (f'_kernel: Final = Kernel("{symbol}", {source})', "prepare: Final = _kernel.prepare"),
        "_kernel[{0}.get_device()]({0}, {0})",
    )


def _nvrtc(request: Request, source: str) -> _Kernel:
    """One variant, an element at a time; the letters are its arguments: out, input, vectors, count. A kernel that was
    there keeps its own arguments, which no scaffold can guess: it is compiled, and the floor alone computes."""
    symbol = request.symbol
    there = shares(request)
    kernel, letters = instance(request) if there else (f"rapid_llm::{symbol}_kernel<{{TYPES[dtype]}}, 1>", "ppll")
    return _Kernel(
        ("from collections.abc import Hashable", "from rapid_llm.kernels.nvrtc import TYPES, Kernels"),
        (
            "def _instances(dtype: str) -> dict[Hashable, tuple[str, str]]:",
            f'    return {{1: (f"{kernel}", "{letters}")}}',
            "",
            "",
            f'_kernels: Final = Kernels("{symbol}", {source})',
            "prepare: Final = _kernels.prepare",
        ),
        ""
        if there
        else "if count := {0}.numel():\n"
        "        launch = _kernels[{0}.get_device(), {0}.dtype][1]\n"
        "        launch(count // 256 + 1, 256, 1, {0}.data_ptr(), {0}.data_ptr(), count, count)",
    )


def _refusal_import() -> str:
    return "from rapid_llm.kernels.registry import ArgumentError"


def _parameters(op: OpSpec) -> list[str]:
    shown = [_shown(a) for a in op.parsed.positional]
    if op.parsed.takes_out:
        shown.append("out: Tensor | None = None")
    return [*shown, *(["*", *(_shown(a) for a in op.parsed.keyword_only)] if op.parsed.keyword_only else [])]


def _shown(arg: Arg) -> str:
    kind = _TYPES.get(arg.type, arg.type)
    text = f"{arg.name}: {kind}{' | None' if arg.optional else ''}"
    return f"{text} = {_literal(arg.default)}" if arg.has_default else text


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _passed(op: OpSpec) -> list[str]:
    named = [a.name for a in op.parsed.positional] + (["out"] if op.parsed.takes_out else [])
    return [*named, *(f"{a.name}={a.name}" for a in op.parsed.keyword_only)]

"""What only nvcc reads, rewritten for a C++ compiler: launches, PTX and launch bounds. The rest stays as it is.

A text that this does not know is an error that names it, never left out: a kernel is emulated whole or not at all.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Untranslatable", "translate"]

LOAD: Final = r"\{ \.reg \.pred inside; setp\.ne\.b32 inside, %\d, 0; (mov\.b32 %\d, 0; )+@inside ld\.global[^ ]*"
PTX: Final = {
    r"cvt\.f32\.f16 %0, %1;": "float_of_half",
    r"cvt\.rn\.f16\.f32 %0, %1;": "half_of_float",
    r"cvt\.rn\.bf16\.f32 %0, %1;": "bfloat16_of_float",
    r"rcp\.approx\.f32 %0, %1;": "reciprocal",
    r"griddepcontrol\.wait;": "wait_for_previous",
    r"griddepcontrol\.launch_dependents;": "allow_next",
    r"lop3\.b32 %0, %1, %2, %3, 0xea;": "and_or",
    r"lop3\.b32 %0, %1, %2, %3, 0x6a;": "and_xor",
    r"add\.f16x2 %0, %1, %2;": "add_halves",
    r"fma\.rn\.bf16x2 %0, %1, %2, %3;": "fma_bfloat16s",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32 [^;]*;": "mma_halves",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 [^;]*;": "mma_bfloat16s",
    LOAD + r"\.v4\.b32 \{%0, %1, %2, %3\}, \[%4\]; \}": "load_16_bytes",
    LOAD + r"\.v2\.b32 \{%0, %1\}, \[%2\]; \}": "load_8_bytes",
}
"""The text of an asm statement, and the function of ptx.h that does the same."""

OPEN: Final = {"(": ")", "[": "]", "{": "}"}
STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')


class Untranslatable(ValueError):  # noqa: N818
    """A text of CUDA that the emulation has no stand-in for."""


def translate(text: str, where: str) -> str:
    """The source as C++. `where` is its name, for errors."""
    return _launches(_bounds(_assembly(text, where), where), where)


def _end(text: str, start: int) -> int:
    """Past the bracket that closes the one at `start`; brackets in strings count for nothing."""
    depth, at = 0, start
    while at < len(text):
        if text[at] == '"' and (string := STRING.match(text, at)):
            at = string.end()
            continue
        depth += (text[at] in OPEN) - (text[at] in OPEN.values())
        at += 1
        if depth == 0:
            return at
    raise Untranslatable(f"a bracket is not closed: {text[start : start + 60]!r}")


def _split(text: str, separator: str) -> list[str]:
    """By a character outside brackets and strings."""
    parts, start, at = [], 0, 0
    while at < len(text):
        if text[at] == '"' and (string := STRING.match(text, at)):
            at = string.end()
        elif text[at] in OPEN:
            at = _end(text, at)
        else:
            if text[at] == separator:
                parts.append(text[start:at])
                start = at + 1
            at += 1
    return [*parts, text[start:]]


def _assembly(text: str, where: str) -> str:
    done, at = "", 0
    for found in re.finditer(r"\basm\b\s*(?:volatile\b\s*)?(?:\\\n\s*)?\(", text):
        end = _end(text, found.end() - 1)
        line = text.count("\n", 0, found.start()) + 1
        # Within a macro the statement spans continued lines.
        inside = text[found.end() : end - 1].replace("\\\n", "\n")
        done += text[at : found.start()] + _instruction(inside, f"{where}:{line}")
        at = end
    return done + text[at:]


def _instruction(inside: str, where: str) -> str:
    said, *operands = _split(inside, ":")
    # A macro's parameter between two strings leaves nothing: it says which cache a load goes through.
    ptx = "".join(STRING.findall(said))
    name = next((name for pattern, name in PTX.items() if re.fullmatch(pattern, ptx)), None)
    if name is None:
        raise Untranslatable(f"{where}: PTX without a stand-in: {ptx}; add it to emulation/translate.py and ptx.h")
    arguments = []
    for operand in (part.strip() for group in operands[:2] for part in _split(group, ",")):
        if operand:
            arguments.append(operand[operand.index("(") + 1 : -1])
    return f"::emulation::{name}({', '.join(arguments)})"


def _bounds(text: str, where: str) -> str:
    """__launch_bounds__(n) becomes the kernel's first statement."""
    done, at = "", 0
    for found in re.finditer(r"\b__launch_bounds__\(", text):
        end = _end(text, found.end() - 1)
        body = _end(text, text.index("(", end))
        if (brace := re.match(r"\s*\{", text[body:])) is None:
            raise Untranslatable(f"{where}: no kernel's body follows {text[found.start() : end]}")
        body += brace.end()
        bound = text[found.end() : end - 1]
        done += text[at : found.start()] + text[end:body] + f" ::emulation::bound({bound});"
        at = body
    return done + text[at:]


def _launches(text: str, where: str) -> str:
    """kernel<T><<<grid, block, shared, stream>>>(arguments) becomes a call."""
    done, at = "", 0
    for found in re.finditer(r"(\w+(?:<[^<>;{}()]*>)?)<<<(.*?)>>>\s*\(", text, re.DOTALL):
        kernel, launch = found.groups()
        if len(_split(launch, ",")) != 4:
            raise Untranslatable(f"{where}: {kernel} is launched with other than a grid, a block, 0 and a stream")
        end = _end(text, found.end() - 1)
        arguments = text[found.end() : end - 1]
        done += text[at : found.start()] + f"::emulation::launch({launch}, {kernel}, {arguments})"
        at = end
    done += text[at:]
    if "<<<" in done:
        line = done[: done.index("<<<")].count("\n") + 1
        raise Untranslatable(f"{where}:{line}: a launch that emulation/translate.py does not read")
    return done

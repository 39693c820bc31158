"""Every message that the troubleshooting page quotes is one that this package prints, and what it tells is so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels.build import BuildError, nvcc_arch
from rapid_llm.kernels.build.distill import distill

from .pages import DOCS, ROOT, Block, blocks

PAGE = DOCS / "troubleshooting.md"
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_EDGES = " =:;,.()'"


def _messages() -> list[tuple[str, str]]:
    """(where, message) of every `text` block that is ours, and of every message in a table's first column."""
    found = [(b.where, b.text.strip()) for b in blocks(PAGE) if b.language == "text" and "foreign" not in b.notes]
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        cell = re.match(r"\| `([^`]+)` \|", line)
        if cell:
            found.append((f"{PAGE.name}:{number}", cell[1]))
    return found


@cache
def _literals() -> dict[str, tuple[str, ...]]:
    """Every string of every source file; an f-string gives its fixed parts."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted((ROOT / "rapid_llm").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        found[str(path)] = tuple(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    for folder in (ROOT / "rapid_llm", ROOT / "csrc"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cc")):
            found[str(path)] = tuple(_LITERAL.findall(path.read_text()))
    return found


def _said_by(message: str) -> list[str]:
    """The files whose strings hold every fixed part of the message."""
    parts = [part for text in message.split("...") if len(part := text.strip(_EDGES)) > 2]
    return [
        Path(file).name
        for file, strings in _literals().items()
        if all(any(part in string for string in strings) for part in parts)
    ]


@pytest.mark.parametrize(("where", "message"), _messages(), ids=lambda value: value[:60])
def test_a_quoted_message_is_printed_by_this_package(where: str, message: str) -> None:
    """Catches: a message that was reworded, so that nobody who searches for it finds the entry."""
    assert _said_by(message), f"{where}: no source says {message!r}"


def test_a_made_up_message_is_not_found() -> None:
    """Catches: a search that finds everything."""
    assert _said_by("this torch is built without CUDA")
    assert not _said_by("this torch is built ... without a kettle")
    assert len(_messages()) > 30


def _block(title: str) -> list[Block]:
    """The blocks of the section with this title."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(f"## {title}")
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].startswith("## ")), len(lines))
    return [b for b in blocks(PAGE) if begin < b.line <= end]


def test_a_missing_torch_op_reads_as_quoted() -> None:
    """Catches: an AttributeError of torch that reads otherwise now."""
    quoted = _block("An op is missing from torch.ops")[0].text.strip()
    with pytest.raises(AttributeError) as raised:
        getattr(torch.ops.rapid_llm_ops, "no_such_op")  # noqa: B009 - the name is no attribute yet
    assert quoted == f"AttributeError: {raised.value}".replace("no_such_op", "scale")


def test_a_wrong_architecture_reads_as_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a fix in the message that would not work."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(BuildError) as raised:
        nvcc_arch(90)
    quoted = _block("Wrong architecture")[0].text.strip()
    assert re.fullmatch(re.escape(quoted).replace(re.escape("..."), ".+"), str(raised.value))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    assert nvcc_arch(90) == "sm_90"


def test_out_of_memory_reads_as_quoted() -> None:
    """Catches: a killed compiler that is reported as an error of the source."""
    quoted = _block("Out of memory in the build")[0].text.strip()
    told = distill("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", 1).first
    assert re.fullmatch(re.escape(quoted).replace(re.escape("..."), ".*"), told)

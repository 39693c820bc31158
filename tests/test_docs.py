"""What the documents say holds: links, commands, examples, generated pages, and the table of requirements."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
REQUIREMENTS = ROOT / "docs" / "requirements.md"
TAGS = [
    *(f"J{i}" for i in range(1, 6)),
    *(f"A{i}" for i in range(1, 7)),
    *(f"T{i}" for i in range(1, 4)),
    "X1",
    "D1",
    "D1b",
    *(f"D{i}" for i in range(2, 8)),
    *(f"B{i}" for i in range(1, 5)),
    *(f"V{i}" for i in range(1, 5)),
    *(f"W{i}" for i in range(1, 4)),
]
STATUSES = {"done", "part", "planned"}  # part says after a colon what is missing


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _fences(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def _rows() -> dict[str, tuple[str, str]]:
    """tag -> (status, the cell that names tests)."""
    found: dict[str, tuple[str, str]] = {}
    for line in REQUIREMENTS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and re.fullmatch(r"[JATXDBVW]\d+b?", cells[0]):
            assert cells[0] not in found, f"{cells[0]} stands twice"
            found[cells[0]] = (cells[2], cells[3])
    return found


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    """Catches: a page that was moved or never written."""
    text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", text)
    broken = [link for link in links if not (path.parent / link).exists()]
    assert not broken, f"{_name(path)}: {broken}"


def test_generated_pages_are_up_to_date() -> None:
    """Catches: a changed declaration whose table was not written again (`make docs` does it)."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def test_every_requirement_has_its_row() -> None:
    """Catches: a requirement forgotten, a status made up."""
    rows = _rows()
    assert sorted(rows) == sorted(TAGS)
    assert {status.partition(":")[0] for status, _ in rows.values()} <= STATUSES


def test_what_is_called_done_names_a_test_that_exists() -> None:
    """Catches: a proof that was renamed or deleted, and a claim without one."""
    wrong = []
    for tag, (status, proof) in _rows().items():
        named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)(?:::(\w+))?`", proof)
        if status != "planned" and not named:
            wrong.append(f"{tag} is {status} and names no test")
        for file, function in named:
            path = ROOT / file
            if not path.exists():
                wrong.append(f"{tag}: {file} does not exist")
            elif function and f"def {function}(" not in path.read_text():
                wrong.append(f"{tag}: {file} has no {function}")
    assert not wrong, wrong


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_python_examples_compile(path: Path) -> None:
    """Catches: an example with a typing error; those that need no model are run."""
    for text in _fences(path, "python"):
        if path.name in ("README.md", "dispatch.md"):
            code = compile(text, _name(path), "exec")
            if "LLM(" not in text:
                exec(code, {})


def test_commands_in_the_documents_exist() -> None:
    """Catches: a command or an option that was renamed."""
    import typer

    from rapid_llm.cli.app import app

    root = typer.main.get_command(app)
    for path in PAGES:
        for line in path.read_text().splitlines():
            command = re.match(r"(?:\$ )?rapid-llm ([^#|]*)", line)
            if command:
                _check_command(root, command[1].split(), f"{_name(path)}: {line}")


def _check_command(command: object, words: list[str], where: str) -> None:
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", {}), f"{where}: {words[:1]} is no command"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("--") and word not in known]
    assert not unknown, f"{where}: no option {unknown}"


def test_make_targets_exist() -> None:
    """Catches: a target named in a page that make does not know."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for path in PAGES for target in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert {"run", "test", "test-gpu", "lint", "bench", "docs", "clean"} <= targets
    assert named <= targets, sorted(named - targets)

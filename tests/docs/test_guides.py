"""The guides, followed: each command is run in a scratch copy, each quoted file is compared, each named file is there.

A step is run after all steps before it on its page, so that a single test can be run by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.extension import builder

from .clone import Clone, replaced
from .pages import DOCS, GUIDES, ROOT, Block, blocks, missing_piece
from .reader import Reader, follow

PAGES = [*GUIDES, *(DOCS / name for name in ("choosing-a-path.md", "adding-a-kernel.md", "troubleshooting.md"))]
FOLLOWED = {
    page.name: [b for b in blocks(page) if b.language == "console" or {"writes", "appends", "replaces"} & set(b.notes)]
    for page in PAGES
}
STEPS = [
    pytest.param(name, at, id=block.where)
    for name, steps in FOLLOWED.items()
    for at, block in enumerate(steps)
    if block.language == "console"
]
QUOTES = [pytest.param(block, id=block.where) for page in PAGES for block in blocks(page) if "quotes" in block.notes]
_NAMED = re.compile(r"`((?:rapid_llm|csrc|tests|benchmarks|docs)/[\w./-]+)`")


@pytest.fixture(scope="module")
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Follows the pages as far as the selected tests ask: a second thread helps, or the other worker processes do."""
    last: dict[str, int] = {}
    for item in request.session.items:
        asked = getattr(item, "callspec", None)
        if asked is not None and item.path == Path(__file__) and "at" in asked.params:
            page = asked.params["page"]
            last[page] = max(asked.params["at"], last.get(page, 0))
    if "guide-aot.md" in last:  # whose clone begins with these objects
        with contextlib.suppress(builder().BuildError):
            builder().build(archs=builder().ARCHS)
    base = tmp_path_factory.getbasetemp()
    workers = "PYTEST_XDIST_WORKER" in os.environ
    made = Reader(
        {page: FOLLOWED[page][: at + 1] for page, at in last.items()}, (base.parent if workers else base) / "guides"
    )
    if workers:
        yield made
        return
    with ThreadPoolExecutor(1) as pool:
        helper = pool.submit(made.all)
        yield made
        helper.result()


@pytest.mark.compiles
@pytest.mark.timeout(900)  # the first of a page's tests follows the page, and on a busy machine builds take long
@pytest.mark.parametrize(("page", "at"), STEPS)
def test_a_step_does_what_the_page_says(page: str, at: int, reader: Reader) -> None:
    """Catches: a command that was renamed, an output that reads otherwise now, a step that a guide leaves out."""
    ending = reader.endings(page)[at]
    if ending.failed:
        pytest.fail(ending.failed, pytrace=False)
    if ending.skipped:
        pytest.skip(ending.skipped)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page.name for page in GUIDES])
def test_a_guide_holds_on_a_gpu(page: str, tmp_path: Path) -> None:
    """Catches: the same in the steps that only a machine with a GPU can follow, which the test above leaves out."""
    failed = [ending.failed for ending in follow(FOLLOWED[page], tmp_path) if ending.failed]
    assert not failed, failed[0]


@pytest.mark.parametrize("block", QUOTES)
def test_a_quoted_file_reads_as_quoted(block: Block) -> None:
    """Catches: a worked example that was changed while the guide still shows the old one."""
    text = (ROOT / block.notes["quotes"]).read_text()
    pieces = tuple(" ".join(piece.split()) for piece in re.split(r"^\s*(?:#|//)?\s*\.\.\.$", block.text, flags=re.M))
    missing = missing_piece(tuple(p for p in pieces if p), text)
    assert missing is None, f"{block.where} quotes what {block.notes['quotes']} does not say: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Catches: a guide that sends its reader to a file which has moved. A file that the guide makes may be absent."""
    made = " ".join(f"{block.text} {block.notes.get('writes')}" for block in FOLLOWED[page.name])
    named = {name.rstrip(".") for name in _NAMED.findall(page.read_text())}
    gone = sorted(name for name in named if not (ROOT / name).exists() and name not in made)
    assert not gone, gone


@pytest.mark.parametrize(
    ("pieces", "output", "missing"),
    [
        (("a b", "c"), "a   b\n x c", None),
        (("c", "a"), "a c", "a"),
        (("gone",), "here", "gone"),
    ],
)
def test_output_is_compared_in_order(pieces: tuple[str, ...], output: str, missing: str | None) -> None:
    """Catches: a comparison that finds everything."""
    assert missing_piece(pieces, output) == missing


def test_a_page_is_read_as_its_reader_reads_it(tmp_path: Path) -> None:
    """Catches: a block that the tests pass over in silence."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: nvcc, gpu -->\n<!-- fails: 1 -->\n```console\n$ one \\\n> two\nout ... end\n$ three\n```\n"
        "<!-- writes: a/b.py -->\n```py\nx = 1\n```\n"
    )
    first, second = blocks(page)
    assert (first.needs, first.status) == (("nvcc", "gpu"), 1)
    assert [(c.text, c.output) for c in first.commands()] == [("one \\\ntwo", ("out", "end")), ("three", ())]
    assert (second.notes, second.text) == ({"writes": "a/b.py"}, "x = 1\n")
    page.write_text("<!-- needs: gpu -->\ntext\n")
    with pytest.raises(ValueError, match="belongs to no block"):
        blocks(page)


def test_a_function_is_replaced_by_name() -> None:
    """Catches: a reader's edit that the tests make in another place, or not at all."""
    text = "from a import b\n\n\n@old\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n"
    new = "from a import b, c\n\n\ndef f():\n    return c\n"
    assert replaced(text, Block("page.md", 1, "py", new)) == new + "\n\ndef g():\n    return 2\n"
    with pytest.raises(AssertionError, match="replaces 0 parts"):
        replaced(text, Block("page.md", 1, "py", "def h(): ...\n"))


def test_a_step_that_fails_is_told(tmp_path: Path) -> None:
    """Catches: a runner that accepts a wrong status or a missing output."""

    def block(text: str, **notes: Any) -> Block:
        return Block("page.md", 1, "console", text, notes)

    clone = Clone.__new__(Clone)
    clone.root, clone.environment = tmp_path, {"PATH": "/usr/bin:/bin"}
    clone.follow(block("$ echo one; false\none\n", fails="1"))
    with pytest.raises(AssertionError, match="ended with 1, not 0"):
        clone.follow(block("$ false\n"))
    with pytest.raises(AssertionError, match="promises 'two'"):
        clone.follow(block("$ echo one\ntwo\n"))


def test_a_page_is_followed_once(tmp_path: Path) -> None:
    """Catches: workers that each follow every page, or one that waits for a page nobody follows."""
    steps = [Block("a.md", 1, "console", "$ pwd >> /dev/null\n"), Block("a.md", 5, "console", "$ false\n")]
    one, two = (Reader({"a.md": steps, "b.md": steps[:1]}, tmp_path) for _ in range(2))
    with one._lock("a.md", wait=False) as held:
        assert held
        two.all()  # passes a.md over
        assert [two._file(page).exists() for page in ("a.md", "b.md")] == [False, True]
    first = one.endings("a.md")
    assert [bool(ending.failed) for ending in first] == [False, True]
    stamp = one._file("a.md").stat().st_mtime_ns
    assert two.endings("a.md") == first
    assert two._file("a.md").stat().st_mtime_ns == stamp

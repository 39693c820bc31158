"""Pages followed once a test run, by whichever thread or worker process comes first; the others take what it found.

A page that is being followed is not waited for while another is left to do, so that two workers share the pages.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from .clone import Clone, lacking
from .pages import Block


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ended: why it was left out, or what it failed with, or neither."""

    skipped: str = ""
    failed: str = ""


def follow(steps: Sequence[Block], folder: Path) -> list[Ending]:
    """Follow the steps of one page in a clone of its own, up to the first that fails."""
    clone = Clone(folder)
    endings: list[Ending] = []
    for block in steps:
        if endings and endings[-1].failed:
            endings.append(Ending(failed=f"{block.where} was not reached: a step before it failed"))
            continue
        reason = lacking(block.needs)
        try:
            if not reason:
                clone.follow(block)
            endings.append(Ending(skipped=reason))
        except Exception as error:  # for the test of this step to raise
            endings.append(Ending(failed=f"{type(error).__name__}: {error}"))
    return endings


class Reader:
    """pages: name -> the steps to follow. folder: shared by all workers of one test run."""

    def __init__(self, pages: Mapping[str, Sequence[Block]], folder: Path) -> None:
        self.pages = pages
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def endings(self, page: str) -> list[Ending]:
        """How the page's steps ended. What another worker is at is waited for last."""
        if not self._try(page, wait=False):
            for other in self.pages:
                self._try(other, wait=False)
            self._try(page, wait=True)
        return [Ending(**ending) for ending in json.loads(self._file(page).read_text())]

    def all(self) -> None:
        """Follow every page that nobody is at."""
        for page in self.pages:
            self._try(page, wait=False)

    def _try(self, page: str, *, wait: bool) -> bool:
        """Follow the page unless that is done; False where another is at it, or is waited for no longer."""
        if self._file(page).exists():
            return True
        with self._lock(page, wait) as ours:
            if ours and not self._file(page).exists():
                found = follow(self.pages[page], self.folder / page.partition(".")[0])
                draft = self.folder / f"{page}.draft"
                draft.write_text(json.dumps([asdict(ending) for ending in found]))
                draft.replace(self._file(page))
        return ours

    def _file(self, page: str) -> Path:
        return self.folder / f"{page}.json"

    @contextmanager
    def _lock(self, page: str, wait: bool) -> Iterator[bool]:
        with (self.folder / f"{page}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

"""Facts about rows learnt while running, kept for `explain()`: one list of texts a row."""

from __future__ import annotations

_notes: dict[str, list[str]] = {}


def add(row: str, text: str) -> None:
    """Keep `text` for `row`, once."""
    texts = _notes.setdefault(row, [])
    if text not in texts:
        texts.append(text)


def of(row: str) -> tuple[str, ...]:
    """The texts kept for `row`, oldest first."""
    return tuple(_notes.get(row, ()))

"""Whether all ranks chose the same rows: what each reports of its choices, and where two reports differ.

Ranks that run different rows for the same call would still exchange tensors of the right shapes, and compute a model
that nobody has verified. Only what ranks share is compared: a rank may have calls of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rapid_llm.kernels.registry import KernelSpec, digest, get_op


class RowChoice(NamedTuple):
    """A row that a rank runs. bucket: for which sizes. key: the facts of the call, as JSON. digest: of the row's
    declaration and the file of its function, None where that cannot be read."""

    bucket: str
    op: str
    key: str
    row: str
    digest: str | None


def choices(bindings: Iterable[tuple[str, str, Any]]) -> tuple[RowChoice, ...]:
    """Of a decoder's `bindings()`."""
    digests: dict[str, str | None] = {}
    found = []
    for bucket, op, handle in bindings:
        row = handle.spec.name
        if row not in digests:
            digests[row] = _digest(handle.spec)
        key = json.dumps(handle.decision.facts.as_json(), sort_keys=True)
        found.append(RowChoice(bucket, op, key, row, digests[row]))
    return tuple(dict.fromkeys(found))


def disagreement(by_rank: Sequence[Iterable[RowChoice]]) -> str | None:
    """What ranks, numbered from 0, chose differently for the same call: op, key, rows and ranks; None where nothing."""
    calls: dict[tuple[str, str, str], dict[tuple[str, str | None], list[int]]] = {}
    for rank, chosen in enumerate(by_rank):
        for choice in chosen:
            ranks = calls.setdefault(choice[:3], {}).setdefault(choice[3:], [])
            if rank not in ranks:
                ranks.append(rank)
    bad = [
        f"{op} for {bucket}, {_shown(key)}: {_sides(rows)}"
        for (bucket, op, key), rows in calls.items()
        if len(rows) > 1
    ]
    if not bad:
        return None
    more = f" (and {len(bad) - 1} more such calls)" if len(bad) > 1 else ""
    return f"ranks chose different rows: {bad[0]}{more}; give all the same records and settings, or pin rows by a lock"


def _digest(row: KernelSpec) -> str | None:
    """Cheaper than the digest that evidence goes by, which has to see through what the file imports."""
    return digest.raw_of(row, get_op(row.op), [row.target.partition(":")[0].replace(".", "/") + ".py"])


def _sides(rows: dict[tuple[str, str | None], list[int]]) -> str:
    return ", ".join(
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} {row} "
        f"({'no digest' if digest is None else f'digest {digest[:12]}'})"
        for (row, digest), ranks in rows.items()
    )


def _shown(key: str) -> str:
    """The facts that tell calls of one op apart."""
    facts = json.loads(key)
    parts = [facts["device"], facts["dtype"], facts["scheme"]]
    parts += [f"{name}={size}" for name, size in facts["dims"].items()]
    return " ".join(part for part in parts if part)

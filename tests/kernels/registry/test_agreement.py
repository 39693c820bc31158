"""Ranks with records of their own: one decision, or a named mismatch before anything waits for anything."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rapid_llm.kernels.registry import lockfile
from rapid_llm.kernels.registry.errors import LockError
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.kernels.registry.lockfile import Entry, Lock
from tests import warm

ROOT = Path(__file__).parents[3]
RANKS = 4


def lock(name: str, **rows: str) -> Lock:
    """A lock of one call of each op named, with its row."""
    entries = [Entry(Facts(op, "cpu", dtype="fp32"), "cpu test", row, f"of {row}") for op, row in rows.items()]
    return Lock(name, {lockfile.key(entry.facts): entry for entry in entries})


def test_ranks_share_only_some_calls() -> None:
    """Catches P77: a digest over everything, which never agrees where each rank has experts of its own; and a call that
    two ranks share with different rows, passed over."""
    one, two = lock("a", linear="native/linear"), lock("b", rmsnorm="native/rmsnorm")
    assert lockfile.conflicts([one, two]) == []
    lockfile.agree(one, lambda own: [own, two])
    three = lock("c", linear="cpp/linear", rmsnorm="native/rmsnorm")
    (text,) = lockfile.conflicts([one, two, three])
    assert text == "linear cpu fp32: native/linear (source of native/li) on a; cpp/linear (source of cpp/linea) on c"
    edited = Lock("d", {k: replace(entry, digest="other") for k, entry in one.entries.items()})
    assert "(source other) on d" in lockfile.conflicts([one, edited])[0]
    with pytest.raises(LockError, match=r"native/linear .* on rank 0; cpp/linear .* on rank 2"):
        lockfile.agree(one, lambda own: [own, two, three])


@pytest.mark.parametrize("disturbed", [False, True])
def test_disturbed_tables_are_found_and_noise_is_not(disturbed: bool, tmp_path: Path) -> None:
    """Catches P61: ranks that choose by tables of their own, and wait for each other for ever; jitter of 2 % must not
    part them."""
    arguments = (str(RANKS), str(tmp_path / "rendezvous"), str(tmp_path), str(disturbed))
    module = "tests.kernels.registry.agreement_worker"
    processes = [
        subprocess.Popen(
            [warm.executable(), "-m", module, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(RANKS)
    ]
    try:
        answers = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), answers
    if not disturbed:
        assert [out.strip() for out, _ in answers] == ["agreed"] * RANKS
        return
    for out, _ in answers:
        assert "ranks choose differently for 1 calls" in out
        assert "hidden=64, tokens=4: alpha/scratch" in out
        assert "on rank 0, rank 2; beta/scratch" in out

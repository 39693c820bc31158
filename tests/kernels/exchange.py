"""Starts a group of processes that exchange tokens, and collects what they say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def run_group(ranks: int, mode: str, folder: Path, *paths: Path) -> None:
    """Run `exchange_worker` in `ranks` processes, with `paths` on their import path; raise AssertionError if one
    fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    command = [warm.executable(), "-m", "tests.kernels.exchange_worker"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder / f"group-{mode}-{ranks}"), mode],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [worker.communicate(timeout=TIMEOUT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, text in enumerate(texts):
        assert text.rstrip().endswith("good"), f"rank {rank} of {ranks}:\n{text}"

"""Workers of a verification: where they come from, and what they see of their caller."""

from __future__ import annotations

import os

import pytest
import torch

from rapid_llm.verify import pool


def do(task: str) -> pool.Done:
    """A variable, or a sum on the GPU; the worker ends after it."""
    return pool.Done(float(torch.ones(3, device="cuda").sum()) if task == "cuda" else os.environ.get(task), last=True)


def begin(lock: str) -> None:
    torch.set_num_threads(1)


def test_workers_see_the_variables_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: workers with the environment of the first one, which other records and settings were for."""
    for value in ("first", "second"):
        monkeypatch.setenv("RAPID_LLM_TEST_POOL", value)
        assert list(pool.run(["RAPID_LLM_TEST_POOL", "RAPID_LLM_NONE"], do, begin, jobs=1, limit_s=60)) == [value, None]


@pytest.mark.gpu
def test_workers_may_use_cuda_although_their_caller_does() -> None:
    """Catches: workers forked from a process that has used CUDA, in which every call of it fails."""
    assert float(torch.ones(2, device="cuda").sum()) == 2
    assert list(pool.run(["cuda", "cuda"], do, begin, jobs=1, limit_s=60)) == [3.0, 3.0]

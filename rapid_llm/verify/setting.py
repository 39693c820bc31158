"""What surrounds a call under test: one compute thread, poisoned allocations, and vast tensors for one process only."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.guard import FINITE


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: cases are small, and on a busy machine threads that wait for each other cost dearly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_vast: list[str] = [os.devnull]


def share(file: str) -> None:
    """Hold a lock on `file` during every case of vast tensors: of several processes on one GPU one may have them.

    The system takes the lock from a process that dies.
    """
    _vast[0] = file


@contextlib.contextmanager
def alone(case: Case, device: torch.device) -> Iterator[None]:
    """Within, no other process has vast tensors, if `case` has; the GPU's memory is free for others afterwards."""
    if not case.vast or device.type != "cuda":
        yield
        return
    with open(_vast[0], "ab") as file:
        if _vast[0] != os.devnull:
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


class PoisonedAllocations(TorchDispatchMode):  # type: ignore[misc]
    """While active, memory that torch hands out uninitialised holds NaN, or an unlikely integer.

    finite: it holds a number instead, for what a maximum with NaN would hide.
    """

    def __init__(self, finite: bool = False) -> None:
        super().__init__()
        self._fill = FINITE if finite else float("nan")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler at the first call, which takes seconds, to keep this class out of it."""
        return False

    _EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self._EMPTY and isinstance(result, Tensor) and result.device.type != "meta":
            if result.dtype.is_floating_point:
                result.fill_(self._fill)
            elif result.dtype in (torch.int32, torch.int64):
                result.fill_(-(2**31) + 7)
        return result

"""Capture of CUDA graphs that leaves no trace where it fails.

torch (2.11 to 2.13) ends a failed capture half-way: its random generators go on believing that they are captured, so
that the next `torch.randn` raises, and the current stream stays the one that was captured. Both are put right here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["capture"]


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, *, pool: tuple[int, int] | None = None
) -> Iterator[None]:
    """`with capture(graph, stream)` records what the body enqueues on `stream`, which is current in it.

    pool: of memory that graphs share which never run at once (`torch.cuda.graph_pool_handle()`); None is a new one.

    Raises what the body raises, or torch's RuntimeError where CUDA cannot capture what it did; the current stream and
    the random generators are then as before, and `graph` is of no use.
    """
    import torch

    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                yield
        except BaseException:
            torch.cuda.synchronize(stream.device)
            _end_for_generators(stream)
            raise


def _end_for_generators(stream: torch.cuda.Stream) -> None:
    """Only the end of a capture that succeeds tells torch's generators that it is over: make one, of nothing."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            pass

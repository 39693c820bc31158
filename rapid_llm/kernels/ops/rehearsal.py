"""Compiles in parallel what calls are going to launch, and performs none of it.

A Triton row is compiled anew for each combination of sizes, strides and alignments that it tells apart: some twenty for
a full set of an op's cases, a few for each size of a model's steps. Made one after another at first launch they take
most of a run. Here the calls are made once with their launches recorded instead of performed, and each recorded launch
is compiled in a pool of threads. A compilation that fails is left for the real launch to report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rapid_llm.kernels.ops import triton_support
from rapid_llm.platform import default_threads

MAX_THREADS: Final = 16


def rehearse(calls: Callable[[], None], *, load: bool = False, threads: int | None = None) -> bool:
    """Run `calls` with every Triton launch of this thread compiled, in parallel, but not performed.

    load: put the kernels on the current device too, so that a graph's capture finds them there. False, and nothing is
    called, where this Triton cannot compile ahead.
    """
    triton_support.load()
    mode = getattr(vars(triton_support)["triton"], "AsyncCompileMode", None)
    if triton_support.MISSING_REASON or mode is None:
        return False
    compiled: dict[int, Any] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        made = kernel.warmup(*args, grid=grid, **meta)
        compiled[id(made)] = made

    count = min(default_threads(), MAX_THREADS) if threads is None else threads
    with ThreadPoolExecutor(count) as pool, mode(pool, ignore_errors=True):
        triton_support.record_launches(compile_only)
        try:
            calls()
        finally:
            triton_support.record_launches(None)
    if load:
        for made in compiled.values():
            _load(made)
    return True


def _load(made: Any) -> None:
    """Put a kernel, or the promise of one, on the current device."""
    with contextlib.suppress(Exception):  # too big, or not compiled: the real launch says so, and goes its own way
        kernel = made.result() if hasattr(made, "result") else made
        kernel.run  # noqa: B018 - reading it loads the binary

"""Compiles in parallel what a conformance run on a GPU is going to launch.

A full set of cases asks a Triton row for some twenty compilations, one for each combination of sizes, strides and
alignments that the row tells apart. Made one after another at first launch they take most of the run. Here the calls
are made once with their launches recorded instead of performed, each recorded launch is compiled in a pool of
threads, and the real run finds everything in Triton's cache. A compilation that fails is left for the real run to
report.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rapid_llm.kernels.ops import triton_support
from rapid_llm.platform import default_threads

MAX_THREADS: Final = 16


def rehearse(calls: Callable[[], None]) -> bool:
    """Run `calls` with every Triton launch compiled, in parallel, but not performed; False if this Triton cannot."""
    mode = getattr(vars(triton_support)["triton"], "AsyncCompileMode", None)
    if triton_support.MISSING_REASON or mode is None:
        return False

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=grid, **meta)

    with ThreadPoolExecutor(min(default_threads(), MAX_THREADS)) as pool, mode(pool, ignore_errors=True):
        triton_support.record_launches(compile_only)
        try:
            calls()
        finally:
            triton_support.record_launches(None)
    return True

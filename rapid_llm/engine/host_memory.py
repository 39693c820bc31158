"""How this process's allocator keeps the memory of one step for the next.

A step on a CPU frees tens of megabytes of activations and asks for the same again. glibc hands blocks of such sizes
back to the kernel, and takes them anew, zeroed page by page, at the next step: on a prefill of 512 tokens of a 135M
model that is up to 100,000 page faults and a quarter of the time. Whether it does so depends on what was freed before
(its threshold adapts), so the same engine could be fast in one process and slow in the next.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

LARGEST_KEPT: Final = 32 << 20
"""Bytes of a block up to which it comes from the heap: the most that glibc allows."""

KEPT: Final = 256 << 20
"""Free bytes at the end of the heap above which they go back to the kernel."""

_OWN_SETTINGS: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Have glibc keep freed blocks of up to `LARGEST_KEPT` bytes, `KEPT` bytes in all; whether that was done.

    Holds for the process. Not where the user has set glibc's variables for it, and not with another C library; an
    allocator that was put before glibc's (jemalloc, tcmalloc) has a policy of its own and is not touched by it.
    """
    if any(name in os.environ for name in _OWN_SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    kept = library.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT) and library.mallopt(_M_TRIM_THRESHOLD, KEPT)
    return bool(kept)

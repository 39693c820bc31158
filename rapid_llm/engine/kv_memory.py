"""How large the key/value cache is, and its tensors."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

import torch

from rapid_llm.models.attention_metadata import KVCache

from .options import KV_CONTEXTS, KV_MEMORY_SHARE, PAGE_SIZE


def cache_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """The dtype of keys and values for the option of that name; None for the activations'."""
    return torch.float8_e4m3fn if kv_cache_dtype == "fp8" else None


class CacheShape(Protocol):
    """What of a model's configuration decides the size of its cache."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def bytes_per_token(shape: CacheShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return int(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize)


def choose_tokens(requested: int | None, max_model_len: int, token_bytes: int, free_bytes: int | None) -> int:
    """Tokens of the cache, a multiple of the page size.

    By default room for `KV_CONTEXTS` full contexts, in at most `KV_MEMORY_SHARE` of the free memory. Raises
    `ValueError` where a requested size, or one page, exceeds the free memory (None: unknown, and not checked).
    """
    if requested is not None:
        tokens = -(-requested // PAGE_SIZE) * PAGE_SIZE
        if free_bytes is not None and tokens * token_bytes > free_bytes:
            raise ValueError(
                f"kv_cache_tokens={requested} takes {tokens * token_bytes / 2**30:.2f} GiB and "
                f"{free_bytes / 2**30:.2f} GiB are free: at most {free_bytes // token_bytes} fit"
            )
        return tokens
    tokens = -(-KV_CONTEXTS * max_model_len // PAGE_SIZE) * PAGE_SIZE
    if free_bytes is not None:
        tokens = min(tokens, int(free_bytes * KV_MEMORY_SHARE) // token_bytes // PAGE_SIZE * PAGE_SIZE)
        if tokens < PAGE_SIZE:
            raise ValueError(
                f"{free_bytes / 2**20:.0f} MiB of free memory leave no room for a key/value cache of even {PAGE_SIZE} "
                f"tokens ({token_bytes} bytes each); free some, or use a smaller model or dtype"
            )
    return tokens


def allocate(shape: CacheShape, num_pages: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """One (k, v) pair a layer, each (num_pages, PAGE_SIZE, kv_heads, head_dim), zeros.

    On a CPU the memory is an anonymous mapping: a page of it is taken from the machine only when it is first written,
    so an unused part of the cache costs nothing.
    """
    dims = (shape.num_layers, 2, num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    if device.type == "cpu":
        count = num_pages * PAGE_SIZE * bytes_per_token(shape, dtype) // dtype.itemsize
        whole = torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(dims)
    else:
        whole = torch.zeros(dims, dtype=dtype, device=device)
    return [(layer[0], layer[1]) for layer in whole]


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take on `device`; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left in torch's pool counts as free
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [*_group_headroom(), _available()]
    known = [limit for limit in limits if limit is not None]
    return max(min(known), 0) if known else None


def _available() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_headroom() -> list[int]:
    """What each enclosing control group (v2, or v1's memory controller) still grants; its page cache is free."""
    rooms = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        if controllers:
            root, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            limit, used = (_read(group / name).strip() for name in names)
            if limit.isdigit() and used.isdigit():
                rooms.append(int(limit) - int(used) + _reclaimable(group))
    return rooms


def _reclaimable(group: Path) -> int:
    for line in _read(group / "memory.stat").splitlines():
        if line.startswith(("inactive_file ", "total_inactive_file ")):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent, or hidden in a sandbox: the fact is then unknown
        return ""

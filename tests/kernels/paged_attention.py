"""A slow, obvious paged attention in float64, and inputs for it: what the attention tests compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Paged:
    """A cache with one block table row per sequence; what no sequence owns is NaN."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def make(
        cls,
        lengths: list[int],
        kv_heads: int,
        dim: int,
        *,
        page: int = 4,
        scattered: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> Paged:
        g = torch.Generator().manual_seed(seed)
        used = [-(-length // page) for length in lengths]
        pages = sum(used) + 2
        order = torch.randperm(pages - 1, generator=g) + 1 if scattered else torch.arange(1, pages)
        table = torch.full((len(lengths), max([*used, 1]) + 1), 2**31 - 1, dtype=torch.int32)  # never to be followed
        k_cache, v_cache = torch.full((2, pages, page, kv_heads, dim), float("nan"))
        taken = 0
        for i, (length, count) in enumerate(zip(lengths, used, strict=True)):
            own = order[taken : taken + count]
            taken += count
            table[i, :count] = own.int()
            for position in range(length):
                at = int(own[position // page]), position % page
                k_cache[at] = torch.randn(kv_heads, dim, generator=g)
                v_cache[at] = torch.randn(kv_heads, dim, generator=g)
        return cls(
            k_cache.to(device, dtype),
            v_cache.to(device, dtype),
            table.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
        )

    def keys(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(length, kv_heads, dim) keys and values of one sequence, float64."""
        page = self.k_cache.shape[1]
        at = torch.arange(int(self.seq_lens[sequence]), device=self.k_cache.device)
        pages = self.block_table[sequence].long()[at // page]
        return self.k_cache[pages, at % page].double(), self.v_cache[pages, at % page].double()


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """(heads, dim) attention of one (heads, dim) query over the last `window` of the first `seen` keys, float64."""
    if seen <= 0:
        return torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[0] // keys.shape[1]
    rows = []
    first = max(seen - window, 0) if window else 0
    for head, q in enumerate(query.double()):
        scores = keys[first:seen, head // group] @ q * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = (scores - scores.max()).exp()
        rows.append(weights @ values[first:seen, head // group] / weights.sum())
    return torch.stack(rows)


def decode(query: torch.Tensor, paged: Paged, scale: float, *limits: float) -> torch.Tensor:
    """limits: window and softcap."""
    lengths = paged.seq_lens.tolist()
    return torch.stack([attend(q, *paged.keys(i), lengths[i], scale, *limits) for i, q in enumerate(query)])


def prefill(query: torch.Tensor, paged: Paged, chunks: list[int], scale: float, *limits: float) -> torch.Tensor:
    """limits: window and softcap."""
    result = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    begin = 0
    for i, chunk in enumerate(chunks):
        keys, values = paged.keys(i)
        for t in range(chunk):
            result[begin + t] = attend(query[begin + t], keys, values, len(keys) - chunk + t + 1, scale, *limits)
        begin += chunk
    return result


def offsets(chunks: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *chunks], device=device).cumsum(0).int()

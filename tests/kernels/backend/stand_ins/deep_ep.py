"""DeepEP's Buffer within a node: what its kernels do, with objects that every rank gathers."""

import torch
from torch import distributed


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks


class Buffer:
    made = 0

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24):
        assert num_rdma_bytes == 0
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.num_nvl_bytes = num_nvl_bytes
        Buffer.made += 1

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    @staticmethod
    def get_combine_config(num_ranks):
        return Config()

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert topk_idx.dtype == torch.int64
        owner = topk_idx.div(num_experts // self.size, rounding_mode="floor")
        goes = torch.stack([(owner == r).any(1) for r in range(self.size)], 1)
        experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return goes.sum(0).int(), None, experts, goes, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.dtype == torch.bfloat16
        assert x.shape[1] * 2 <= self.num_nvl_bytes
        assert topk_weights.dtype == torch.float32
        assert torch.equal(is_token_in_rank.sum(0).int(), num_tokens_per_rank)
        local = len(num_tokens_per_expert) // self.size
        every = self._gather((x, topk_idx, topk_weights, is_token_in_rank))
        prefix = torch.stack([goes.sum(0) for *_, goes in every]).cumsum(0).int()
        assert int(prefix[-1, self.rank]) <= num_worst_tokens
        recv = torch.full((num_worst_tokens, x.shape[1]), float("nan"), dtype=x.dtype)
        ids = torch.full((num_worst_tokens, topk_idx.shape[1]), -1)
        weights = torch.full(ids.shape, float("nan"))
        source = torch.full((num_worst_tokens,), 12345, dtype=torch.int32)
        row = 0
        for rows, chosen, factors, goes in every:
            for token in goes[:, self.rank].nonzero()[:, 0].tolist():
                mine = chosen[token].div(local, rounding_mode="floor") == self.rank
                recv[row], source[row] = rows[token], token
                ids[row] = torch.where(mine, chosen[token] - self.rank * local, -1)
                weights[row] = torch.where(mine, factors[token], 0.0)
                row += 1
        handle = (prefix, None, None, source, is_token_in_rank, torch.zeros(x.shape[0], self.size, dtype=torch.int32))
        return recv, ids, weights, [], handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        prefix, _, _, source, goes, _ = handle
        total = torch.zeros(goes.shape[0], x.shape[1])
        for rank, (rows, tokens, ends) in enumerate(self._gather((x, source, prefix[:, :]))):
            stop = int(ends[self.rank, rank])
            start = int(ends[self.rank - 1, rank]) if self.rank else 0
            for row in range(start, stop):
                total[tokens[row]] += rows[row].float()
        return total.bfloat16(), None, None

    def _gather(self, mine):
        every = [None] * self.size
        distributed.all_gather_object(every, mine, self.group)
        return every

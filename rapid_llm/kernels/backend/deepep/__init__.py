"""DeepEP: expert-parallel exchange over NVLink. Serves `comm.dispatch` and `comm.combine` within one node."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from rapid_llm.kernels.backend._library import Call, Library, Recipe
from rapid_llm.kernels.registry.probes import Probe

RECIPE: Final = Recipe(
    command="pip install --no-build-isolation 'git+https://github.com/deepseek-ai/DeepEP.git@v1.2.1'",
    url="https://github.com/deepseek-ai/DeepEP",
    notes=(
        "needs GPUs of SM 90 with NVLink between all of them, torch with CUDA and a CUDA toolkit from 12.3 on",
        "NVSHMEM is not needed within one node",
    ),
)

_BUFFER: Final = "deep_ep:Buffer"

LIBRARY: Final = Library(
    module="deep_ep",
    distributions=("deep_ep",),
    minimum="1.2",
    below="2",
    recipe=RECIPE,
    calls=MappingProxyType(
        {
            "Buffer": Call(_BUFFER, positional=("group", "num_nvl_bytes", "num_rdma_bytes")),
            "get_dispatch_config": Call(f"{_BUFFER}.get_dispatch_config", positional=("num_ranks",)),
            "get_combine_config": Call(f"{_BUFFER}.get_combine_config", positional=("num_ranks",)),
            "get_dispatch_layout": Call(f"{_BUFFER}.get_dispatch_layout", positional=("topk_idx", "num_experts")),
            "dispatch": Call(
                f"{_BUFFER}.dispatch",
                positional=("x",),
                keywords=(
                    *("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"),
                    *("topk_idx", "topk_weights", "num_worst_tokens"),
                ),
            ),
            "combine": Call(f"{_BUFFER}.combine", positional=("x", "handle")),
        }
    ),
)


def available() -> Probe:
    """Whether DeepEP is here, of a version that is taken, and imports in a child process."""
    return LIBRARY.probe()

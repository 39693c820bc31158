"""FlashMLA: attention over DeepSeek's latent cache. Serves `attention.mla_decode`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from rapid_llm.kernels.backend._library import Call, Library, Recipe
from rapid_llm.kernels.registry.probes import Probe

RECIPE: Final = Recipe(
    command="pip install --no-build-isolation 'git+https://github.com/deepseek-ai/FlashMLA.git'",
    url="https://github.com/deepseek-ai/FlashMLA",
    notes=(
        "needs a GPU of SM 90, torch with CUDA and a CUDA toolkit from 12.8 on",
        "FLASH_MLA_DISABLE_SM100=1 where the toolkit is older than 12.9",
    ),
)

LIBRARY: Final = Library(
    module="flash_mla",
    distributions=("flash_mla",),
    minimum="1.0",
    below="2",
    recipe=RECIPE,
    calls=MappingProxyType(
        {
            # All are called 1.0.0. The first ones name these arguments, later ones take anything and ignore it.
            "metadata": Call(
                "flash_mla:get_mla_metadata",
                positional=("cache_seqlens", "num_heads_per_head_k|num_q_tokens_per_head_k", "num_heads_k"),
            ),
            "decode": Call(
                "flash_mla:flash_mla_with_kvcache",
                positional=("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
                keywords=("num_splits", "softmax_scale", "causal"),
            ),
        }
    ),
)


def available() -> Probe:
    """Whether FlashMLA is here, of a version that is taken, and imports in a child process."""
    return LIBRARY.probe()

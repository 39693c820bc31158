"""The ops of this package, one folder a group; importing this declares them all and imports no kernel."""

from . import activation, attention, elementwise, embedding, gemm, kvcache, layernorm, moe, rope, sampling

__all__ = [
    "activation",
    "attention",
    "elementwise",
    "embedding",
    "gemm",
    "kvcache",
    "layernorm",
    "moe",
    "rope",
    "sampling",
]

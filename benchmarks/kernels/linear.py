"""`linear`: dense and quantised weights, a few tokens and many. `python -m benchmarks.kernels.linear [--quick]`."""

from __future__ import annotations

import sys
from typing import Any

from rapid_llm.bench.sweep import SkipCaseError, arms_of, benchmark, parametrize

from .driver import main
from .peers import compiled, plain
from .values import normal

SHAPES = {
    "smollm2-135m qkv": (960, 576),
    "smollm2-135m down": (576, 1536),
    "llama3-8b qkv": (6144, 4096),
    "llama3-8b gate_up": (28672, 4096),
    "llama3-8b down": (4096, 14336),
}
"""Outputs and inputs of a layer's weights."""

QUANTISED = ("q8_0", "q4_0", "q4_k", "q6_k", "fp8_block128", "fp8_channel", "int8_channel", "int4_group64")
"""Formats that differ in how they are read; those left out are like one of them."""


def torch_linear(input: Any, weight: Any, bias: Any = None, scheme: str = "unquantized") -> Any:
    import torch

    if scheme != "unquantized":
        raise TypeError(f"torch multiplies dense weights, not {scheme}")
    return torch.nn.functional.linear(input, weight, bias)


PEERS = {"torch": plain(torch_linear), "torch.compile": compiled(torch_linear)}


@parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("bf16",))
@parametrize("scheme", full=("unquantized", *QUANTISED), quick=("unquantized",))
@parametrize("shape", full=tuple(SHAPES), quick=("llama3-8b qkv",))
@parametrize("tokens", full=(1, 8, 64, 512, 4096), quick=(1, 512))
@benchmark("row", arms=arms_of("linear", PEERS))
def linear(g: Any, dtype: str, scheme: str, shape: str, tokens: int) -> dict[str, Any]:
    from rapid_llm.kernels.ops.block_formats import FORMATS
    from rapid_llm.verify.formats import random_blocks

    outputs, inputs = SHAPES[shape]
    if scheme != "unquantized" and inputs % FORMATS[scheme].weights:
        raise SkipCaseError(f"{scheme} takes multiples of {FORMATS[scheme].weights} inputs, not {inputs}")
    weight = normal(g, (outputs, inputs), dtype, 0.05)
    if scheme != "unquantized":
        weight = random_blocks(g, outputs, inputs, scheme)
    return {"input": normal(g, (tokens, inputs), dtype), "weight": weight, "scheme": scheme}


if __name__ == "__main__":
    sys.exit(main(linear))

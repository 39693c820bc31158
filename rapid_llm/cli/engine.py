"""How the engine of `generate` and `chat` runs, beside device and dtype: the options and what they become."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same answer to the last bit, whatever else runs or ran.")
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse what prompts begin with. Default: on."),
]
Guesses = Annotated[
    int | None,
    typer.Option("--speculate", metavar="N", help="Guess up to N tokens ahead from the text itself; same answer."),
]

Quantization = Annotated[
    str | None, typer.Option(help="int8, int4 or fp8: quantise dense weights as they are loaded. Default: as they are.")
]
KVCacheDtype = Annotated[
    str | None,
    typer.Option("--kv-cache-dtype", help="fp8: keys and values of one byte. Default: auto, as the activations."),
]
LoadFormat = Annotated[
    str, typer.Option("--load-format", help="pt also reads weights that are pickles (.bin), running no code of theirs.")
]


CudaGraphs = Annotated[
    str | None,
    typer.Option(
        "--cuda-graphs",
        help="off: every step call by call. padded: the graphs' sizes without graphs, to look for a fault. "
        "Default: auto, graphs on a GPU.",
    ),
]


TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel", metavar="N", help="Compute the model by N processes, each on a GPU of its own. Default: 1."
    ),
]


def engine_options(
    *,
    deterministic: bool,
    prefix_caching: bool | None,
    speculate: int | None,
    cuda_graphs: str | None,
    kv_cache_dtype: str | None,
    tensor_parallel: int | None,
) -> dict[str, Any]:
    """What was given, under the names of `EngineOptions`."""
    given: dict[str, Any] = {}
    if deterministic:
        given["deterministic"] = True
    if prefix_caching is not None:
        given["enable_prefix_caching"] = prefix_caching
    if speculate is not None:
        given["speculative"] = {"method": "ngram", "num_tokens": speculate}
    if cuda_graphs is not None:
        given["cuda_graphs"] = cuda_graphs
    if kv_cache_dtype is not None:
        given["kv_cache_dtype"] = kv_cache_dtype
    if tensor_parallel is not None:
        given["tensor_parallel"] = tensor_parallel
    return given

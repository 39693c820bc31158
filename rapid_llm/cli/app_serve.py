"""`rapid-llm serve`: its arguments, its help, its examples."""

from __future__ import annotations

from typing import Annotated

import typer

from .app_generate import Context, Device, Dtype, Model, Threads
from .declare import example
from .engine import (
    CudaGraphs,
    Deterministic,
    Guesses,
    KVCacheDtype,
    LoadFormat,
    PrefixCaching,
    Quantization,
    TensorParallel,
    engine_options,
)
from .support import guarded


def offer(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=example(
            "rapid-llm serve",
            "rapid-llm serve --model Qwen/Qwen3-0.6B --host 0.0.0.0 --port 8080 --api-key @key.txt",
            "rapid-llm serve --max-model-len 4096 --kv-cache-tokens 32768 --max-running 16",
        )
    )(serve)


@guarded
def serve(
    model: Model = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of a model: random weights of a shape such as llama-3.2-1b, for tests.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests call the model. May be given several times. Default: as --model."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one and tells it.")] = 8000,
    replicas: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Run N whole engines behind one address, on Ray Serve; needs rapid-llm[replicas]."
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY|@FILE", help="Requests must bring it as a bearer token. May be given several times."),
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    load_format: LoadFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    max_model_len: Context = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the key/value cache holds. Default: by the free memory.")
    ] = None,
    max_running: Annotated[int | None, typer.Option(help="Most sequences in one step. Default: 64.")] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in one step; longer prompts come in pieces. Default: by the device.")
    ] = None,
    deterministic: Deterministic = False,
    prefix_caching: PrefixCaching = None,
    speculate: Guesses = None,
    cuda_graphs: CudaGraphs = None,
    tensor_parallel: TensorParallel = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(help="Most answers that are made or wait; more are refused with 429. Default: 256."),
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="Longest request. Default: 1 MiB, more where the context is long.")
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(help="How the model calls functions: hermes, llama3, mistral. Default: as its template says."),
    ] = None,
    shutdown_timeout: Annotated[
        float | None, typer.Option(help="Seconds that running answers get after SIGTERM or Ctrl-C. Default: 30.")
    ] = None,
    stall_timeout: Annotated[
        float | None, typer.Option(help="Seconds without a step after which /health says 503. Default: 60.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it; the page at / is a chat and a live report."""
    from .serve import run

    run(
        model=model,
        shape=shape,
        names=served_model_name,
        host=host,
        port=port,
        engine={
            "dtype": dtype,
            "quantization": quantization,
            "load_format": load_format,
            "device": device,
            "threads": threads,
            "max_model_len": max_model_len,
            "kv_cache_tokens": kv_cache_tokens,
            "max_running": max_running,
            "max_batch_tokens": max_batch_tokens,
            **engine_options(
                deterministic=deterministic,
                prefix_caching=prefix_caching,
                speculate=speculate,
                cuda_graphs=cuda_graphs,
                kv_cache_dtype=kv_cache_dtype,
                tensor_parallel=tensor_parallel,
            ),
        },
        server={
            "api_keys": api_key,
            "max_concurrent_requests": max_concurrent_requests,
            "max_body_bytes": max_body_bytes,
            "tool_format": tool_format,
            "shutdown_timeout": shutdown_timeout,
            "stall_timeout": stall_timeout,
        },
        log_level=log_level,
        replicas=replicas,
    )

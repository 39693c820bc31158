"""`rapid-llm bench`: its arguments, its help, its examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app_generate import Model, Threads
from .declare import Json, example
from .engine import CudaGraphs, KVCacheDtype, Quantization, TensorParallel
from .support import guarded


def measure(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=example(
            "rapid-llm bench --shape llama-3.2-1b --dtype bfloat16 --batch 1,16,64 --context 512,8192 --out new.json",
            "rapid-llm bench --shape smollm2-135m --peer transformers --rounds 5",
            "rapid-llm bench --shape llama-3.2-1b --compare old.json",
            "rapid-llm bench --model model.gguf --prefill 128,2048 --decode 0",
            "rapid-llm bench --serve local --shape llama-3.2-1b --rate 1,4,16 --ttft-slo 0.2 --itl-slo 0.02",
            "rapid-llm bench --serve http://127.0.0.1:8000 --rate 2",
        )
    )(bench)


@guarded
def bench(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as llama-3.1-8b: no download.")
    ] = None,
    model: Model = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS,...", help="Lengths of prompts whose first token is timed; 0: none. Default: 512."
        ),
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Steps of a decode run; 0: none. Default: 64.")] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,...", help="Sequences that decode together. Default: 1.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS,...", help="Tokens of each prompt behind decode. Default: 512.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Timed runs of each case. Default: 10.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no further round of a case after that; 3 are always run. Default: 60.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers: time it in the same rounds. May be repeated.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where a step's time goes, op by op.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier result file: exits with 1 where a case became slower.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(metavar="URL|local", help="Put load on a server: one that runs, or one that is started here."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Requests a second, Poisson; inf: all at once. Default: 1.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests at each rate. Default: 100.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of each request's prompt. Default: 512.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens of each answer. Default: 128.")] = None,
    ttft_slo: Annotated[
        float | None, typer.Option(help="Seconds in which a first token counts as in time, for goodput.")
    ] = None,
    itl_slo: Annotated[
        float | None, typer.Option(help="Seconds that each later token of an answer may take on the mean.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="What the server asks for.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    force_busy: Annotated[
        bool, typer.Option("--force-busy", help="Measure on a busy machine; the result says so.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. Default: auto.")] = None,
    quantization: Quantization = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N. Default: auto.")] = None,
    kv_cache_dtype: KVCacheDtype = None,
    tensor_parallel: TensorParallel = None,
    threads: Threads = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Most tokens of one step.")] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens of key/value cache. Default: what the cases need.")
    ] = None,
    cuda_graphs: CudaGraphs = None,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and random weights.")] = 0,
    json: Json = False,
) -> None:
    """Tokens a second of a whole engine, each beside its share of what memory and arithmetic permit; or a server's
    latency under load.

    Prefill: to the first token of a prompt. Decode: whole steps, each sampled token on the host. With --serve: requests
    that arrive by chance, time to the first token and between tokens. A busy machine is refused. Exits with 1 if
    nothing could be measured, if --compare finds a case slower, or if a request fails.
    """
    from .bench import run

    run(
        shape=shape,
        model=model,
        engine={
            "dtype": dtype,
            "quantization": quantization,
            "device": device,
            "kv_cache_dtype": kv_cache_dtype,
            "tensor_parallel": tensor_parallel,
            "threads": threads,
            "max_batch_tokens": max_batch_tokens,
            "kv_cache_tokens": kv_cache_tokens,
            "cuda_graphs": cuda_graphs,
        },
        offline={
            "prefill": prefill,
            "decode": decode,
            "batch": batch,
            "context": context,
            "rounds": rounds,
            "seconds": seconds,
            "peer": peer,
            "profile": profile or None,
            "compare": compare,
        },
        serving={
            "rate": rate,
            "requests": requests,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "ttft_slo": ttft_slo,
            "itl_slo": itl_slo,
            "api_key": api_key,
        },
        serve=serve,
        out=out,
        force_busy=force_busy,
        seed=seed,
        json=json,
    )

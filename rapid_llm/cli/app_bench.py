"""`rapid-llm bench`: its arguments, its help, its examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app_generate import Device, Dtype, Model, Threads
from .declare import Json, example
from .engine import Quantization
from .support import guarded


def measure(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=example(
            "rapid-llm bench --shape llama-3.2-1b --dtype bfloat16 --batch 1,16,64 --context 512,8192 --out new.json",
            "rapid-llm bench --shape smollm2-135m --peer transformers --rounds 5",
            "rapid-llm bench --shape llama-3.2-1b --compare old.json",
            "rapid-llm bench --model model.gguf --prefill 128,2048 --decode 0",
        )
    )(bench)


@guarded
def bench(
    shape: Annotated[
        str | None, typer.Option(help="A model's shape with random weights, such as llama-3.1-8b: no download.")
    ] = None,
    model: Model = None,
    prefill: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Lengths of prompts whose first token is timed. 0: none.")
    ] = "512",
    decode: Annotated[int, typer.Option(help="Steps of a decode run. 0: none.")] = 64,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences that decode together.")] = "1",
    context: Annotated[str, typer.Option(metavar="TOKENS,...", help="Tokens of each prompt behind decode.")] = "512",
    rounds: Annotated[int, typer.Option(help="Timed runs of each case.")] = 10,
    seconds: Annotated[float, typer.Option(help="Begin no further round of a case after that; 3 are always run.")] = 60,
    peer: Annotated[
        list[str] | None, typer.Option(help="transformers: time it in the same rounds. May be repeated.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where a step's time goes, op by op.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier result file: exits with 1 where a case became slower.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    force_busy: Annotated[
        bool, typer.Option("--force-busy", help="Measure on a busy machine; the result says so.")
    ] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    device: Device = "auto",
    threads: Threads = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Most tokens of one step.")] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens of key/value cache. Default: what the cases need.")
    ] = None,
    cuda_graphs: Annotated[str, typer.Option(help="auto, off, or padded: the same sizes without graphs.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts and random weights.")] = 0,
    json: Json = False,
) -> None:
    """Tokens a second of a whole engine, each beside its share of what memory and arithmetic permit.

    Prefill: to the first token of a prompt. Decode: whole steps, each sampled token on the host. A busy machine is
    refused. Exits with 1 if nothing could be measured, or if --compare finds a case slower.
    """
    from .bench import run

    options = {
        "dtype": dtype,
        "quantization": quantization,
        "device": device,
        "threads": threads,
        "max_batch_tokens": max_batch_tokens,
        "kv_cache_tokens": kv_cache_tokens,
        "cuda_graphs": cuda_graphs,
    }
    run(
        shape=shape,
        model=model,
        options={name: value for name, value in options.items() if value is not None},
        prefill=prefill,
        decode=decode,
        batch=batch,
        context=context,
        rounds=rounds,
        seconds=seconds,
        peers=peer or [],
        profile=profile,
        compare=compare,
        out=out,
        force_busy=force_busy,
        seed=seed,
        json=json,
    )

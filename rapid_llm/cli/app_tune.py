"""The commands of `rapid-llm kernels` that measure and pin choices: arguments, help, examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .declare import Json, example
from .support import guarded


def tune(kernels: typer.Typer) -> None:
    """Add the commands to the group."""
    kernels.command(
        "bench",
        epilog=example(
            "rapid-llm kernels bench linear --model smollm2-135m --scheme q4_1",
            "rapid-llm kernels bench --trace decisions.json --write user",
            "rapid-llm kernels bench rmsnorm --dim tokens=64 --dim hidden=4096 --dtype bf16",
            "rapid-llm kernels bench --row jit/rmsnorm --dim tokens=64 --dim hidden=4096 --watch",
        ),
    )(kernels_bench)
    kernels.command(
        "tune",
        epilog=example(
            "rapid-llm kernels tune rmsnorm --dim tokens=64 --dim hidden=4096",
            "rapid-llm kernels tune linear --model llama3-8b --quick --write user",
        ),
    )(kernels_tune)


Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")]
Dim = Annotated[list[str] | None, typer.Option(help="NAME=VALUE, a size of the call. May be repeated.")]


@guarded
def kernels_bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[OP|ROW ...]", help="Default: every op.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="A row, as above. May be repeated.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Measure the calls of this file of RAPID_LLM_TRACE.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Measure the calls of a model: a name, a GGUF file.")
    ] = None,
    dim: Dim = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16, ... Default: the device's usual one.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="How weights are quantised. Default: not at all.")] = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds for each call.")] = 20,
    seconds: Annotated[float, typer.Option(help="Time for each call.")] = 2.0,
    minutes: Annotated[float | None, typer.Option(help="Begin no call after that.")] = None,
    write: Annotated[
        str, typer.Option(help="user, shipped or a folder: where the times go. none: they are only shown.")
    ] = "none",
    watch: Annotated[bool, typer.Option("--watch", help="Measure again whenever the row's source changes.")] = False,
    json: Json = False,
) -> None:
    """Time the proven rows of ops against the row that dispatch chooses, cold, over the shapes that a model uses.

    With --write the times become records, by which dispatch ranks rows on this kind of device from then on; near ties
    leave its choice as it is. Exits with 1 if nothing was measured.
    """
    from .kernels_bench import bench

    bench(
        [*(names or []), *(row or [])],
        trace=trace,
        model=model,
        dims=dim or [],
        dtypes=dtype or [],
        schemes=scheme or [],
        device=device,
        quick=quick,
        rounds=rounds,
        seconds=seconds,
        minutes=minutes,
        write=write,
        watch=watch,
        json=json,
    )


@guarded
def kernels_tune(
    ops: Annotated[list[str], typer.Argument(metavar="OP ...", help="Ops whose native rows are tuned.")],
    trace: Annotated[Path | None, typer.Option(help="Tune for the calls of this file of RAPID_LLM_TRACE.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Tune for the calls of a model: a name, a GGUF file.")
    ] = None,
    dim: Dim = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16, ... Default: the device's usual one.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="How weights are quantised. Default: not at all.")] = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for each candidate.")] = 1.0,
    write: Annotated[
        str, typer.Option(help="user, shipped or a folder: where tiles go. none: they are only shown.")
    ] = "none",
    json: Json = False,
) -> None:
    """Search better tiles for native Triton kernels, for exactly the shapes given.

    Each candidate is timed in a process of its own against what the kernel does now; one that crashes or is wrong is
    out. What is faster beyond noise is proven by every case of the op before it is kept. Exits with 1 if no call could
    be tuned.
    """
    from .kernels_tune import tune

    tune(
        ops,
        trace=trace,
        model=model,
        dims=dim or [],
        dtypes=dtype or [],
        schemes=scheme or [],
        device=device,
        quick=quick,
        seconds=seconds,
        write=write,
        json=json,
    )

"""The commands of `rapid-llm kernels` that measure and pin choices: arguments, help, examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .declare import Json, example, group
from .support import guarded

lock = group("Decisions pinned in a file: export, replay, compare. RAPID_LLM_LOCK=FILE makes every command use one.")


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
    kernels.add_typer(lock, name="lock")


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
    leave its choice as it is. Without, a row that is named is timed even before it is proven. Exits with 1 if nothing
    was measured.
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


LockFile = Annotated[Path, typer.Argument(metavar="FILE", help="A file of decisions.")]


@lock.command(
    "export",
    epilog=example(
        "rapid-llm kernels lock export rapid-llm.lock --model smollm2-135m-instruct",
        "rapid-llm kernels lock export rapid-llm.lock --trace decisions.json",
    ),
)
@guarded
def lock_export(
    file: LockFile,
    trace: Annotated[Path | None, typer.Option(help="The calls of this file of RAPID_LLM_TRACE.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="What this model binds: a name, a file.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="Of the model: auto, cpu, cuda or cuda:N.")] = "auto",
    json: Json = False,
) -> None:
    """Write which row each call runs here, with the digest of the row's source."""
    from .kernels_lock import export

    export(file, trace=trace, model=model, dtype=dtype, device=device, json=json)


@lock.command("replay", epilog=example("rapid-llm kernels lock replay rapid-llm.lock"))
@guarded
def lock_replay(file: LockFile, json: Json = False) -> None:
    """Check that every pinned row can run its call here, and is what it was.

    Exits with 1 and names each that isn't.
    """
    from .kernels_lock import replay

    replay(file, json=json)


@lock.command(
    "diff",
    epilog=example("rapid-llm kernels lock diff old.lock new.lock", "rapid-llm kernels lock diff rapid-llm.lock"),
)
@guarded
def lock_diff(
    file: LockFile,
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="Default: what would be chosen here.")] = None,
    json: Json = False,
) -> None:
    """Compare two files of decisions, or one with what dispatch chooses for its calls here.

    Exits with 1 if they differ.
    """
    from .kernels_lock import diff

    diff(file, other, json=json)

"""Every command of `rapid-llm`: its arguments, its help, its example. What a command does is in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app_author import author
from .app_bench import measure
from .app_cache import cache
from .app_generate import Model, Threads, speak
from .app_models import models
from .app_serve import offer
from .app_tune import tune
from .declare import Json
from .declare import example as _example
from .declare import group as _group
from .support import guarded

app = _group("LLM inference in which every operator is a declared, verified and measured choice.")
kernels = _group("Implementations of each operator: which there are, which runs.")
speak(app)
measure(app)
offer(app)
author(kernels)
tune(kernels)
app.add_typer(kernels, name="kernels")
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        from .version import version

        print(f"rapid-llm {version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=_example("rapid-llm doctor", "rapid-llm doctor --env", "rapid-llm doctor --json"))
@guarded
def doctor(
    env: Annotated[bool, typer.Option("--env", help="Document every environment variable, and what is set.")] = False,
    json: Json = False,
) -> None:
    """Check this machine and installation.

    Exits with 1 if something is wrong; each finding comes with its fix.
    """
    from .doctor import run

    run(env=env, json=json)


@app.command(
    epilog=_example(
        "rapid-llm diff",
        'rapid-llm diff --a native --b "linear=acme/linear.q4_1"',
        'rapid-llm diff --a "native dtype=float32" --b "dtype=bfloat16 device=cuda"',
        "rapid-llm diff --a hf --b native",
        "rapid-llm diff --replay rapid-llm-diff.safetensors",
    )
)
@guarded
def diff(
    a: Annotated[
        str, typer.Option(help="OP=ROW, BACKEND or ROW for all ops, dtype=, device=, dequantised; or hf.")
    ] = "native",
    b: Annotated[str, typer.Option(help="As --a. Default: what the engine runs.")] = "",
    model: Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What both read. May be repeated. Default: three texts.")
    ] = None,
    threads: Threads = None,
    case: Annotated[str, typer.Option(help="Where the worst wrong call goes.")] = "rapid-llm-diff.safetensors",
    plot: Annotated[str | None, typer.Option(help="Draw error by layer to this PNG; needs matplotlib.")] = None,
    replay: Annotated[str | None, typer.Option(help="Run the call of this case file again.")] = None,
    json: Json = False,
) -> None:
    """Find the row that makes two configurations of a model differ.

    From the whole model to the layer, the op and the row. Exits with 1 if a row is out of its error bound.
    """
    from .diff import run

    run(a=a, b=b, model=model, prompts=prompt or [], threads=threads, case=case, plot=plot, replay=replay, json=json)


KernelDevice = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.")]


@kernels.command("list", epilog=_example("rapid-llm kernels list", "rapid-llm kernels list --op linear --json"))
@guarded
def kernels_list(
    op: Annotated[str | None, typer.Option(help="Only the rows of this op.")] = None,
    device: KernelDevice = None,
    json: Json = False,
) -> None:
    """List every row and whether it can run here."""
    from .kernels import list_rows

    list_rows(op=op, device=device, json=json)


@kernels.command(
    "explain",
    epilog=_example(
        "rapid-llm kernels explain rmsnorm",
        "rapid-llm kernels explain linear --scheme q4_1 --dim tokens=1 --dim in_features=576 --prepack",
    ),
)
@guarded
def kernels_explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, such as rmsnorm or attention.decode.")],
    device: KernelDevice = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, ... Default: the device's usual one.")] = None,
    scheme: Annotated[str | None, typer.Option(help="How the weight is quantised, for ops that have a weight.")] = None,
    dim: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, a size of the call. May be repeated.")] = None,
    allow: Annotated[list[str] | None, typer.Option(help="A rounding that is permitted, such as weight:bf16.")] = None,
    prepack: Annotated[bool, typer.Option("--prepack", help="Weights may be packed into a row's own form.")] = False,
    backend: Annotated[str | None, typer.Option(help="A backend or row to force.")] = None,
    json: Json = False,
) -> None:
    """Say which row a call takes, and why.

    Of every other row: why it is out, and what would admit it. Exits with 1 if no row can run the call.
    """
    from .kernels import explain_op

    explain_op(
        op,
        device=device,
        dtype=dtype,
        scheme=scheme,
        dims=dim or [],
        allow=allow or [],
        prepack=prepack,
        backend=backend,
        json=json,
    )


@kernels.command(
    "verify",
    epilog=_example(
        "rapid-llm kernels verify",
        "rapid-llm kernels verify rmsnorm jit/scale --dtype bf16",
        "rapid-llm kernels verify --stale",
        "rapid-llm kernels verify --device cuda --write records --json",
    ),
)
@guarded
def kernels_verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[ROW|OP|BACKEND ...]", help="What to prove. Default: every row.")
    ] = None,
    device: KernelDevice = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype. May be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small set of cases, which proves nothing.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Only rows without a record of their present source.")] = False,
    write: Annotated[
        str, typer.Option(metavar="WHERE", help="user, shipped, none, a .json file or a folder: where proofs go.")
    ] = "user",
    jobs: Annotated[
        int | None, typer.Option(help="Processes; 0 is this one. Default: what this machine grants.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a row is taken to hang.")] = 300.0,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Make one saved call again, and nothing else.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Try rows on what this model feeds them, and nothing else.")
    ] = None,
    json: Json = False,
) -> None:
    """Prove rows on this machine: every case against a float64 oracle, under derived bounds.

    A proof holds until the row's source changes, and lets dispatch choose the row. Exits with 1 if a row is wrong or
    not proven, or if nothing was.
    """
    from .kernels_verify import activations as record
    from .kernels_verify import replay_file, verify

    if activations is not None:
        record(activations, device=device, json=json)
        return
    if replay is not None:
        replay_file(replay, device=device, json=json)
        return
    verify(
        names or [],
        device=device,
        dtypes=dtype or [],
        quick=quick,
        stale=stale,
        write=write,
        jobs=jobs,
        limit=limit,
        json=json,
    )

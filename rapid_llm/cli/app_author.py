"""The commands of `rapid-llm kernels` for whoever writes kernels: arguments, help, examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .declare import Json, example
from .support import guarded


def author(kernels: typer.Typer) -> None:
    """Add the commands to the group."""
    kernels.command(
        "new",
        epilog=example(
            "rapid-llm kernels new gelu --group activation --path triton",
            'rapid-llm kernels new gelu --group activation --path jit --why "needs inline PTX" --dry-run',
            'rapid-llm kernels new gelu --group activation --path external --library flashinfer --why "it ships one"',
        ),
    )(kernels_new)
    kernels.command(
        "check",
        epilog=example(
            "rapid-llm kernels check",
            "rapid-llm kernels check rapid_llm/kernels/csrc/elementwise",
            "rapid-llm kernels check path/to/my_package --json",
        ),
    )(kernels_check)
    kernels.command(
        "build",
        epilog=example(
            "rapid-llm kernels build jit/scale --sm 90",
            "rapid-llm kernels build rmsnorm --sm 80 --sm 90 --json",
            "rapid-llm kernels build --all",
            "rapid-llm kernels build --compile-commands compile_commands.json",
        ),
    )(kernels_build)
    kernels.command("doctor", epilog=example("rapid-llm kernels doctor", "rapid-llm kernels doctor --json"))(
        kernels_doctor
    )


@guarded
def kernels_new(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's id. One that exists gets only a new row.")],
    path: Annotated[str, typer.Option(help="triton, jit, nvrtc, aot, external or cpp.")],
    group: Annotated[str | None, typer.Option(help="The folder of a new op: elementwise, activation, ...")] = None,
    why: Annotated[str | None, typer.Option(help="Why the kernel isn't Triton. Asked for on a terminal.")] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make a package of its own there, or name the checkout.")
    ] = None,
    library: Annotated[str | None, typer.Option(help="For external: the module that is imported.")] = None,
    variant: Annotated[str | None, typer.Option(help="Names a further row of an op: jit/linear.VARIANT.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files.")] = False,
    json: Json = False,
) -> None:
    """Write the files of a kernel that passes its tests at once, with a body to replace.

    In a checkout of this repository the kernel is added to it; anywhere else it becomes a package of its own, which
    rapid-llm finds through the entry point rapid_llm.kernels. Nothing that exists is overwritten.
    """
    from .kernels_new import new

    new(
        op,
        group=group,
        path=path,
        why=why,
        into=into,
        library=library,
        variant=variant,
        dry_run=dry_run,
        json=json,
    )


@guarded
def kernels_check(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATHS]", help="Files or folders. Default: all of this project.")
    ] = None,
    json: Json = False,
) -> None:
    """Check the conventions of kernels, in this repository or in a package of its own.

    Exits with 1 if there is a finding; each comes with its place and its fix. A comment
    "# check: allow RULE: REASON" beside the place allows it; without a reason it is a finding itself.
    """
    from .kernels_check import check

    check(paths or [], json=json)


@guarded
def kernels_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[ROW|OP ...]", help="Rows, ops, or paths: jit, nvrtc, cpp, aot.")
    ] = None,
    sm: Annotated[
        list[str] | None, typer.Option(help="An SM version to build for, such as 90. Default: the GPUs here.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every row of the paths jit, nvrtc and cpp.")] = False,
    compile_commands: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write how each source is compiled, for editors.")
    ] = None,
    json: Json = False,
) -> None:
    """Compile rows ahead of their first use, on this machine or for another's GPU.

    Exits with 1 if one fails, with the compiler's first error and the log's path. The extension (aot) is built only
    where it is named.
    """
    from .kernels_build import build

    build(names or [], sm=sm or [], every=every, compile_commands=compile_commands, json=json)


@guarded
def kernels_doctor(json: Json = False) -> None:
    """Check what compiled kernels need: compilers, the store, the extension, external libraries, Triton.

    Exits with 1 if something is wrong; each finding is one cause with one command that mends it.
    """
    from .kernels_doctor import doctor

    doctor(json=json)

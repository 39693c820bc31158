"""The commands of `rapid-llm cache`: arguments, help, examples. What they do is in `cache.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .declare import Json, example, group
from .support import guarded

cache = group("Compiled kernels: list, carry to another machine, check, clean up.")


@cache.command("list", epilog=example("rapid-llm cache list", "rapid-llm cache list --json"))
@guarded
def cache_list(json: Json = False) -> None:
    """List the compiled kernels: package, user cache, temporary directory.

    stale: the source has changed, or a newer one took its place; unknown: the source is not in this package.
    """
    from .cache import list_artifacts

    list_artifacts(json=json)


@cache.command(
    "export", epilog=example("rapid-llm cache export kernels.tar", "rapid-llm cache export norms.tar --name cpp/norms")
)
@guarded
def cache_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tar file to write.")],
    name: Annotated[str | None, typer.Option(help="Only this kernel: a name, or the start of a key.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over FILE.")] = False,
) -> None:
    """Write compiled kernels to a tar file."""
    from .cache import export

    export(file, name=name, force=force)


@cache.command("import", epilog=example("rapid-llm cache import kernels.tar"))
@guarded
def cache_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file that `rapid-llm cache export` wrote.")],
) -> None:
    """Add the compiled kernels of a tar file.

    They are programs: import only what you trust. Everything is checked against its digest before anything is added.
    """
    from .cache import load

    load(file)


@cache.command("verify", epilog=example("rapid-llm cache verify", "rapid-llm cache verify --json"))
@guarded
def cache_verify(json: Json = False) -> None:
    """Compare every compiled kernel with its digest.

    Exits with 1 if one is damaged.
    """
    from .cache import verify

    verify(json=json)


@cache.command("gc", epilog=example("rapid-llm cache gc --dry-run", "rapid-llm cache gc --older-than 30 --newest-only"))
@guarded
def cache_gc(
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Also what was not used for so long.")
    ] = None,
    newest_only: Annotated[
        bool, typer.Option("--newest-only", help="Also all but the newest of each kernel and architecture.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken away.")] = False,
    json: Json = False,
) -> None:
    """Take away damaged kernels and what killed builds left; with options, good ones too."""
    from .cache import gc

    gc(older_than=older_than, newest_only=newest_only, dry_run=dry_run, json=json)

"""The commands of `rapid-llm models`: arguments, help, examples."""

from __future__ import annotations

from typing import Annotated

import typer

from .app_generate import Device, Dtype
from .declare import Json, example, group
from .engine import LoadFormat, Quantization
from .support import guarded

models = group("Models: list, fetch, look into their files.")


@models.command("list", epilog=example("rapid-llm models list", "rapid-llm models list --json"))
@guarded
def list_(json: Json = False) -> None:
    """List the models known by name, and those of the Hugging Face hub that are on this machine."""
    from .models import list_models

    list_models(json=json)


@models.command(
    "pull",
    epilog=example("rapid-llm models pull smollm2-135m-instruct", "rapid-llm models pull Qwen/Qwen3-0.6B"),
)
@guarded
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name from `rapid-llm models list`, or a hub's org/name, org/name@revision, org/name:Q4_K_M.",
        ),
    ],
    load_format: LoadFormat = "auto",
) -> None:
    """Fetch a model and print where it is.

    Of a known name that is on this machine, the file is only checked; of a hub's id, what is new is fetched.
    """
    from .models import pull

    pull(name, load_format=load_format)


@models.command(
    "inspect",
    epilog=example(
        "rapid-llm models inspect smollm2-135m-instruct",
        "rapid-llm models inspect ./my.gguf --tensors",
        "rapid-llm models inspect ./a-folder --quantization int8 --json",
    ),
)
@guarded
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A name or id that has been pulled, a GGUF file, or a folder.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    load_format: LoadFormat = "auto",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Show what is in a model's files, and the row that each op would take on this machine.

    No weight is loaded. Exits with 1 if this program cannot run it.
    """
    from .models import inspect

    options = {"dtype": dtype, "quantization": quantization, "load_format": load_format, "device": device}
    inspect(model, options=options, tensors=tensors, json=json)

"""What all commands share: exit statuses, errors in one line, tables for people and JSON for programs."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import typer

BAD: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141

P = ParamSpec("P")
R = TypeVar("R")


def prepare_streams() -> None:
    """A closed stream leads nowhere; text that an encoding lacks is replaced; input is strict in any locale."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the number is taken: no file opened later becomes the output
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_stdout() -> None:
    """Nobody reads standard output any more: send the rest nowhere, so that Python's last flush is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flush() -> None:
    """Write out what is buffered; a reader that is gone is no error by now."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()


def fail(text: object, status: int = BAD) -> NoReturn:
    """End the command with `Error: text` on standard error."""
    flush()
    print(f"Error: {as_options(str(text)) if isinstance(text, Exception) else text}", file=sys.stderr)
    raise typer.Exit(status)


_OPTIONS: Final = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "max_model_len", "threads"),
    *("dtype", "device", "model", "scheme", "backend", "tensor_parallel"),
    *("min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos"),
    *("logprobs", "prompt_logprobs"),
    *("kv_cache_tokens", "max_running", "max_batch_tokens", "max_concurrent_requests", "max_body_bytes"),
    *("shutdown_timeout", "stall_timeout", "tool_format"),
)
_WORDINGS: Final = (
    (rf"\b({'|'.join(_OPTIONS)})=(?=\S)", lambda m: f"--{m[1].replace('_', '-')} "),
    (r"^n=(?=\S)", lambda m: "--n "),
    (r"\bstop_token_ids=(?=\S)", lambda m: "--stop-token-id "),
    (r"\bstructured\.choices=(?=\S)", lambda m: "--choice "),
    (r"\bstructured\.(\w+)=(?=\S)", lambda m: f"--{m[1].replace('_', '-')} "),
    (r"\bgive --dtype , one", lambda m: "give --dtype, one"),
    (r"\bpass allow=\('([^']+)',\)", lambda m: f"give --allow {m[1]}"),
    (r"\bgive dims=\{'(\w+)': \.\.\.\}", lambda m: f"give --dim {m[1]}=N"),
    (r"\bbind it with dispatch\(\.\.\., prepack=True\) and pass handle\.prepack\(weight\)", lambda m: "give --prepack"),
)


def as_options(text: str) -> str:
    """`text` with the library's arguments named as this command line's options; code to run stays code."""
    parts = re.split(r"(rapid_llm\.\S+\(.*?\))", text)
    for i in range(0, len(parts), 2):
        for pattern, wording in _WORDINGS:
            parts[i] = re.sub(pattern, wording, parts[i])
    return "".join(parts)


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Within, a `ValueError` or `TypeError` is about what the user typed: exit status 2, without a traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        fail(error, USAGE)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose expected failures end in one line, and whose interrupts and closed pipes end quietly.

    Expected are the package's own errors and those of the operating system. Anything else is a fault of the program and
    keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            flush()
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            drop_stdout()
            raise typer.Exit(PIPE_CLOSED) from None
        except (typer.Exit, typer.Abort):
            raise
        except OSError as error:
            fail(_of_system(error))
        except Exception as error:
            if type(error).__module__.startswith("rapid_llm."):
                fail(error, USAGE if _is_usage(error) else BAD)
            raise

    return run


def _of_system(error: OSError) -> str:
    """An error of the operating system as a person would say it: the file, and what is wrong with it."""
    if error.strerror is None or error.filename is None:
        return str(error)
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(files)}: {error.strerror[:1].lower()}{error.strerror[1:]}"


def _is_usage(error: Exception) -> bool:
    """Whether the error says that a name or a value on the command line does not exist."""
    names = {"UnknownOpError", "UnknownRowError", "UnknownModelError", "ArgumentError", "ParameterError"}
    return type(error).__name__ in names


def print_json(value: Any) -> None:
    """`value` as JSON on standard output."""
    import json

    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output: fitted to the terminal, or, in a file or pipe, one line a row whatever its length."""
    cells = [tuple("" if cell is None else str(cell) for cell in row) for row in rows]
    if sys.stdout.isatty():
        _draw(headings, cells)
        return
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    for row in (tuple(headings), *cells):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _draw(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values in two columns."""
    listed = [(name, str(value)) for name, value in pairs]
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        print(f"{name:<{width}}  {value}".rstrip())


def size(nbytes: float) -> str:
    """A number of bytes for people: `98.4 MB`."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1000:.1f} TB"

"""Every error that the registry and dispatch raise.

Each message names the op or row, the value that was refused, and what to change.
"""

from __future__ import annotations


def told(error: BaseException) -> str:
    """`Type: text` of an error that foreign code raised, whose own text may be an error too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be had"


class KernelError(RuntimeError):
    """Base of all errors of the kernel layer."""


class RegistrationError(KernelError):
    """A malformed `OpSpec` or `KernelSpec`: names the row, the field and the accepted values.

    place: the file and line of the code that the declaration does not fit, where it is code.
    """

    def __init__(self, name: str, field: str, problem: str, place: tuple[str, int] | None = None) -> None:
        where = "" if place is None else f" ({place[0]}:{place[1]})"
        super().__init__(f"{name}: field '{field}': {problem}{where}")
        self.name = name
        self.field = field
        self.place = place


class UnknownOpError(KernelError):
    """The op id is not registered."""


class UnknownRowError(KernelError):
    """A row or backend was forced by name and no such row exists for the op."""


class NoKernelError(KernelError):
    """Every row of an op is out for these arguments; the text holds each row's reasons."""


class ForcedRowError(KernelError):
    """A row was forced by name and cannot run here; the text holds its reasons."""


class NotReadyError(KernelError):
    """A row's code is not built, and may not be built now: a CUDA graph is being captured, or kernels are frozen.

    until_thaw: it holds until `thaw()`, so a choice made because of it may be kept until then.
    """

    until_thaw = False


class StrictFallbackError(KernelError):
    """`RAPID_LLM_STRICT` is set and a call would fall to the floor because a faster row is broken."""


class LockError(KernelError):
    """A file of pinned decisions cannot be read, or pins a row that is not what it was; the text names both."""


class ArgumentError(KernelError, ValueError):
    """Arguments that an op does not take: shapes, dtypes, devices, or overlapping memory."""

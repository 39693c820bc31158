"""What a build can end in. Each text names the unit, the cause, and the fix or the log's path."""

from __future__ import annotations

from rapid_llm.kernels.registry import KernelError, NotReadyError


class BuildError(KernelError):
    """A unit did not compile, load, or find a place: the first error, the command, and where the whole log lies."""


class CompileFailed(BuildError):  # noqa: N818 - raised by a compiler, and reported by the engine as a BuildError
    """A compiler's own report: its command, all of its output, and its exit status (negative for a signal).

    first: the one line that says it, where the output need not be searched for one. headers: what was compiled, noted
    by the engine, so that who waited for this compile shares its failure only while it would compile the same.
    """

    def __init__(self, command: str, output: str, status: int | None = None, first: str = "") -> None:
        super().__init__(output)
        self.command = command
        self.output = output
        self.status = status
        self.first = first
        self.headers: tuple[tuple[str, str], ...] = ()


class BuildTimeout(BuildError):  # noqa: N818 - named by the specification
    """A compiler ran past its limit and was killed with all of its children."""


class LockTimeout(BuildError):  # noqa: N818
    """Another process builds the same unit and did not finish within the limit; the text names it."""


class FrozenError(BuildError, NotReadyError):
    """A compile was asked for after `freeze()`."""

    until_thaw = True

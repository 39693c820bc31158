"""Why a measurement was refused. Each message holds the figure that led to it and what to do."""

from __future__ import annotations


class BenchError(RuntimeError):
    """Base of all refusals of the harness."""


class MachineBusyError(BenchError):
    """Other programs use the CPUs that would be measured."""


class SlowThreadsError(BenchError):
    """Every multi-threaded operation takes far longer than it should, so no figure of this process can be trusted."""


class ResolutionError(BenchError):
    """The clock did not move while the function ran, so there is nothing to divide."""

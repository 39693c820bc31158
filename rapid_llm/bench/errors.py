"""Why a measurement was refused. Each message holds the figure that led to it and what to do."""

from __future__ import annotations


class BenchError(RuntimeError):
    """Base of all refusals of the harness. `code` is stable, for tables and result files."""

    code = "refused"


class MachineBusyError(BenchError):
    """Other programs use the CPUs that would be measured."""

    code = "machine_busy"


class SlowThreadsError(BenchError):
    """Every multi-threaded operation takes far longer than it should, so no figure of this process can be trusted."""

    code = "slow_threads"


class ResolutionError(BenchError):
    """The clock did not move while the function ran, so there is nothing to divide."""

    code = "no_time"


class NoWorkError(BenchError):
    """No bytes and no FLOPs were declared, so no figure could be held against a limit."""

    code = "no_work"


class NoCheckError(BenchError):
    """Nothing proves that this row is right for this dtype and layout."""

    code = "no_check"


class CallFailedError(BenchError):
    """The function raised."""

    code = "raised"


class WrongResultError(BenchError):
    """A call's result is wrong, before or after the timed calls."""

    code = "wrong_result"


class UnwrittenError(WrongResultError):
    """A result still holds the poison that was put there before the timed calls."""

    code = "unwritten"


class ChangedInputError(BenchError):
    """The calls wrote into an argument that the op only reads."""

    code = "changed_input"


class RememberedError(BenchError):
    """Calls share a result, or are slower for values that they have not met: work of earlier calls is used again."""

    code = "remembered"


class HiddenInputError(BenchError):
    """The function holds a tensor that is not an argument, so it cannot be rotated and stays in the cache."""

    code = "hidden_input"


class DegenerateInputError(BenchError):
    """Inputs are zero or nearly constant, or the result does not depend on them."""

    code = "degenerate_input"


class NoLaunchError(BenchError):
    """The timed calls launch no kernel."""

    code = "no_launch"


class LeakedWorkError(BenchError):
    """Work went on after the event that should have ended it: another stream, or another thread, does it."""

    code = "leaked_work"


class TooFastError(BenchError):
    """The figure is above what the device can do."""

    code = "too_fast"


class MixedColdError(BenchError):
    """Some arms were measured cold and others warm."""

    code = "mixed_cold"


class WrongRowError(BenchError):
    """The function is not the row it is named after, or dispatch would choose another and the row is not declared
    forced."""

    code = "wrong_row"


class ThrottledError(BenchError):
    """Nearly every sample was taken while the device was slowed down."""

    code = "throttled"


class HostBoundError(BenchError):
    """The host could not enqueue calls as fast as the device ran them, so the figure would be the host's."""

    code = "host_bound"

"""The torch-free heart of the kernel layer: declarations, dispatch, and why."""

from . import evidence, notes
from .errors import (
    ArgumentError,
    ForcedRowError,
    KernelError,
    NoKernelError,
    NotReadyError,
    RegistrationError,
    StrictFallbackError,
    UnknownOpError,
    UnknownRowError,
)
from .registry import get_op, get_row, ops, register, rows, unregister
from .spec import UNMEASURED, Dim, GoldenRecord, KernelSpec, Numerics, OpSpec, Out, Shape

# Second, because dispatch looks at the table above when it is imported.
from .dispatcher import Decision, Selected, dispatch, load_target  # isort: skip
from .explanation import Explanation, explain, listing  # isort: skip
from .overrides import use_backend  # isort: skip
from .trace import profiler_ranges  # isort: skip

__all__ = [
    "UNMEASURED",
    "ArgumentError",
    "Decision",
    "Dim",
    "Explanation",
    "ForcedRowError",
    "GoldenRecord",
    "KernelError",
    "KernelSpec",
    "NoKernelError",
    "NotReadyError",
    "Numerics",
    "OpSpec",
    "Out",
    "RegistrationError",
    "Selected",
    "Shape",
    "StrictFallbackError",
    "UnknownOpError",
    "UnknownRowError",
    "dispatch",
    "evidence",
    "explain",
    "get_op",
    "get_row",
    "listing",
    "load_target",
    "notes",
    "ops",
    "profiler_ranges",
    "register",
    "rows",
    "unregister",
    "use_backend",
]

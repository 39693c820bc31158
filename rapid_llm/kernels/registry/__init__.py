"""The torch-free heart: declarations, dispatch, explanation."""

from . import notes
from .errors import (
    ArgumentError,
    ForcedRowError,
    KernelError,
    NoKernelError,
    RegistrationError,
    StrictFallbackError,
    UnknownOpError,
    UnknownRowError,
)
from .spec import UNMEASURED, Dim, GoldenRecord, KernelSpec, Numerics, OpSpec, Out, Shape


def register(*specs):  # replaced below once the registry lands
    return None

__all__ = [
    "UNMEASURED",
    "ArgumentError",
    "Dim",
    "ForcedRowError",
    "GoldenRecord",
    "KernelError",
    "KernelSpec",
    "NoKernelError",
    "Numerics",
    "OpSpec",
    "Out",
    "RegistrationError",
    "Shape",
    "StrictFallbackError",
    "UnknownOpError",
    "UnknownRowError",
    "notes",
    "register",
]

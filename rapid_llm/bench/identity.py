"""Whether a function is the registry row that it is named after, and the one that dispatch would run."""

from __future__ import annotations

from typing import Any

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, Selected, UnknownRowError

from .errors import WrongRowError
from .storages import Arguments
from .trial import RowArm


def refuse_wrong_row(arm: RowArm, arguments: Arguments) -> None:
    """Raise `WrongRowError` if `arm` claims to be a row, by `row` or by a name that is one, and isn't; or if it is not
    the one that dispatch would choose for these arguments and is not declared forced."""
    spec = _claimed(arm)
    if spec is None:
        return
    if isinstance(arm.fn, Selected):
        ran = arm.fn.spec.name
        if ran != spec.name:
            raise WrongRowError(f"{arm.name}: the handle runs {ran}, not {spec.name}; give it its own name")
        if arm.fn.decision.forced is not None and not arm.forced:
            by = arm.fn.decision.forced.by
            raise WrongRowError(f"{arm.name}: {by} forces this row; pass forced=True, or dispatch without it")
        return
    if unwrapped(arm.fn) is not unwrapped(registry.load_target(spec.name)):
        raise WrongRowError(f"{arm.name}: the function given is not {spec.target}; give it another name, or the row")
    if arm.forced:
        return
    chosen = _chosen(spec, arguments)
    if chosen != spec.name:
        raise WrongRowError(
            f"{arm.name}: dispatch runs {chosen} for these arguments; pass forced=True to time this row"
        )


def unwrapped(fn: Any) -> Any:
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    return fn


def _claimed(arm: RowArm) -> KernelSpec | None:
    if arm.row is not None:
        return registry.get_row(arm.row)
    try:
        return registry.get_row(arm.name)
    except UnknownRowError:  # a name of the caller's own
        return None


def _chosen(spec: KernelSpec, arguments: Arguments) -> str:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    named = {key: value for key, value in arguments.items() if isinstance(key, str)}
    return registry.dispatch(spec.op, *positional, **named).spec.name

"""The arms of an op: every registered row that can run a call here, and peers, each in the form that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelError, KernelSpec, OpSpec, Selected
from rapid_llm.kernels.registry.facts import bind as bind_call
from rapid_llm.kernels.registry.facts import expression_names

from .checks import against_oracle
from .storages import Arguments
from .trial import Check, RowArm
from .work import Work, work_of

Peer = Callable[[], Callable[..., Any]]
"""Makes a function of the op's arguments that another library computes by; raises ImportError where it is missing."""


@dataclass(frozen=True, slots=True)
class OpArms:
    """arms: the row that dispatch chooses first, for it is the baseline. chosen: its name. missing: name -> why a row
    or peer cannot run here."""

    op: OpSpec
    arguments: Arguments
    arms: list[RowArm]
    chosen: str
    work: Work
    missing: dict[str, str] = field(default_factory=dict)


def op_arms(
    op_id: str,
    values: Mapping[str, Any],
    peers: Mapping[str, Peer] | None = None,
    peer_roundings: tuple[str, ...] = (),
) -> OpArms:
    """Arms for one call of `op_id` with `values`, arguments by their schema names; no rows of other schemes. A peer
    that takes `out` is given one, as the rows are."""
    op = registry.get_op(op_id)
    given, _ = bind_call(op, (), dict(values))
    arguments: Arguments = {at: given[arg.name] for at, arg in enumerate(op.parsed.positional)}
    arguments |= {arg.name: given[arg.name] for arg in op.parsed.keyword_only if given[arg.name] is not None}
    names = [arg.name for arg in op.parsed.positional]
    mutated = tuple(names.index(name) for name in op.parsed.mutated)
    out = empty_out(op, given)
    chosen = _dispatch(op, arguments).spec.name
    work = work_of(registry.probes.load(op.work)(**given))
    if str(given.get("scheme", "")).startswith("fp8"):
        work = replace(work, dtype="fp8_e4m3")  # such rows may multiply as fast as that
    checks: dict[tuple[str, ...], Check] = {}
    arms, missing = [], {}
    for row in registry.rows(op_id):
        if row.schemes and given.get("scheme") not in row.schemes:
            continue
        try:
            handle = _dispatch(op, arguments, row)
        except KernelError as error:
            missing[row.name] = str(error)
            continue
        check = checks.setdefault(row.roundings, against_oracle(op, row.roundings))
        adapt = _prepacking(handle, names.index("weight")) if row.prepack is not None else None
        graph = None if row.graph_safe else False
        arms.append(RowArm(row.name, handle, out, mutated, None, adapt, check, row.name, forced=True, graph=graph))
    arms.sort(key=lambda arm: (arm.name != chosen, arm.name))
    plain = checks.setdefault(peer_roundings, against_oracle(op, peer_roundings))
    for name, make in (peers or {}).items():
        try:
            fn = make()
            given_out = out if "out" in inspect.signature(fn).parameters else None
            arms.append(RowArm(name, fn, given_out, mutated, check=plain))
        except ImportError as error:
            missing[name] = str(error)
    return OpArms(op, arguments, arms, chosen, work, missing)


def empty_out(op: OpSpec, values: Mapping[str, Any]) -> Any:
    """A tensor like the one that the op would allocate for its result; None for an op that changes its arguments."""
    if op.out is None:
        return None
    import torch

    scope = {"torch": torch, **expression_names(), **values}
    first = values[op.dtype_of]
    return torch.empty(eval(op.out.shape, scope), dtype=eval(op.out.dtype, scope), device=first.device)


def _dispatch(op: OpSpec, arguments: Arguments, row: KernelSpec | None = None) -> Selected:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    named = {key: value for key, value in arguments.items() if isinstance(key, str)}
    if row is None:
        return registry.dispatch(op.id, *positional, **named)
    facts: dict[str, Any] = {"allow": row.roundings, "prepack": row.prepack is not None}
    return registry.dispatch(op.id, *positional, backend=row.name, **facts, **named)


def _prepacking(handle: Selected, at: int) -> Callable[[Arguments], Arguments]:
    def adapt(arguments: Arguments) -> Arguments:
        return {**arguments, at: handle.prepack(arguments[at])}

    return adapt

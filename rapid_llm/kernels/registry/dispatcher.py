"""Filter, rank, cache: from facts to one row, the same in every process. `ranking` says in which order rows rank."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from rapid_llm import settings
from rapid_llm.platform import device_info

from . import canary, lockfile, overrides, patience, plugins, probes, ranking, registry, trace
from . import facts as _facts
from .capture import capturing
from .errors import (
    ArgumentError,
    ForcedRowError,
    KernelError,
    NoKernelError,
    NotReadyError,
    RegistrationError,
    StrictFallbackError,
    told,
)
from .facts import Facts
from .filters import DEGRADED, Verdict, judge
from .forking import Lock
from .overrides import Forced
from .spec import KernelSpec, OpSpec

_log = logging.getLogger(__name__)

_PROMISES: Final = ("prepack", "capturing", "batch_invariant")
"""Facts of a call that no argument shows."""

MAX_CACHED: Final = 4096
"""Decisions kept before the cache starts anew."""

_lock: Final = Lock()
_decisions: Final[dict[tuple[object, ...], Decision]] = {}
_targets: Final[dict[str, Callable[..., Any]]] = {}
_broken: Final[dict[str, str]] = {}
_dims: Final[dict[str, Callable[..., dict[str, int]]]] = {}
_warned: Final[set[tuple[str, str]]] = set()
_seen: list[object] = [None]
_NONE: Final[Mapping[str, NotReadyError]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice: the facts, what was forced, the row, and every row's verdict.

    lasting: False where a row was passed over only because it could not be built just now; such a choice is not kept.
    """

    facts: Facts
    forced: Forced | None
    row: KernelSpec
    verdicts: tuple[Verdict, ...]
    lasting: bool = True


class Selected(functools.partial):  # type: ignore[type-arg]
    """The chosen row as a callable: calling it calls the row's function with nothing in between.

    `spec` is the row, `func` its function, `decision` why it was chosen.
    """

    spec: KernelSpec
    decision: Decision

    def __new__(cls, func: Callable[..., Any], decision: Decision) -> Selected:
        self = super().__new__(cls, func)
        self.spec = decision.row
        self.decision = decision
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.decision.row.name, self.decision))

    def prepack(self, weight: Any) -> Any:
        """`weight` in the form that this row reads; the weight itself for a row that reads it as it is."""
        if self.spec.prepack is None:
            return weight
        scheme = self.decision.facts.scheme
        return probes.load(self.spec.prepack)(weight, scheme)

    def explain(self) -> Any:
        """Why this row and not another: an `Explanation`."""
        from .explanation import Explanation

        return Explanation(self.decision)


def _rebuild(name: str, decision: Decision) -> Selected:
    return Selected(guarded(decision), decision)


def guarded(decision: Decision) -> Callable[..., Any]:
    """The row's function; behind a test for graph capture where the row must not be captured (D6).

    Whether a graph is captured is no part of a call's key, so that it costs nothing where the chosen row does not care.
    """
    function = load_target(decision.row.name)
    if decision.row.graph_safe or decision.facts.device != "cuda":
        return function

    @functools.wraps(function)
    def unless_capturing(*args: Any, **kwargs: Any) -> Any:
        return (_for_capture(decision) if capturing() else function)(*args, **kwargs)

    return unless_capturing


def _for_capture(decision: Decision) -> Callable[..., Any]:
    """Another row's function for the same call within a capture; raises where none can take it."""
    again = settle(replace(decision.facts, capturing=True), decision.forced)
    if again.row.prepack != decision.row.prepack:
        raise NoKernelError(
            f"{decision.facts.op}: {decision.row.name} does host work per call, so a CUDA graph cannot capture it, and "
            f"{again.row.name} does not read the weight that was packed for it; bind the captured call by itself: "
            "dispatch(..., capturing=True)"
        )
    return load_target(again.row.name)


def facts_of(op_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
    """Facts of a call with example arguments, or as stated (`device, dtype, scheme, ...`) if there are none."""
    op = registry.get_op(op_id)
    if args:
        extra = {k: kwargs.pop(k) for k in ("allow", *_PROMISES) if k in kwargs}
        values, out = _facts.bind(op, args, kwargs)
        _facts.refuse_grad(op, {**values, "out": out})
        found = replace(_facts.read(op, dims_reader(op), values, out), **extra)
        found = replace(found, allow=frozenset(found.allow))
    else:
        defaults = {"device": None, "dtype": None, "scheme": None, "dims": None, "layout": None}
        stated = {**defaults, "allow": (), **dict.fromkeys(_PROMISES, False), **kwargs}
        unknown = sorted(set(stated) - {*defaults, "allow", *_PROMISES})
        if unknown:
            known = f"device, dtype, scheme, dims, layout, allow, {', '.join(_PROMISES)}, backend"
            raise ArgumentError(f"{op_id}: unknown fact {unknown[0]!r}; state {known}, or give example arguments")
        found = _facts.given(op, **stated)
    return with_sm(found)


def with_sm(found: Facts) -> Facts:
    """The same facts with the GPU's SM version filled in."""
    if found.device != "cuda":
        return found
    device = "cuda" if found.index is None else f"cuda:{found.index}"
    return replace(found, sm=device_info(device).sm)


def dims_reader(op: OpSpec) -> Callable[..., dict[str, int]]:
    """The compiled reader of an op's named dimensions."""
    reader = _dims.get(op.id)
    if reader is None:
        reader = _dims[op.id] = _facts.compile_dims(op)
    return reader


def dispatch(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Selected:
    """Choose the row that runs `op` and return it as a callable handle.

    With example arguments, facts are read off them: `dispatch("rmsnorm", x, weight)`. Without, they are stated:
    `dispatch("linear", device="cpu", dtype="fp32", scheme="q4_1", dims={"tokens": 1})`; unstated dimensions rule out
    the rows that constrain them. `allow` names roundings the caller accepts, `prepack=True` promises to pass
    `handle.prepack(weight)`, and `batch_invariant=True` takes only rows whose results for one token or sequence do not
    depend on the batch. `backend` forces a backend or a row by name. Raises `NoKernelError` if every row is out,
    and `ArgumentError` for arguments of which autograd expects a gradient: ops are for inference.
    """
    plugins.scan()
    notice_environment()
    found = facts_of(op, args, kwargs)
    decision = settle(found, overrides.current(op, backend))
    return Selected(trace.counted(guarded(decision), decision), decision)


def settle(found: Facts, forced: Forced | None) -> Decision:
    """The cached decision for these facts; made on first demand, for a row whose code imports and is built."""
    key = (found.key(), forced)
    decision = _decisions.get(key)
    if decision is None:
        with _lock:
            unready: dict[str, NotReadyError] = {}
            wanted = forced if forced is not None else lockfile.pin(found)
            decision = _decide(found, wanted, unready)
            while not (make_ready(decision.row, found, unready) and _sound(decision, unready)):
                decision = _decide(found, wanted, unready)
            if decision.lasting:
                if len(_decisions) >= MAX_CACHED:
                    _decisions.clear()
                _decisions[key] = decision
    overrides.chosen(decision.row.name, decision.row.backend)
    return decision


def make_ready(row: KernelSpec, found: Facts, unready: dict[str, NotReadyError]) -> bool:
    """Whether the row's code is imported, built and loaded for the facts' device, which is done now if it may be.

    A row that fails is broken from now on; one that cannot be built at this moment goes to `unready`. The floor must
    load, and is not tried.
    """
    if row.is_native:
        return True
    try:
        with patience.named(f"{row.name}: {row.prepare or row.target}"):
            load_target(row.name)
            if row.prepare is not None:
                probes.load(row.prepare)(found)
    except RegistrationError:
        raise
    except BaseException as error:  # whatever a build or a foreign row raises, the others can still answer
        if isinstance(error, KeyboardInterrupt):
            raise
        # A module that builds on import fails as an import; what counts is why.
        cause = error.__cause__ if isinstance(error, ImportError) else error
        if isinstance(cause, NotReadyError):
            unready[row.name] = cause
        elif isinstance(error, (KernelError, ImportError)):
            _break(row, str(error))
        else:
            _break(row, told(error))
        return False
    return True


def _sound(decision: Decision, unready: dict[str, NotReadyError]) -> bool:
    """Whether the row is right on this machine, as far as a few small calls tell; one that is named is not asked."""
    if decision.forced is not None:
        return True
    try:
        return canary.sound(decision.row, decision.facts)
    except NotReadyError as error:
        unready[decision.row.name] = error
        return False


def _break(row: KernelSpec, text: str) -> None:
    """Take a row out for the rest of the process; said once."""
    _broken[row.name] = text
    _warned.add((row.name, text))
    _log.warning("%s is out: %s", row.name, text)


def lookup(key: tuple[object, ...]) -> Decision:
    """The decision under a ready key (`Facts.key()`, nothing forced); raises KeyError where none was made yet."""
    return _decisions[key, None]


def decisions() -> tuple[Decision, ...]:
    """Every decision that is kept."""
    return tuple(_decisions.values())


def broken_text(name: str) -> str | None:
    """Why a row could not be loaded, or None."""
    return _broken.get(name)


def notice_environment() -> None:
    """Forget cached choices if a `RAPID_LLM_*` variable changed since the last look; report unknown variables once."""
    now = settings.snapshot()
    if now == _seen[0]:
        return
    settings.strict(), settings.jit()  # a value that they do not take is an error now, not at a first fall
    first = _seen[0] is None
    _seen[0] = now
    for name, nearest in settings.unknown(o.id for o in registry.ops()):
        hint = f"; did you mean {nearest}?" if nearest else "; rapid-llm doctor --env lists what there is"
        _log.warning("unknown environment variable %s is ignored%s", name, hint)
    trace.follow(settings.trace_file())
    lockfile.follow(settings.lock_file())
    if not first:
        probes.forget()
        forget(None)


def environment_unseen() -> bool:
    """Whether the environment has not been looked at yet in this process."""
    return _seen[0] is None


def load_target(name: str) -> Callable[..., Any]:
    """The function of a row, imported and compared with its op's schema on first demand."""
    target = _targets.get(name)
    if target is None:
        row = registry.get_row(name)
        target = probes.load(row.target)
        from .signature import check_loaded

        try:
            check_loaded(row, registry.get_op(row.op), target)
        except RegistrationError as error:
            if registry.is_shipped(row.name):
                raise
            raise ImportError(str(error)) from error
        _targets[name] = target
    return target


def verdicts(found: Facts, forced: Forced | None, unready: Mapping[str, NotReadyError] = _NONE) -> tuple[Verdict, ...]:
    """Every row's standing, best first among the admitted, then the others by name. `unready`: rows that cannot be
    built just now, and why."""
    named = set(overrides.rows_of(forced.what, found.op)) if forced is not None else set()
    reasons = {name: str(error) for name, error in unready.items()}
    judged = [
        judge(row, found, forced=row.name in named, broken=_broken.get(row.name), unready=reasons.get(row.name))
        for row in registry.rows(found.op)
    ]
    return ranking.ordered(judged, found, named)


def _decide(found: Facts, forced: Forced | None, unready: Mapping[str, NotReadyError]) -> Decision:
    judged = verdicts(found, forced, unready)
    best = judged[0] if judged else None
    lasting = all(error.until_thaw for error in unready.values())
    if forced is not None:
        if best is None or not best.admitted:
            names = overrides.rows_of(forced.what, found.op)
            lines = _lines([v for v in judged if v.row.name in names])
            raise ForcedRowError(
                f"{found.op}: {forced.by} forces {forced.what!r}, which cannot run this call:\n{lines}"
            )
        return Decision(found, forced, best.row, judged, lasting)
    if best is None or not best.admitted:
        raise NoKernelError(f"{found.op}: no row can run this call on {found.device}:\n{_lines(judged)}")
    if best.row.is_native:
        _report_fall(found, best, judged, unready)
    return Decision(found, None, best.row, judged, lasting)


def _report_fall(
    found: Facts, floor: Verdict, judged: tuple[Verdict, ...], unready: Mapping[str, NotReadyError]
) -> None:
    """The floor answers only because a row is missing, broken or not built: say so once, or refuse if strict."""
    lost = [v for v in judged if v.reasons and all(r.code in DEGRADED for r in v.reasons)]
    lost = [v for v in lost if ranking.outranks(v, floor, found)]
    if not lost:
        return
    if settings.strict():
        text = f"RAPID_LLM_STRICT is set and only the floor could run:\n{_lines(lost)}"
        blocked = next(iter(unready.values()), None)
        if blocked is not None:
            blocked.add_note(f"{found.op}: {text}")
            raise blocked
        raise StrictFallbackError(f"{found.op}: {text}")
    for v in lost:
        if (v.row.name, v.reasons[0].text) not in _warned:
            _warned.add((v.row.name, v.reasons[0].text))
            _log.warning("%s runs on its floor; %s is out: %s", found.op, v.row.name, v.reasons[0].text)
    trace.fell(found.op, floor.row.name)


def _lines(judged: tuple[Verdict, ...] | list[Verdict]) -> str:
    return "\n".join(
        f"  {v.row.name}: {'; '.join(f'{r.text} ({r.fix})' for r in v.reasons) or 'admitted'}" for v in judged
    )


def forget(touched: set[str] | None) -> None:
    """Drop cached decisions: of the ops given, or all."""
    with _lock:
        if touched is None:
            _decisions.clear()
        else:
            for key in [k for k, d in _decisions.items() if d.facts.op in touched]:
                del _decisions[key]
            for op in touched:
                _dims.pop(op, None)
            known = {r.name for o in registry.ops() for r in registry.rows(o.id)}
            for name in ({*_targets, *_broken}) - known:
                _targets.pop(name, None)
                _broken.pop(name, None)
    codegen = sys.modules.get(f"{__package__}.codegen")
    if codegen is not None:  # otherwise no public function exists yet
        codegen.refresh(touched)


registry.on_change(forget)

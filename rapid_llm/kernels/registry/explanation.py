"""Why an op runs the row it runs: as an object, a table, and JSON."""

from __future__ import annotations

from typing import Any

from rapid_llm import settings
from rapid_llm.platform import has_nvidia

from . import dispatcher as _dispatch
from . import evidence, overrides, plugins, registry
from .dispatcher import Decision
from .errors import ForcedRowError, NoKernelError, NotReadyError, StrictFallbackError
from .filters import Reason, Verdict, machine_reasons, preference
from .spec import UNMEASURED, KernelSpec


class Explanation:
    """Every row's verdict for one call. `str()` is a table; `selected` is None where no row can run."""

    def __init__(self, decision: Decision) -> None:
        self.facts = decision.facts
        self.forced = decision.forced
        self.selected: str | None = decision.row.name
        self.rows: tuple[Verdict, ...] = decision.verdicts
        self.error: str | None = None

    @classmethod
    def failed(cls, facts: Any, forced: Any, verdicts: tuple[Verdict, ...], error: str) -> Explanation:
        """The explanation of a call that no row can run, or that may not fall to its floor."""
        self = cls.__new__(cls)
        self.facts, self.forced, self.selected, self.rows, self.error = facts, forced, None, verdicts, error
        return self

    def json(self) -> dict[str, object]:
        """Plain data: `op, key, selected, forced, rows: [{name, admitted, reasons, evidence, measured, notes}]`."""
        return {
            "op": self.facts.op,
            "key": self.facts.as_json(),
            "selected": self.selected,
            "forced": None if self.forced is None else {"what": self.forced.what, "by": self.forced.by},
            "rows": [v.as_json() for v in self.rows],
        }

    def __str__(self) -> str:
        facts = self.facts
        dims = ", ".join(f"{k}={v}" for k, v in facts.dims.items())
        scheme = f", scheme {facts.scheme}" if facts.scheme is not None else ""
        lines = [
            f"{facts.op} on {facts.device}, {facts.dtype or 'dtype not given'}{scheme}{', ' + dims if dims else ''}"
        ]
        if self.forced is not None:
            lines.append(f"forced: {self.forced.what} by {self.forced.by}")
        if self.error is not None:
            lines.append(self.error.splitlines()[0])
        shown = [v for v in self.rows if not any(r.code == "scheme" for r in v.reasons)]
        width = max((len(v.row.name) for v in shown), default=0)
        for v in shown:
            mark = "->" if v.row.name == self.selected else "  "
            verdict = "admitted" if v.admitted else "out"
            told = v.evidence.text if v.admitted else ""
            lines.append(f"{mark} {v.row.name:<{width}}  {verdict:<8}  {told}".rstrip())
            pad = " " * (width + 5)
            if v.measured is not None:
                lines.append(f"{pad}measured: {v.measured}")
            if v.admitted and v.row.name != self.selected:
                lines.append(f"{pad}{self._behind(v)}")
            lines += [f"{pad}{r.text}. Fix: {r.fix}" for r in v.reasons]
            lines += [f"{pad}note: {note}" for note in v.notes]
        if len(shown) < len(self.rows):
            lines.append(f"   {len(self.rows) - len(shown)} rows compute other schemes")
        return "\n".join(lines)

    __repr__ = __str__

    def _behind(self, verdict: Verdict) -> str:
        """Why an admitted row is not the one that runs."""
        chosen = next((v for v in self.rows if v.row.name == self.selected), None)
        if chosen is None:
            return "admitted, but the call may not fall to it"
        best = chosen.row
        if self.forced is not None:
            return f"{self.forced.by} forces {self.forced.what}"
        times = verdict.measured, chosen.measured
        if times[0] and times[1] and times[0].place is not None and times[1].place is not None:
            ratio = times[0].timing.ratio / times[1].timing.ratio
            return f"{ratio:.3g} times as long as {best.name}" if ratio > 1 else f"not faster than {best.name} for sure"
        mine, other = preference(verdict.row, self.facts), preference(best, self.facts)
        if mine < other:
            stated = ", ".join(str(d) for d in verdict.row.shape.prefer)
            return (
                f"slower here by its own account: prefers {stated}"
                if stated
                else "the other states that it is fast here"
            )
        if verdict.row.priority != best.priority:
            return f"priority {_priority(verdict.row)} against {_priority(best)}"
        return "equal in rank; the name decides"


def _priority(row: KernelSpec) -> str:
    return "unmeasured" if row.priority == UNMEASURED else str(row.priority)


def explain(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Every row's standing for a call, given like `dispatch`: example arguments, or stated facts.

    Without a device, the machine's own is taken; without a dtype, fp32 on CPU and bf16 on CUDA.
    """
    plugins.scan()
    _dispatch.notice_environment()
    spec = registry.get_op(op)
    if not args:
        if kwargs.get("device") is None:
            kwargs["device"] = "cuda" if has_nvidia() else "cpu"
        if kwargs.get("dtype") is None:
            wanted = "bf16" if str(kwargs["device"]).startswith("cuda") else "fp32"
            kwargs["dtype"] = wanted if wanted in spec.dtypes else spec.dtypes[0]
    facts = _dispatch.facts_of(op, args, kwargs)
    forced = overrides.current(op, backend)
    try:
        return Explanation(_dispatch.settle(facts, forced))
    except (NoKernelError, ForcedRowError, StrictFallbackError, NotReadyError) as error:
        return Explanation.failed(facts, forced, _dispatch.verdicts(facts, forced), str(error))


def _forced_by_environment(op_id: str) -> overrides.Forced | None:
    """What a variable forces for the op; one that names nothing of it forces nothing, and `doctor` reports it."""
    setting = settings.forced_backend(op_id)
    if setting is None or not any(setting[0] in (row.backend, row.name) for row in registry.rows(op_id)):
        return None
    return overrides.Forced(*setting)


def _listed_reasons(row: KernelSpec, facts: Any, forced: overrides.Forced | None) -> list[Reason]:
    named = forced is not None and forced.what in (row.backend, row.name)
    if forced is not None and not named:
        return [Reason("forced", f"{forced.by} forces {forced.what}", f"unset {forced.by}")]
    reasons = machine_reasons(row, facts, _dispatch.broken_text(row.name), forced=named)
    if not reasons and facts.device == "cuda" and not has_nvidia():
        text = "no CUDA device is here: no NVIDIA driver is loaded"
        return [Reason("device", text, "run where there is an NVIDIA GPU")]
    return reasons


def listing(device: str | None = None) -> list[dict[str, object]]:
    """Every row and every dead plugin on this machine: `op, name, backend, admitted, reasons, priority, evidence`.

    A row is admitted here if nothing but a call's own arguments could rule it out. A backend that a variable forces
    rules the op's other rows out.
    """
    plugins.scan()
    where = device if device is not None else "cuda" if has_nvidia() else "cpu"
    listed: list[dict[str, object]] = []
    for op in registry.ops():
        forced = _forced_by_environment(op.id)
        for row in registry.rows(op.id):
            dtype = row.dtypes[0] if row.dtypes else op.dtypes[0]
            scheme = {"scheme": row.schemes[0]} if row.schemes else {}
            facts = _dispatch.facts_of(op.id, (), {"device": where, "dtype": dtype, **scheme})
            reasons = _listed_reasons(row, facts, forced)
            listed.append(
                {
                    "op": op.id,
                    "name": row.name,
                    "backend": row.backend,
                    "admitted": not reasons,
                    "reasons": [r.as_json() for r in reasons],
                    "priority": None if row.priority < 0 else row.priority,
                    "evidence": evidence.of(row, facts).as_json(),
                }
            )
    for plugin in plugins.plugins():
        if plugin.failure is not None:
            reason = {"code": "plugin", "text": plugin.failure, "fix": f"repair or uninstall the plugin {plugin.name}"}
            listed.append(
                {
                    "op": None,
                    "name": f"plugin/{plugin.name}",
                    "backend": plugin.value,
                    "admitted": False,
                    "reasons": [reason],
                    "priority": None,
                    "evidence": None,
                }
            )
    return listed

"""Every test a row must pass for one call: each failure is a `Reason` with the least change that would remove it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import evidence, notes, probes
from .evidence import Evidence
from .facts import Facts
from .spec import Dim, KernelSpec

if TYPE_CHECKING:
    from .ranking import Measured

DEGRADED = ("unavailable", "broken", "not_ready")
"""Codes of reasons that a working installation would not have: a fall to the floor because of them is reported."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a row is out: a stable code, a sentence, and what would admit it."""

    code: str
    text: str
    fix: str

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text, "fix": self.fix}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row's standing for one call. measured: its time on this kind of device, if the records have one."""

    row: KernelSpec
    reasons: tuple[Reason, ...]
    evidence: Evidence
    notes: tuple[str, ...] = ()
    measured: Measured | None = None

    @property
    def admitted(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.row.name,
            "admitted": self.admitted,
            "reasons": [r.as_json() for r in self.reasons],
            "evidence": self.evidence.as_json(),
            "measured": None if self.measured is None else self.measured.as_json(),
            "notes": list(self.notes),
        }


def judge(row: KernelSpec, facts: Facts, *, forced: bool, broken: str | None, unready: str | None = None) -> Verdict:
    """Test `row` against `facts`. `forced`: named explicitly, so evidence is not demanded. `broken`: why it cannot
    load. `unready`: why it cannot be built just now.

    The probe is asked only where nothing else rules the row out, so that no library is touched for a call it cannot
    serve.
    """
    proof = evidence.of(row, facts)
    reasons = [*misfits(row, facts)]
    elsewhere = any(r.code == "device" for r in reasons)  # no run on this kind of device could prove the row
    if not proof.verified and not forced and not elsewhere:
        reasons.append(Reason(proof.state, proof.text, _proving(row)))
    if not reasons:
        reasons += _usable(row, broken)
    if not reasons and unready is not None:
        reasons.append(Reason("not_ready", unready, "prepare it earlier: call it once, or dispatch it, before this"))
    return Verdict(row, tuple(reasons), proof, notes.of(row.name))


def machine_reasons(row: KernelSpec, facts: Facts, broken: str | None, *, forced: bool = False) -> list[Reason]:
    """What rules the row out on this machine whatever the arguments: device, SM, evidence unless it is named,
    availability."""
    reasons = [*_device(row, facts)]
    if not reasons:
        proof = evidence.of(row, facts)
        if not proof.verified and not forced:
            reasons.append(Reason(proof.state, proof.text, _proving(row)))
    return reasons or [*_usable(row, broken)]


def _proving(row: KernelSpec) -> str:
    """What makes evidence for a row, or does without."""
    return f"prove it on this machine: rapid-llm kernels verify {row.name}; or name it: backend={row.name!r}"


def misfits(row: KernelSpec, facts: Facts) -> Iterator[Reason]:
    """Why the row does not take such a call, wherever it were installed and proven."""
    yield from _device(row, facts)
    if row.dtypes and facts.dtype is None:
        yield Reason("not_given", "the dtype is not given", f"give dtype=, one of {', '.join(row.dtypes)}")
    elif row.dtypes and facts.dtype not in row.dtypes:
        takes = ", ".join(row.dtypes)
        yield Reason("dtype", f"takes {takes}, not {facts.dtype}", f"convert to {takes}")
    if row.schemes and facts.scheme not in row.schemes:
        yield Reason("scheme", f"computes {', '.join(row.schemes)}, not {facts.scheme}", "use a weight of that scheme")
    for dim in row.shape.require:
        yield from _dimension(dim, facts)
    for tag in row.layout:
        if tag not in facts.layout:
            owner, _, bare = tag.rpartition(":")
            what = owner if owner else "every tensor"
            yield Reason(
                "layout", f"needs {what} {_ADJECTIVE.get(bare, tag)}", f"make {what} {_ADJECTIVE.get(bare, tag)}"
            )
    for rounding in row.roundings:
        if rounding not in facts.allow:
            what, _, dtype = rounding.partition(":")
            yield Reason("rounding", f"rounds {what} to {dtype}, which is not allowed", f"pass allow=({rounding!r},)")
    if row.prepack is not None and not facts.prepack:
        fix = "bind it with dispatch(..., prepack=True) and pass handle.prepack(weight)"
        yield Reason("prepack", "reads the weight in its own packed form", fix)
    if facts.batch_invariant and not row.batch_invariant:
        fix = "leave batch_invariant out, and call it for one request at a time"
        yield Reason("batch", "may give a token other bits in a batch of another size", fix)
    if facts.capturing and not row.graph_safe:
        yield Reason(
            "graph", "does host work per call, so a CUDA graph cannot capture it", "call it outside the capture"
        )


_ADJECTIVE = {
    "contiguous": "contiguous",
    "last_dim_contiguous": "contiguous in its last dimension",
    "aligned16": "aligned to 16 bytes",
}


def _device(row: KernelSpec, facts: Facts) -> Iterator[Reason]:
    devices = row.devices or (("cuda",) if row.capability else ())
    if devices and facts.device not in devices:
        yield Reason(
            "device", f"runs on {' or '.join(devices)}, not {facts.device}", f"move the tensors to {devices[0]}"
        )
    elif row.capability and facts.device == "cuda":
        windows = " or ".join(f"SM {low}" + ("+" if high is None else f"-{high}") for low, high in row.capability)
        if facts.sm is None:
            yield Reason("sm", f"needs {windows}; the device's is unknown", "run where the device is visible")
        elif not any(low <= facts.sm and (high is None or facts.sm <= high) for low, high in row.capability):
            yield Reason("sm", f"needs {windows}, this device is SM {facts.sm}", f"run on a GPU of {windows}")


def _dimension(dim: Dim, facts: Facts) -> Iterator[Reason]:
    value = facts.dims.get(dim.name)
    if value is None:
        yield Reason("not_given", f"needs {dim}; {dim.name} is not given", f"give dims={{{dim.name!r}: ...}}")
    elif not dim.holds(value):
        yield Reason("shape", f"needs {dim}, got {value}", f"change {dim.name} so that it is {dim}")


def _usable(row: KernelSpec, broken: str | None) -> Iterator[Reason]:
    if broken is not None:
        yield Reason("broken", broken, "repair the installation; the text says what failed")
        return
    probe = probes.check(row.available, row.target)
    if not probe.ok:
        fix = "install it" if not probe.installed else f"do what makes {row.available}() answer True"
        yield Reason("unavailable", probe.text, probe.fix or fix)


def preference(row: KernelSpec, facts: Facts) -> int:
    """1 where every stated preference holds, 0 where none is stated, -1 where one does not hold."""
    if not row.shape.prefer:
        return 0
    values = [(dim, facts.dims.get(dim.name)) for dim in row.shape.prefer]
    return 1 if all(v is not None and dim.holds(v) for dim, v in values) else -1

"""What is known about a row's correctness on a class of devices.

Only a run makes evidence: a record of `rapid-llm kernels verify`, the user's own or one that ships, or a run of
`rapid_llm.verify` in this process. A record holds for one class of devices, dtype and scheme, and for the row's source
as it was then: any change of that makes it stale, and stale is unverified. The floor is admitted without evidence,
and what is known of it is shown all the same. A `GoldenRecord` in a row is a claim and admits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from . import records, registry
from .facts import Facts
from .forking import Lock
from .records import Proof, Record
from .spec import KernelSpec

UNPROVEN: Final = ("unverified", "stale", "quarantined")

_lock: Final = Lock()
_records: Final[dict[tuple[str, str, str], Evidence]] = {}
_fresh: Final[dict[tuple[str, str, str], str]] = {}
_quarantined: Final[dict[tuple[str, str], str]] = {}
_version = [0]
_answers: Final[dict[tuple[str | None, ...], tuple[KernelSpec, tuple[int, int], Evidence]]] = {}
"""What `of` found, with the row that it was asked of and the state of what is known then."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """state: `record`, `floor`, `unverified`, `stale` or `quarantined`. layer: whose record it is, `shipped`, `user`
    or `process`; "" without one. The rest is what the record's run saw."""

    state: str
    text: str
    cases: int = 0
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    layer: str = ""
    proof: Proof | None = None

    @property
    def verified(self) -> bool:
        return self.state not in UNPROVEN

    def as_json(self) -> dict[str, object]:
        proof = self.proof
        run = {} if proof is None else {"mutants": f"{proof.mutants}/{proof.of}", "date": proof.date}
        return {
            "state": self.state,
            "text": self.text,
            "cases": self.cases,
            "worst_ulp": self.worst_ulp,
            "worst_ratio": self.worst_ratio,
            "layer": self.layer,
            **run,
        }


def record(row: str, device: str, dtype: str, *, cases: int, worst_ulp: float, worst_ratio: float) -> None:
    """Keep, for this process, that a conformance run proved `row` on this device type and dtype."""
    if cases < 1:
        raise ValueError(f"{row}: {cases} cases prove nothing")
    text = f"conformance run in this process, {cases} cases, worst error {worst_ratio:.3g} of its bound"
    with _lock:
        _records[row, device, dtype] = Evidence("record", text, cases, worst_ulp, worst_ratio, "process")
        _version[0] += 1


def quarantine(row: str, device: str, text: str) -> None:
    """Take a row out on a device type for this process: its answers were seen to be wrong here."""
    with _lock:
        _quarantined[row, device] = text
        _version[0] += 1


def forget(row: str) -> None:
    """Drop what this process knows of a row."""
    with _lock:
        for key in [k for k in _records if k[0] == row]:
            del _records[key]
        for place in [k for k in _quarantined if k[0] == row]:
            del _quarantined[place]
        _version[0] += 1


def reload() -> None:
    """Read records and sources again, for whoever edits them in a running process."""
    records.forget()
    with _lock:
        _fresh.clear()
        _version[0] += 1


def version() -> int:
    """A number that grows with every change."""
    return _version[0]


def of(spec: KernelSpec, facts: Facts) -> Evidence:
    """What is known about `spec` for a call like `facts`."""
    kind = records.device_class(facts.device, facts.index)
    now = _version[0], records.version()
    key = (spec.name, facts.device, kind, facts.dtype, facts.scheme, *records.homes())
    kept = _answers.get(key)  # one model asks thousands of times, of a few dozen rows and schemes
    if kept is not None and kept[0] is spec and kept[1] == now:
        return kept[2]
    found = _look_up(spec, facts, kind)
    _answers[key] = spec, now, found
    return found


def _look_up(spec: KernelSpec, facts: Facts, kind: str | None) -> Evidence:
    bad = _quarantined.get((spec.name, facts.device))
    if bad is not None and not spec.is_native:
        return Evidence("quarantined", bad)
    known = _records.get((spec.name, facts.device, facts.dtype or ""))
    if known is not None:
        return known
    found = _recorded(spec, facts, kind)
    if found is not None and (found.verified or not spec.is_native):
        return found
    if spec.is_native:
        return Evidence("floor", f"the floor of its op; {_lacking(kind) if found is None else found.text}")
    if spec.golden is not None and spec.golden.verified:
        return Evidence("unverified", f"the row claims to be verified, but {_lacking(kind)}")
    return Evidence("unverified", _lacking(kind))


def _lacking(kind: str | None) -> str:
    return f"no run on {kind or 'this kind of device'} has proved it"


def _recorded(spec: KernelSpec, facts: Facts, kind: str | None) -> Evidence | None:
    """The best that the records say: fresh before stale, the user's own before what ships."""
    stale: Evidence | None = None
    for layer in () if kind is None else (records.USER, records.SHIPPED):
        kept = records.table(layer, str(kind)).get(spec.name)
        proof = None if kept is None else _proof(kept, facts)
        if kept is None or proof is None:
            continue
        if layer == records.SHIPPED and not registry.is_shipped(spec.name):
            continue  # another package's row of the same name is another row
        why = _moved(spec, layer, kept)
        if not why:
            text = "the floor of its op; " if spec.is_native else ""
            text += (
                f"proven on {kind} on {proof.date}: {proof.cases} cases, worst error {proof.worst_ratio:.3g} of its "
                f"bound, {proof.mutants} of {proof.of} wrong rows refused"
            )
            return Evidence("record", text, proof.cases, proof.worst_ulp, proof.worst_ratio, layer, proof)
        stale = stale or Evidence("stale", f"its record of {proof.date} is stale: {why}", layer=layer, proof=proof)
    return stale


def _proof(kept: Record, facts: Facts) -> Proof | None:
    """The proof for a call's dtype and scheme; any scheme's where none is given."""
    if facts.dtype is None:
        return next(iter(kept.proofs.values()), None)
    exact = kept.proofs.get(records.proof_key(facts.dtype, facts.scheme))
    if exact is not None or facts.scheme is not None:
        return exact
    return next((p for key, p in kept.proofs.items() if key.partition(" ")[0] == facts.dtype), None)


def _moved(spec: KernelSpec, layer: str, kept: Record) -> str:
    """What of the row's source differs from its record, or "". Looked at once a process."""
    key = (spec.name, layer, kept.source.digest)
    why = _fresh.get(key)
    if why is None:
        why = _fresh[key] = _compare(spec, kept)
    return why


def _compare(spec: KernelSpec, kept: Record) -> str:
    from . import digest  # here, because few processes ever need it

    op = registry.get_op(spec.op)
    if digest.raw_of(spec, op, kept.source.files) == kept.source.raw:
        return ""
    now = digest.source_of(spec, op)
    if now is None:
        return "its source cannot be read"
    if now.digest != kept.source.digest:
        return "the row's source has changed"
    if now.extension and kept.source.extension and now.extension != kept.source.extension:
        return "the extension's source has changed"
    return ""

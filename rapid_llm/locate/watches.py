"""What is looked at while a model runs: its calls, another side's rows on the same inputs, a run of mixed rows.

Contributions, not sums: a row of the other side is fed what the driving side has at that place, and its error is
measured on exactly those inputs. What an earlier call did wrong is in both, and blames nobody later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from rapid_llm.kernels.registry import get_op
from rapid_llm.models.weights import Weight

from .calls import Call, Place, Slot, Values, Watch, matrices, moved, same_bits, slots
from .check import Check, Truth, attempt, difference, worst_columns
from .configuration import Side

LAYER_ENDS: Final = ("attn_norm", "final_norm")


@dataclass(frozen=True, slots=True, order=True)
class Suspect:
    """An op as one side runs it: the unit that is swapped."""

    op: str
    row: str

    def __str__(self) -> str:
        return self.row


@dataclass(frozen=True, slots=True)
class Finding:
    """One call on both sides, fed the same. difference: of the two results, relative. check_a, check_b: each side's
    own error; None where the results are equal bit for bit."""

    place: Place
    op: str
    row_a: str
    row_b: str
    difference: float
    check_a: Check | None = None
    check_b: Check | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Exhibit:
    """A call that is out of its bound, with what it was given. side: 'a' or 'b'."""

    side: str
    place: Place
    call: Call
    values: Values
    check: Check


class Recorder(Watch):
    """Keeps each call (without its step's tensors), the residual stream after each layer by (step, layer), and the
    final hidden states of each step."""

    def __init__(self, side: Side) -> None:
        super().__init__(slots(side.decoder.config))
        self.calls: dict[Place, Call] = {}
        self.streams: dict[tuple[int, int], Tensor] = {}
        self.final: dict[int, Tensor] = {}
        self._layers = side.decoder.config.num_layers

    def see(self, place: Place, call: Call) -> Any:
        result = call.run()
        self.calls[place] = call.held()
        layer = layer_ended(place.slot, self._layers)
        if layer is not None:
            self.streams[place.step, layer] = call.values["residual"].to("cpu", copy=True)
        if place.slot.name == "final_norm":
            self.final[place.step] = call.values["input"].to("cpu", copy=True)
        return result


def layer_ended(slot: Slot, layers: int) -> int | None:
    """The layer whose output the residual stream is after this call, if it ends one."""
    if slot.name == "final_norm":
        return layers - 1
    return slot.layer - 1 if slot.name == "attn_norm" and slot.layer else None


class Shadow(Watch):
    """Runs `driver`, and beside each call that differs the row of `other` on copies of the same inputs; both results
    are checked against the truth.

    calls: those of `other`, as a `Recorder` kept them. reverse: the driver is side b.
    """

    def __init__(
        self,
        driver: Side,
        other: Side,
        calls: Mapping[Place, Call],
        *,
        reverse: bool = False,
        progress: Callable[[str], None],
    ) -> None:
        super().__init__(slots(driver.decoder.config))
        self._driver, self._other, self._calls, self._reverse = driver, other, calls, reverse
        self._progress = progress
        self._same = driver.same_numbers(other)
        self._weights = {id(side): matrices(side.weights) for side in (driver, other)}
        self.findings: list[Finding] = []
        self.exhibits: dict[tuple[str, Suspect], Exhibit] = {}

    def see(self, place: Place, call: Call) -> Any:
        theirs = self._calls[place]
        if self._same and theirs.row == call.row:
            return call.run()
        self._progress(f"checking {place.slot}")
        before = call.with_moving(moved(call.values, self._driver.dtype, self._driver.device))
        beside = theirs.with_moving(moved(before.values, self._other.dtype, self._other.device))
        trial = attempt(beside, self._other.dtype, self._other.device)
        returned = call.run()
        own = call.results(returned)
        gap = difference(own, trial.results)
        if trial.trespass is None and all(map(same_bits, own, trial.results)):
            self._find(place, call, theirs, gap, None, None)
            return returned
        columns = worst_columns(call.op, own, trial.results)
        truth = truth_other = Truth(beside.op, beside.values, self._weight(self._other, place), columns)
        if not self._same:
            truth = Truth(before.op, before.values, self._weight(self._driver, place), columns)
        mine = truth.check(call.row, own)
        hers = trial.judged(truth_other.check(theirs.row, trial.results))
        self._find(place, call, theirs, gap, mine, hers)
        self._exhibit(not self._reverse, place, call, truth, mine)
        self._exhibit(self._reverse, place, theirs, truth_other, hers)
        return returned

    def _weight(self, side: Side, place: Place) -> Weight | None:
        return self._weights[id(side)].get(place.slot)

    def _find(self, place: Place, call: Call, theirs: Call, gap: float, mine: Check | None, hers: Check | None) -> None:
        a, b, check_a, check_b = call.row, theirs.row, mine, hers
        if self._reverse:
            a, b, check_a, check_b = b, a, hers, mine
        self.findings.append(Finding(place, call.op, a, b, gap, check_a, check_b))

    def _exhibit(self, on_a: bool, place: Place, call: Call, truth: Truth, check: Check) -> None:
        """Keep the worst call of each row that is out of its bound."""
        if check.ok:
            return
        key = ("a" if on_a else "b", Suspect(call.op, call.row))
        worst = self.exhibits.get(key)
        if worst is None or check.ratio > worst.check.ratio:
            self.exhibits[key] = Exhibit(key[0], place, call, truth.values, check)


class Mixed(Watch):
    """Runs `driver` with the calls of `swapped` made by `other`'s rows and weights, in the driver's own memory."""

    def __init__(self, driver: Side, other: Side, calls: Mapping[Place, Call], swapped: Collection[Suspect]) -> None:
        super().__init__(slots(driver.decoder.config))
        self._driver, self._other, self._calls = driver, other, calls
        self._swapped = frozenset(swapped)
        self._in_place = (driver.device, driver.dtype) == (other.device, other.dtype)

    def see(self, place: Place, call: Call) -> Any:
        theirs = self._calls[place]
        if Suspect(theirs.op, theirs.row) not in self._swapped:
            return call.run()
        if self._in_place:
            return theirs.with_moving(call.values).run()
        copies = theirs.with_moving(moved(call.values, self._other.dtype, self._other.device))
        returned = copies.run()
        for name in get_op(call.op).parsed.mutated:
            call.values[name].copy_(copies.values[name])
        if isinstance(returned, tuple):  # a routing, whose dtypes are the same everywhere
            return tuple(part.to(self._driver.device) for part in returned)
        return None if returned is None else returned.to(self._driver.device, self._driver.dtype)

"""Benchmarks as declarations: what varies, which arms there are, how one call's arguments are made.

    @parametrize("size", full=[2**n for n in range(10, 20)], quick=[4096])
    @parametrize("dtype", full=("fp32", "fp16", "bf16"), quick=("fp16",))
    @benchmark("row", arms=arms_of("scale", torch=lambda: torch.mul))
    def scale(g, size, dtype):
        return {"input": torch.randn(size, generator=g).to(torch_dtype(dtype)), "factor": 0.3}

The decorated function takes a CPU generator and one value of each parameter, and returns the op's arguments by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rapid_llm.kernels.registry import notes

from .calibration import calibrate, described
from .device import device_for
from .errors import BenchError
from .op_arms import Peer, op_arms
from .rows import ROUNDS, RowComparison, compare
from .storages import rebuild


class SkipCaseError(Exception):
    """Raised by a benchmark's function for a combination of parameters that its op does not have."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A name and its values: all, and the few of a quick run."""

    name: str
    full: tuple[Any, ...]
    quick: tuple[Any, ...]

    def values(self, quick: bool) -> tuple[Any, ...]:
        return self.quick if quick else self.full


@dataclass(frozen=True, slots=True)
class ArmsOf:
    """All registered rows of `op` that run here, and `peers`, which may round as `roundings` say."""

    op: str
    peers: Mapping[str, Peer] = field(default_factory=dict)
    roundings: tuple[str, ...] = ()


def arms_of(
    op: str, peers: Mapping[str, Peer] | None = None, *, roundings: tuple[str, ...] = (), **more: Peer
) -> ArmsOf:
    """Arms of an op; each peer is a function that makes the function, and may raise ImportError. roundings: of those
    that the op permits, the ones that peers make as well."""
    return ArmsOf(op, {**(peers or {}), **more}, roundings)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One point of a sweep: its parameters, the arms' results, why arms are missing, and the row that dispatch chooses;
    `failure` where nothing could be measured. notes: what rows said of themselves, such as a floor that left Triton."""

    parameters: dict[str, Any]
    comparison: RowComparison | None
    chosen: str
    missing: dict[str, str]
    failure: str = ""
    code: str = ""
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.parameters.items())

    def json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"parameters": self.parameters, "chosen": self.chosen, "missing": self.missing}
        record["notes"] = {name: list(said) for name, said in self.notes.items()}
        if self.comparison is None:
            return {**record, "failure": {"code": self.code, "reason": self.failure}}
        return {**record, **self.comparison.json()}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A declared sweep. line_arg: what its lines are called, in tables and plots."""

    name: str
    line_arg: str
    arms: ArmsOf
    make: Callable[..., Mapping[str, Any]]
    parameters: tuple[Parameter, ...] = ()

    @property
    def op(self) -> str:
        return self.arms.op

    def cases(self, quick: bool = False) -> list[dict[str, Any]]:
        """Every combination of the parameters' values, the last parameter fastest."""
        lists = [parameter.values(quick) for parameter in self.parameters]
        names = [parameter.name for parameter in self.parameters]
        return [dict(zip(names, values, strict=True)) for values in itertools.product(*lists)]

    def values(self, case: Mapping[str, Any], device: str, seed: int = 0) -> dict[str, Any]:
        """The op's arguments for a case, on `device`; equal seeds give equal values on every device."""
        import torch

        made = self.make(torch.Generator().manual_seed(seed), **case)
        return {key: rebuild(value, lambda t: t.to(device)) for key, value in made.items()}

    def run(
        self,
        device: str,
        *,
        quick: bool = False,
        rounds: int = ROUNDS,
        max_seconds: float = 5.0,
        only: Sequence[str] = (),
        cold: bool = True,
    ) -> Iterator[CaseResult]:
        """Measure every case; a case that cannot be measured comes with its reason. only: arms to measure, besides the
        baseline."""
        for case in self.cases(quick):
            yield self.run_case(case, device, rounds=rounds, max_seconds=max_seconds, only=only, cold=cold)

    def run_case(
        self,
        case: dict[str, Any],
        device: str,
        *,
        rounds: int = ROUNDS,
        max_seconds: float = 5.0,
        only: Sequence[str] = (),
        cold: bool = True,
    ) -> CaseResult:
        try:
            values = self.values(case, device)
        except SkipCaseError as reason:
            return CaseResult(case, None, "", {}, str(reason), "skipped")
        found = op_arms(self.op, values, self.arms.peers, self.arms.roundings)
        arms = [arm for arm in found.arms if not only or arm.name in only or arm.name == found.chosen]
        positional = [value for key, value in found.arguments.items() if isinstance(key, int)]
        named = {key: value for key, value in found.arguments.items() if isinstance(key, str)}
        try:
            comparison = compare(
                arms,
                positional,
                named,
                work=found.work,
                check=None,
                baseline=found.chosen,
                device=device_for(device),
                cold=cold,
                rounds=rounds,
                max_seconds=max_seconds,
            )
        except BenchError as error:
            return CaseResult(case, None, found.chosen, found.missing, str(error), error.code)
        said = {name: notes.of(name) for name in comparison.results if notes.of(name)}
        return CaseResult(case, comparison, found.chosen, found.missing, notes=said)


def benchmark(line_arg: str, arms: ArmsOf) -> Callable[[Callable[..., Mapping[str, Any]]], Benchmark]:
    """Declare a sweep whose lines are `arms`; the decorated function makes the arguments of one call."""

    def declare(make: Callable[..., Mapping[str, Any]]) -> Benchmark:
        return Benchmark(make.__name__, line_arg, arms, make)

    return declare


def parametrize(name: str, *, full: Sequence[Any], quick: Sequence[Any]) -> Callable[[Benchmark], Benchmark]:
    """Let `name` take the values of `full`, or of `quick` in a quick run; stands above `benchmark`."""
    if not full or not quick:
        raise ValueError(f"parametrize({name!r}): full and quick each need at least one value")

    def declare(sweep: Benchmark) -> Benchmark:
        if not isinstance(sweep, Benchmark):
            raise TypeError(f"parametrize({name!r}) stands above benchmark(...), not on {sweep!r}")
        if any(parameter.name == name for parameter in sweep.parameters):
            raise ValueError(f"{sweep.name}: parameter {name!r} is declared twice")
        return replace(sweep, parameters=(Parameter(name, tuple(full), tuple(quick)), *sweep.parameters))

    return declare


def environment(device: str) -> dict[str, Any]:
    """The device and what it does in this run, for result files."""
    found = device_for(device)
    return {"device": found.describe(), "calibration": described(calibrate(found))}

"""Who is timed: this engine through its own front door, and what a round of it takes.

Time is the host's, by the engine's clock, from an idle device to the last token on the host; nothing that a user would
wait for is left out. Requests are greedy and go on past the model's end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rapid_llm.bench.errors import BenchError
from rapid_llm.bench.host import quiet

from .cases import Case

OURS = "rapid-llm"


class InterruptedCaseError(BenchError):
    """Requests of one case did not run side by side from the first step to the last."""

    code = "not_together"


Prompts = Sequence[Sequence[int]]


class Arm(Protocol):
    """One way to serve prompts. name: in tables."""

    name: str

    def ready(self, case: Case, prompts: Prompts) -> None:
        """Do what is to be done once: the prompts' keys and values, compilation, graphs."""

    def run(self, case: Case, prompts: Prompts, round_number: int) -> float:
        """Seconds of one run of `case`. Prompts of a prefill are new in every round."""

    def end(self, case: Case) -> None:
        """Give up what `ready` made."""


@dataclass(slots=True)
class EngineArm:
    """An `LLM`. salt: keeps its prompts apart from those of other arms and runs in the same engine."""

    llm: Any
    name: str = OURS
    salt: str = "bench"

    def ready(self, case: Case, prompts: Prompts) -> None:
        """The first run computes the prompts, which the later ones of a decode case find in the prefix cache; the
        second one meets every size of step."""
        for attempt in range(2):
            self.run(case, prompts, -1 - attempt)

    def run(self, case: Case, prompts: Prompts, round_number: int) -> float:
        from rapid_llm.engine.params import SamplingParams

        decode = case.kind == "decode"
        params = SamplingParams(max_tokens=1 + case.tokens * decode, temperature=0.0, ignore_eos=True)
        salt = f"{self.salt} {case.title}" + ("" if decode else f" {round_number}")
        with quiet():
            outputs = self.llm.generate([list(ids) for ids in prompts], params, cache_salt=salt)
        found = [_Times.of(case, output) for output in outputs]
        if not decode:
            return max(t.first for t in found) - min(t.arrival for t in found)
        first, last = min(t.first for t in found), max(t.last for t in found)
        if round_number >= 0 and max(t.first for t in found) > first:
            raise InterruptedCaseError(
                f"{case.title}: sequences began {max(t.first for t in found) - first:.3f} s apart, so that not every "
                "step was of the whole batch; raise --max-batch-tokens, or lower --batch"
            )
        return last - first

    def end(self, case: Case) -> None:
        """The cache gives up pages by itself."""


@dataclass(frozen=True, slots=True)
class _Times:
    arrival: float
    first: float
    last: float

    @classmethod
    def of(cls, case: Case, output: Any) -> _Times:
        """Raises `InterruptedCaseError` where a request was cut short or began anew."""
        metrics, answer = output.metrics, output.outputs[0]
        wanted = 1 + (case.tokens if case.kind == "decode" else 0)
        if answer.finish_reason != "length" or len(answer.token_ids) != wanted:
            raise InterruptedCaseError(
                f"{case.title}: a request ended with {len(answer.token_ids)} of {wanted} tokens, by "
                f"{answer.finish_reason}: {answer.stop_reason}"
            )
        if metrics.preemptions:
            raise InterruptedCaseError(
                f"{case.title}: the cache was too small, a request was computed twice; raise --kv-cache-tokens"
            )
        return cls(metrics.arrival, metrics.first_token, metrics.finished)

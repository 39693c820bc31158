"""A tiny model, limits as they might have been measured, and arms that take as long as they are told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rapid_llm.models.config import ModelConfig
from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import Case
from rapid_llm.perf.limits import Limits

STATED: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = ModelConfig.from_hf(STATED, name="tiny")
LIMITS = Limits("cuda", 4e12, "sum", 7e14, "bf16 8192^3", 60_000_000, 4.8e12, 989e12, "nominal H200")


@dataclass
class ScriptedArm:
    """times: seconds of each round; an exception is raised in place of a run."""

    times: list[Any]
    name: str = OURS
    log: list[str] = field(default_factory=list)
    fails: Exception | None = None

    def ready(self, case: Case, prompts: Any) -> None:
        if self.fails is not None:
            raise self.fails

    def run(self, case: Case, prompts: Any, round_number: int) -> float:
        self.log.append(f"{self.name} {round_number}")
        found = self.times[round_number % len(self.times)]
        if isinstance(found, Exception):
            raise found
        return float(found)

    def end(self, case: Case) -> None:
        self.log.append(f"{self.name} ends")

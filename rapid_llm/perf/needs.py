"""What a step must move and compute, from a model's configuration and the bytes of its weights.

A decode step of B sequences, each of which then has c tokens, moves at least

    W(B) + B * sum over layers of min(c, window) * k

bytes: W, every weight once however many sequences there are, the head among them and, of a choice of experts, those
that B tokens reach; and k, the bytes of keys and values of one token in one layer. It computes 2 FLOPs for each weight
that a token meets, and 4 * heads * head_dim for each key that it sees. Whatever else a step reads, an engine could do
without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.shapes import matrices


@dataclass(frozen=True, slots=True)
class Needs:
    """Of all steps together. bytes: the least that is read. flops: a multiplication and an addition are two."""

    bytes: float
    flops: float

    def __add__(self, other: Needs) -> Needs:
        return Needs(self.bytes + other.bytes, self.flops + other.flops)

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Of one device. weight_bytes: tokens of a step -> (every dense weight and the head, all experts), as
    `Decoder.weight_bytes`. kv_bytes: of one token's keys and values in all layers. row_bytes: of one row of the
    embedding. ranks: devices that share the arithmetic of `config`."""

    config: ModelConfig
    weight_bytes: Callable[[int], tuple[int, int]]
    kv_bytes: float
    row_bytes: float
    ranks: int = 1

    def decode(self, batch: int, context: int, steps: int) -> Needs:
        """Of `steps` decode steps behind prompts of `context` tokens: step i computes token context + i, which sees as
        many keys."""
        c = self.config
        keys = sum(self._keys(context + i) for i in range(1, steps + 1))
        linear = 2 * (self._weights_of_a_token() + c.vocab_size * c.hidden_size)
        moved = steps * self._weights(batch) + batch * keys * self.kv_bytes / c.num_layers
        return Needs(moved, batch * (steps * linear + 4 * c.q_size * keys) / self.ranks)

    def prefill(self, batch: int, tokens: int) -> Needs:
        """Of the first token of `batch` prompts: the weights once, keys and values written once, one row of logits
        each. Token i sees i keys."""
        c, count = self.config, batch * tokens
        keys = sum(_triangle(tokens, c.window(layer)) for layer in range(c.num_layers))
        linear = 2 * (count * self._weights_of_a_token() + batch * c.vocab_size * c.hidden_size)
        flops = linear + 4 * c.q_size * batch * keys
        return Needs(self._weights(count) + count * self.kv_bytes, flops / self.ranks)

    def _weights(self, tokens: int) -> float:
        """Bytes of weights that a step reads: a uniform choice of k among E experts by n tokens leaves out a share of
        (1 - k / E) ** n."""
        every, experts = self.weight_bytes(tokens)
        c = self.config
        reached = 1 - (1 - c.experts_per_token / c.num_experts) ** tokens if c.num_experts else 0.0
        return every + experts * reached + tokens * self.row_bytes

    def _weights_of_a_token(self) -> float:
        """Weights of the layers that one token is multiplied with."""
        c, total = self.config, 0.0
        for name, count, rows, columns in matrices(c):
            if name.startswith("experts."):
                total += count * rows * columns * c.experts_per_token / c.num_experts
            elif name not in ("embedding", "head"):
                total += count * rows * columns
        return total

    def _keys(self, length: int) -> int:
        """Keys that the last of `length` tokens sees, over all layers."""
        c = self.config
        if not c.windows:
            return c.num_layers * length
        return sum(min(length, window) if window else length for window in c.windows)


def _triangle(tokens: int, window: int) -> int:
    """1 + 2 + ... + tokens, each at most `window` if there is one."""
    whole = min(tokens, window) if window else tokens
    return whole * (whole + 1) // 2 + (tokens - whole) * window

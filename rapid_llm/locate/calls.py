"""The op calls of a decoder as data: where in the model each stands, its arguments by name, and copies of them.

Invariant: the n-th call of a forward pass is the same place of the model in every configuration, so calls of two
decoders are matched by their number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import get_op
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.weights import ModelWeights, Weight
from rapid_llm.verify.guard import bits

Values = dict[str, Any]

MOVING: Final = frozenset(
    {
        *("input", "residual", "query", "key", "value", "k_cache", "v_cache"),
        *("positions", "slot_mapping", "seq_lens", "cu_seqlens_q", "block_table"),
        *("logits", "topk_weights", "topk_ids"),
    }
)
"""Arguments that a step brings; all others belong to the model and its configuration."""


SINGLE: Final = frozenset({"topk_weights"})
"""Those of them that are float32 whatever the activations are."""


class RowRaisedError(RuntimeError):
    """A row raised where it had to answer; the message names the row, the place and what it said."""


class RowFailure(Exception):  # noqa: N818 - never leaves `Watch.call`, which turns it into an error with its place
    """What a row raised."""

    def __init__(self, row: str, text: str) -> None:
        super().__init__(row, text)
        self.row, self.text = row, text


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the model: a name within a layer, or outside of the layers (layer None)."""

    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


@dataclass(frozen=True, slots=True)
class Place:
    """A call: which step, and where in the model."""

    step: int
    slot: Slot


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """values: every argument by its schema name, in the form that the row reads."""

    op: str
    row: str
    fn: Callable[..., Any]
    values: Values

    def held(self) -> Call:
        """The call without what its step brought."""
        return Call(self.op, self.row, self.fn, {k: v for k, v in self.values.items() if k not in MOVING})

    def with_moving(self, values: Mapping[str, Any]) -> Call:
        """This row and its weights, on the step's part of other arguments."""
        return Call(self.op, self.row, self.fn, {**self.values, **{k: v for k, v in values.items() if k in MOVING}})

    def run(self) -> Any:
        """Call the row; what it returns. Raises `RowFailure` for whatever the row raises."""
        parsed = get_op(self.op).parsed
        positional = [self.values.get(a.name, a.default) for a in parsed.positional]
        keywords = {a.name: self.values[a.name] for a in parsed.keyword_only if a.name in self.values}
        try:
            return self.fn(*positional, **keywords)
        except Exception as error:
            raise RowFailure(self.row, f"{type(error).__name__}: {error}") from error

    def results(self, returned: Any) -> tuple[Tensor, ...]:
        """What the call computed: its result, or the arguments that it changed."""
        mutated = get_op(self.op).parsed.mutated
        if mutated:
            return tuple(self.values[name] for name in mutated)
        return returned if isinstance(returned, tuple) else (returned,)


def named(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Values:
    """Arguments by name."""
    names = [name for name, kind, _ in get_op(op).parsed.parameters() if kind == "pos"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def slots(config: ModelConfig) -> tuple[Slot, ...]:
    """The calls of one step in order: the forward pass, then the head."""
    family = config.family
    found = [Slot(None, "embedding")]
    found += [Slot(None, "embedding_scale")] if family.scaled_embedding else []
    found.append(Slot(0, "attn_norm"))
    norms = ["q_norm", "k_norm"] if family.qk_norm else []
    behind_attention = ["post_attn_norm"] if family.post_norms else []
    behind_ffn = ["post_ffn_norm"] if family.post_norms else []
    for i in range(config.num_layers):
        ffn = ("router", "topk", "experts") if config.has_experts(i) else ("gate_up", "activation", "down")
        names = ("qkv", *norms, "rope", "attention", "o", *behind_attention, "ffn_norm", *ffn, *behind_ffn)
        found += [Slot(i, name) for name in names]
        last = i == config.num_layers - 1
        found.append(Slot(None, "final_norm") if last else Slot(i + 1, "attn_norm"))
    return (*found, Slot(None, "head"))


def matrices(weights: ModelWeights) -> dict[Slot, Weight]:
    """The matrix of every slot that has one, as loaded."""
    found = {Slot(None, "embedding"): weights.embedding, Slot(None, "head"): weights.head}
    for i, layer in enumerate(weights.layers):
        found |= {Slot(i, name): weight for name, (weight, _) in layer.linears().items()}
    return found


class Watch:
    """An observer that knows where each call stands. Subclasses say what to do with it in `see`."""

    def __init__(self, order: tuple[Slot, ...]) -> None:
        self._order = order
        self._step = -1
        self._at = 0

    def begin(self, step: int) -> None:
        """A step starts: the next call is its first."""
        self._step, self._at = step, 0

    def call(self, op_id: str, row_name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        slot = self._order[self._at]
        self._at += 1
        call = Call(op_id, row_name, fn, named(op_id, args, kwargs))
        try:
            return self.see(Place(self._step, slot), call)
        except RowFailure as failure:
            raise RowRaisedError(f"{failure.row} raised at {slot}: {failure.text}") from failure.__cause__

    def see(self, place: Place, call: Call) -> Any:
        """Must return what the op returns."""
        return call.run()


def copied(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy with the same strides, floating point numbers as `dtype`."""
    kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    return result.copy_(tensor)


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a moving argument where activations have `dtype`."""
    return torch.float32 if name in SINGLE else dtype


def moved(values: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Values:
    """Copies of what the step brought, for a row of that dtype and device."""
    brought = {k: v for k, v in values.items() if k in MOVING}
    return {k: copied(v, dtype_of(k, dtype), device) if isinstance(v, Tensor) else v for k, v in brought.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(bits(a.cpu().contiguous()), bits(b.cpu().contiguous())))

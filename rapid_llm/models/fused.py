"""Layers in fewer kernels, for steps of one token: the norm goes into the product behind it, the activation and the
addition to the residual into the product before them.

At one token a layer's small kernels cost more than what they compute: on an H200 each is 1.2 to 2.3 us of its own and
up to 1 us in which nothing runs, ten times a layer. These calls are used where every one of them has a row that is
faster than the composition of single ops, which is what the floor of each is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor

from rapid_llm.kernels import Selected
from rapid_llm.kernels.preparation import prepare

from .config import ModelConfig
from .op_table import Binder, Choose, Wrap
from .quant import UNQUANTIZED
from .weights import LayerWeights, ModelWeights

Call = Callable[..., Any]

FLOOR: Final = "native"

LINEAR_ADD: Final = "linear_add"
NORM_LINEAR: Final = "rmsnorm_linear"
NORM_GATE_UP: Final = "rmsnorm_linear_silu_and_mul"


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """One layer's calls: qkv and activated take the residual, add_o and add_down an input and the residual, which they
    add to."""

    qkv: Call
    add_o: Call
    activated: Call
    add_down: Call


@dataclass(frozen=True, slots=True, eq=False)
class FusedRows:
    """The handles of every layer, with the weights in the form that they read. eps: of the norms."""

    layers: tuple[tuple[tuple[Selected, dict[str, Any]], ...], ...]

    def handles(self) -> list[Selected]:
        """Each handle once."""
        found = {id(handle): handle for layer in self.layers for handle, _ in layer}
        return list(found.values())

    def bind(self, wrap: Wrap) -> tuple[FusedLayer, ...]:
        """The calls of every layer, through `wrap`."""
        return tuple(
            FusedLayer(*(partial(wrap(handle), **arguments) for handle, arguments in layer)) for layer in self.layers
        )


def fuses(config: ModelConfig, weights: ModelWeights) -> bool:
    """Whether the layers of a model are of the kind that the fused ops compute: dense matrices, SiLU, and nothing
    between a product and the residual that it is added to."""
    if config.family.gelu or config.family.post_norms:
        return False
    for layer in weights.layers:
        if layer.experts is not None or layer.o_bias is not None:
            return False
        if any(weight.scheme != UNQUANTIZED for weight, _ in layer.linears().values()):
            return False
    return True


def fused_rows(
    binder: Binder, config: ModelConfig, weights: ModelWeights, choose: Choose, *, floor: bool = False
) -> FusedRows | None:
    """Rows for one token; None where the model is of another kind, or some op has nothing better than its floor.

    floor: take the floor too.
    """
    if not fuses(config, weights):
        return None
    keys = [_keys(binder, layer, config.rms_norm_eps) for layer in weights.layers]
    prepare(key for layer in keys for key, _ in layer)
    layers, known = [], dict[str, Selected]()
    for layer in keys:
        bound = []
        for key, arguments in layer:
            name = repr(sorted(key.items(), key=str))
            handle = known.get(name) or known.setdefault(name, choose(**key))
            if handle.spec.backend == FLOOR and not floor:
                return None
            bound.append((handle, {**arguments, "weight": handle.prepack(arguments["weight"])}))
        layers.append(tuple(bound))
    return FusedRows(tuple(layers))


def _keys(binder: Binder, layer: LayerWeights, eps: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(what to dispatch on, arguments that are bound) of a layer's four calls, in the order of `FusedLayer`."""
    if layer.gate_up is None or layer.down is None:
        raise ValueError("a layer without gate_up and down cannot be fused; ask `fuses` first")

    def row(features: int) -> Tensor:
        return binder.empty(1, features)

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for op, norm, weight, bias in (
        (NORM_LINEAR, layer.attn_norm, layer.qkv, layer.qkv_bias),
        (LINEAR_ADD, None, layer.o, None),
        (NORM_GATE_UP, layer.ffn_norm, layer.gate_up, None),
        (LINEAR_ADD, None, layer.down, None),
    ):
        outputs, features = weight.shape
        fixed: dict[str, Any] = {"weight": weight.data}
        if norm is None:
            calls.append((op, (row(features), weight.data, row(outputs)), fixed))
            continue
        fixed |= {"norm_weight": norm, "eps": eps}
        if op == NORM_LINEAR:
            fixed["bias"] = bias
        calls.append((op, (row(features),), fixed))
    return [
        (binder.key(op, *args, **({} if op == LINEAR_ADD else fixed), prepack=True), fixed) for op, args, fixed in calls
    ]

"""Scratch ops whose one row does nothing, so that what is left is the cost of dispatch."""

from __future__ import annotations

from typing import Any

from rapid_llm.kernels import Dim, KernelSpec, OpSpec, Out, Shape, register

TWO = "bench_two"
SIX = "bench_six"
BUSY = "bench_two_constrained"

_NOWHERE = "benchmarks.noop_rows:two"


def two(input: Any, weight: Any, eps: float = 1e-06, out: Any = None) -> None:
    """The row of the ops with two tensors."""


def six(
    query: Any,
    k_cache: Any,
    v_cache: Any,
    table: Any,
    lengths: Any,
    positions: Any,
    scale: float = 1.0,
    out: Any = None,
) -> None:
    """The row of the op with six tensors."""


def fast(input: Any, weight: Any, eps: float = 1e-06, out: Any = None) -> None:
    """A row that constrains what it takes, so that the key of its op must hold those facts."""


def available() -> bool:
    return True


def _op(op_id: str, schema: str, first: str, dims: dict[str, str]) -> OpSpec:
    return OpSpec(
        id=op_id,
        schema=schema,
        group="bench",
        dims=dims,
        out=Out(shape=f"{first}.shape", dtype=f"{first}.dtype"),
        dtypes=("fp32", "fp16", "bf16"),
        dtype_of=first,
        oracle=_NOWHERE,
        cases=_NOWHERE,
        bound=_NOWHERE,
        work=_NOWHERE,
        doc="A scratch op of the dispatch benchmark.",
    )


def _native(op_id: str, function: str) -> KernelSpec:
    return KernelSpec(
        name=f"native/{op_id}", op=op_id, backend="native", target=f"benchmarks.noop_rows:{function}", priority=0
    )


def register_all() -> None:
    """Declare the scratch ops; once a process."""
    norm = "(Tensor input, Tensor weight, float eps=1e-06) -> Tensor"
    attention = (
        "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lengths, Tensor positions, "
        "float scale=1.0) -> Tensor"
    )
    hidden = {"hidden": "input.shape[-1]"}
    register(_op(TWO, norm, "input", hidden), _native(TWO, "two"))
    register(_op(SIX, attention, "query", {"head_dim": "query.shape[-1]"}), _native(SIX, "six"))
    register(
        _op(BUSY, norm, "input", hidden),
        _native(BUSY, "two"),
        KernelSpec(
            name=f"fast/{BUSY}",
            op=BUSY,
            backend="fast",
            target="benchmarks.noop_rows:fast",
            available="benchmarks.noop_rows:available",
            shape=Shape(require=(Dim("hidden", multiple_of=8),)),
            layout=("input:last_dim_contiguous", "input:aligned16"),
        ),
    )

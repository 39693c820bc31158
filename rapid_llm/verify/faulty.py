"""A battery of wrong rows: what the conformance suite is worth is how many of them it refuses.

Each is a plain CPU row with one fault that real kernels have shipped with. Some belong to an op (`plain` makes them
when told to), some to any op with a result (the wrappers below). `tests/verify/test_faulty.py` demands that every one
is caught, and that every plain row without a fault passes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import get_op
from rapid_llm.verify import (
    faulty_layout,
    plain,
    plain_deepseek,
    plain_formats,
    plain_fused,
    plain_moe,
    plain_paged,
)
from rapid_llm.verify.ulp import FORMATS, round_to, truncate_to

Fn = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class FaultyRow:
    """A wrong row of `op`: `fn` has the op's signature; `dtype` and `scheme` are where the fault shows."""

    op: str
    fault: str
    fn: Fn
    dtype: str = "fp32"
    scheme: str | None = None

    @property
    def id(self) -> str:
        return f"{self.op}-{self.fault}-{self.dtype}{f'-{self.scheme}' if self.scheme else ''}".replace(" ", "_")


def _leaves_tail(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Works on whole groups of four but the last; what is left over is never written."""
    right = fn(*args, **keywords)
    result = torch.empty_like(right) if out is None else out
    whole = max(right.numel() - 1, 0) // 4 * 4
    flat = result.reshape(-1).clone()
    flat[:whole] = right.reshape(-1)[:whole]
    return result.copy_(flat.view(right.shape))


def _leaves_last_row(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Never writes the last row."""
    right = fn(*args, **keywords)
    result = torch.empty_like(right) if out is None else out
    if result.dim():
        result[:-1] = right[:-1]
    else:
        result.copy_(right)
    return result


def _writes_nothing(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Trusts that the memory holds the answer already."""
    return torch.empty_like(fn(*args, **keywords)) if out is None else out


def _ignores_out(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Returns a tensor of its own although `out` was given."""
    return fn(*args, **keywords)


def _returns_none(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor | None:
    """Fills `out`, and forgets to return it."""
    right = fn(*args, **keywords)
    if out is None:
        return right
    out.copy_(right)
    return None


def _ignores_input_strides(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Reads its first argument as if it were dense."""
    first = args[0]
    span = 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True)) if first.numel() else 0
    if span >= first.numel():
        dense = torch.empty(first.shape).stride()
        first = first.as_strided(first.shape, dense, first.storage_offset())
    return fn(first, *args[1:], **keywords) if out is None else out.copy_(fn(first, *args[1:], **keywords))


def _ignores_out_strides(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Writes `out` as if it were dense."""
    right = fn(*args, **keywords)
    if out is None or out.numel() == 0:
        return right if out is None else out
    out.as_strided(right.shape, right.stride(), out.storage_offset()).copy_(right)
    return out


def _writes_past_the_end(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Stores one element too many."""
    right = fn(*args, **keywords)
    if out is None:
        return right
    out.copy_(right)
    if out.numel() and out.is_contiguous():
        out.as_strided((out.numel() + 1,), (1,), out.storage_offset())[-1] = 0.0
    return out


def _changes_its_input(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Uses its input as scratch memory."""
    right = fn(*args, **keywords).clone()
    if args[0].numel() and args[0].is_contiguous() and out is not args[0]:
        args[0].reshape(-1)[0] = 1
    return right if out is None else out.copy_(right)


def _swallows_nan(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Lets a maximum or a clamp turn NaN into a number."""
    right = torch.nan_to_num(fn(*args, **keywords), nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    return right if out is None else out.copy_(right)


def _saturates(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Gives the largest finite number for infinity."""
    right = fn(*args, **keywords)
    limit = torch.finfo(right.dtype).max
    right = torch.where(torch.isnan(right), right, right.clamp(-limit, limit))
    return right if out is None else out.copy_(right)


def _not_repeatable(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Adds in an order of its own each time: another last bit, still within the bound."""
    right = fn(*args, **keywords).clone()
    _not_repeatable.calls = getattr(_not_repeatable, "calls", 0) + 1  # type: ignore[attr-defined]
    if right.numel() and _not_repeatable.calls % 2:  # type: ignore[attr-defined]
        right.reshape(-1)[0] = torch.nextafter(right.reshape(-1)[0], torch.tensor(0.0))
    return right if out is None else out.copy_(right)


def _a_share_of(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """0.3 of the right answer."""
    right = fn(*args, **keywords) * 0.3
    return right if out is None else out.copy_(right)


def _one_element_wrong(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """The eighth element is two ulp off."""
    right = fn(*args, **keywords).clone()
    flat = right.reshape(-1)
    if flat.numel() > 7:
        for _ in range(2):
            flat[7] = torch.nextafter(flat[7], torch.tensor(float("inf"), dtype=flat.dtype))
    return right if out is None else out.copy_(right)


def _refuses_empty(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Launches an empty grid."""
    if args[0].numel() == 0:
        raise RuntimeError("invalid configuration argument")
    return fn(*args, **keywords) if out is None else out.copy_(fn(*args, **keywords))


def _result_in_fp32(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Forgets the cast of the result."""
    right = fn(*args, **keywords)
    return right.float() if out is None else out.copy_(right)


def _result_is_a_view(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Hands out a result that isn't contiguous."""
    right = fn(*args, **keywords)
    return torch.stack((right, right), dim=-1)[..., 0] if out is None else out.copy_(right)


def _offsets_in_int32(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Multiplies row and stride in 32 bits, so that far rows are read elsewhere."""
    first = args[0]
    wrapped_strides = tuple(s % 2**31 for s in first.stride())
    if wrapped_strides != first.stride():
        first = first.as_strided(first.shape, wrapped_strides, first.storage_offset())
    right = fn(first, *args[1:], **keywords)
    return right if out is None else out.copy_(right)


def _writes_before_reading(fn: Fn, args: tuple[Any, ...], out: Tensor | None, keywords: dict[str, Any]) -> Tensor:
    """Clears `out` first, although it may be its input."""
    if out is None:
        return fn(*args, **keywords)
    out.zero_()
    return out.copy_(fn(*args, **keywords))


def remembering(fn: Fn) -> Fn:
    """A row that answers from memory when it meets a pointer and shape again."""
    memory: dict[tuple[Any, ...], Tensor] = {}

    def run(*args: Any, out: Tensor | None = None, **keywords: Any) -> Tensor:
        key = (
            args[0].data_ptr(),
            tuple(args[0].shape),
            args[0].stride(),
            *(a for a in args if not isinstance(a, Tensor)),
        )
        if key not in memory:
            memory[key] = fn(*args, **keywords).clone()
        return memory[key].clone() if out is None else out.copy_(memory[key])

    return run


def truncating(fn: Fn, name: str, dtype: torch.dtype) -> Fn:
    """A row that computes in fp32 and cuts the low bits off at the store, as Triton's interpreter does for bf16."""

    def run(*args: Any, out: Tensor | None = None, **keywords: Any) -> Tensor:
        wider = [a.float() if isinstance(a, Tensor) and a.dtype in FORMATS else a for a in args]
        cut = truncate_to(fn(*wider, **keywords).double(), dtype)
        right = round_to(cut, dtype).to(dtype)
        return right if out is None else out.copy_(right)

    run.__name__ = name
    return run


WRAPPERS: Final = {
    "tail unwritten": _leaves_tail,
    "last row unwritten": _leaves_last_row,
    "output unwritten": _writes_nothing,
    "out ignored": _ignores_out,
    "out not returned": _returns_none,
    "input strides ignored": _ignores_input_strides,
    "out strides ignored": _ignores_out_strides,
    "stray write": _writes_past_the_end,
    "input changed": _changes_its_input,
    "NaN swallowed": _swallows_nan,
    "infinity saturated": _saturates,
    "not repeatable": _not_repeatable,
    "0.3 of the answer": _a_share_of,
    "one element wrong": _one_element_wrong,
    "empty refused": _refuses_empty,
    "offsets in int32": _offsets_in_int32,
    "aliased out cleared": _writes_before_reading,
    "result in fp32": _result_in_fp32,
    "result is a view": _result_is_a_view,
}
"""Faults of any op with a result: (the right row, its arguments, `out`, keywords) -> result."""


def wrapped(fault: str, fn: Fn) -> Fn:
    """`fn` with the general fault `fault`."""
    wrapper = WRAPPERS[fault]

    def run(*args: Any, out: Tensor | None = None, **keywords: Any) -> Any:
        return wrapper(fn, args, out, keywords)

    run.__name__ = f"{fn.__name__} ({fault})"
    return run


_OWN: Final[dict[str, tuple[tuple[str, str, str | None], ...]]] = {
    "scale": (("accepts overlap", "fp32", None),),
    "silu_and_mul": (
        ("halves swapped", "fp32", None),
        ("gelu", "bf16", None),
        ("exp overflows", "fp32", None),
        ("rounds twice", "bf16", None),
    ),
    "gelu_and_mul": (
        *((fault, "fp32", None) for fault in ("halves swapped", "erf", "silu", "sigmoid of 1.702", "tails cancel")),
        ("rounds twice", "bf16", None),
    ),
    "rmsnorm": (
        ("eps constant", "fp32", None),
        ("eps outside", "bf16", None),
        ("eps ignored", "fp16", None),
        ("padded width", "fp32", None),
        ("rounds twice", "bf16", None),
        ("weight plus one", "fp32", None),
    ),
    "fused_add_rmsnorm": (
        ("residual kept", "fp32", None),
        ("norm of the rounded sum", "bf16", None),
        ("eps constant", "fp32", None),
    ),
    "rope": tuple(
        (fault, "fp32", None)
        for fault in ("pairing fixed", "position off by one", "angle negated", "key forgotten", "rest scaled")
    ),
    "embedding": (
        ("ids clamped", "fp32", None),
        ("ids wrapped", "bf16", None),
        ("through fp16", "bf16", None),
        ("through fp16", "uint8", "q8_0"),
        ("nibbles interleaved", "uint8", "q4_0"),
        ("zero point", "uint8", "q4_0"),
        ("offset ignored", "uint8", "q4_1"),
    ),
    "linear": (
        ("last column dropped", "bf16", None),
        ("tf32", "fp32", None),
        ("weight through bf16", "fp32", "q8_0"),
        ("weight through bf16", "fp32", None),
        ("weight through fp16", "fp32", "q4_1"),
        ("input through bf16", "fp32", "q4_0"),
        ("accumulates in fp16", "fp16", None),
        ("accumulates in bf16", "bf16", None),
        ("bias ignored", "fp32", "q4_1"),
        ("nibbles interleaved", "bf16", "q4_1"),
        ("offset ignored", "fp16", "q4_1"),
        ("e5m2", "bf16", "fp8_block128"),
        ("subnormals flushed", "fp32", "fp8_block128"),
        ("first scale alone", "bf16", "fp8_block128"),
    ),
    "kvcache.write": tuple(
        (fault, "fp32", None)
        for fault in (
            *("page size fixed", "padding written", "slot 0 skipped", "keys and values swapped"),
            *("fp8 truncates", "fp8 overflows"),
        )
    ),
    "rope_kvcache_write": tuple(
        (fault, "fp32", None)
        for fault in (
            *("key cached unrotated", "key rotated in the cache alone", "padding not rotated", "padding written"),
            *("pairing fixed", "page size fixed", "keys and values swapped", "fp8 truncates", "fp8 overflows"),
        )
    ),
    "sample": tuple(
        (fault, "fp32", None)
        for fault in (
            *("unusable rows answered", "last maximum", "temperature ignored", "top_k ignored", "top_k ties dropped"),
            *("top_p ignored", "top_p of everything", "top_p stops short", "min_p ignored", "mass not renormalised"),
            "one too far",
        )
    ),
}

_FAULTS: Final = {**_OWN, **plain_deepseek.FAULTS, **plain_fused.FAULTS, **plain_moe.FAULTS, **plain_paged.FAULTS}

_GENERAL: Final = (
    *(("scale", fault, "fp32") for fault in WRAPPERS if fault != "result in fp32"),
    ("scale", "result in fp32", "bf16"),
    *(
        ("rmsnorm", f, "bf16")
        for f in ("last row unwritten", "input strides ignored", "NaN swallowed", "input changed")
    ),
    *((op, "aliased out cleared", "fp32") for op in ("rmsnorm", "attention.decode", "linear")),
    *(("silu_and_mul", f, "fp16") for f in ("tail unwritten", "out strides ignored", "infinity saturated")),
    *(("linear", f, "fp32") for f in ("last row unwritten", "input strides ignored", "out ignored", "stray write")),
    *(("attention.decode", f, "fp32") for f in ("output unwritten", "input strides ignored", "NaN swallowed")),
    *(("attention.prefill", f, "fp32") for f in ("last row unwritten", "input strides ignored", "NaN swallowed")),
    *(("sample", f, "fp32") for f in ("output unwritten", "input strides ignored", "out ignored", "empty refused")),
)


def plain_row(op_id: str) -> Fn:
    """The right plain row of an op; an op with a module of its own here has it there, as `<function>_plain`."""
    name = op_id.replace(".", "_")
    for module in (plain, plain_deepseek, plain_fused, plain_moe, plain_paged):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    row: Fn = getattr(importlib.import_module(f"rapid_llm.verify.{name}"), f"{name}_plain")
    return row


def own(op_id: str) -> list[FaultyRow]:
    """The wrong rows that are of one op alone, or of rows that its cases must have."""
    faults = _FAULTS.get(op_id, ()) + plain_formats.FAULTS.get(op_id, ())
    rows = [FaultyRow(op_id, f, functools.partial(plain_row(op_id), fault=f), d, s) for f, d, s in faults]
    for fault in faulty_layout.FAULTS.get(op_id, ()):
        rows.append(FaultyRow(op_id, fault, faulty_layout.wrapped(get_op(op_id), fault, plain_row(op_id)), "bf16"))
    return rows


def battery() -> list[FaultyRow]:
    """Every wrong row."""
    rows = [FaultyRow(op, fault, wrapped(fault, plain_row(op)), dtype) for op, fault, dtype in _GENERAL]
    rows.append(FaultyRow("scale", "answers from memory", remembering(plain.scale)))
    for op, dtype in (("scale", "bf16"), ("scale", "fp16"), ("rmsnorm", "bf16"), ("attention.decode", "bf16")):
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        rows.append(FaultyRow(op, "truncates", truncating(plain_row(op), op, kind), dtype))
    return [*rows, *(row for op in _FAULTS for row in own(op))]

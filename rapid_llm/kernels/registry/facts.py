"""What dispatch knows about one call: device, dtype, scheme, named dimensions and layout, read off the arguments.

The readers are compiled once per op from its `OpSpec`; torch is never imported here, tensors are only asked for
attributes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ArgumentError
from .spec import AUTO_DIMS, LAYOUT_TAGS, OpSpec, dtype_label

NOT_GIVEN: Any = object()


@dataclass(frozen=True, slots=True)
class Facts:
    """The key of a decision. `None` for dtype or scheme, and an absent dimension, mean "not given". batch_invariant:
    the caller takes rows that declare it alone."""

    op: str
    device: str
    index: int | None = None
    sm: int | None = None
    dtype: str | None = None
    scheme: str | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    layout: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    prepack: bool = False
    capturing: bool = False
    batch_invariant: bool = False

    def key(self) -> tuple[object, ...]:
        """A hashable form: equal keys, equal decisions."""
        dims = tuple(sorted(self.dims.items()))
        return (
            *(self.op, self.device, self.index, self.sm, self.dtype, self.scheme, dims),
            *(self.layout, self.allow, self.prepack, self.capturing, self.batch_invariant),
        )

    def as_json(self) -> dict[str, object]:
        """The key as plain JSON data."""
        return {
            "op": self.op,
            "device": self.device,
            "sm": self.sm,
            "dtype": self.dtype,
            "scheme": self.scheme,
            "dims": dict(self.dims),
            "layout": sorted(self.layout),
            "allow": sorted(self.allow),
            "prepack": self.prepack,
            "capturing": self.capturing,
            "batch_invariant": self.batch_invariant,
        }


def expression_names() -> dict[str, object]:
    """The helpers that `OpSpec` expressions may use beside the op's own arguments."""
    from ..ops.block_formats import row_elements

    return {"prod": math.prod, "max": max, "min": min, "row_elements": row_elements}


def compile_dims(op: OpSpec) -> Callable[..., dict[str, int]]:
    """A function of the op's arguments that returns its named dimensions."""
    names = ", ".join(a.name for a in op.parsed.args)
    body = ", ".join(f"{name!r}: {text}" for name, text in op.dims.items())
    scope = expression_names()
    exec(compile(f"def dims({names}): return {{{body}}}", f"<dims of {op.id}>", "exec"), scope)
    return scope["dims"]  # type: ignore[return-value]


def bind(op: OpSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Arguments by name with defaults filled in, and `out`; raises `ArgumentError` where they do not fit the schema."""
    values: dict[str, Any] = {}
    params = op.parsed.parameters()
    positional = [name for name, kind, _ in params if kind == "pos"]
    if len(args) > len(positional):
        raise ArgumentError(f"{op.id}: takes {len(positional)} positional arguments, got {len(args)}")
    values.update(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name in values or name not in {p[0] for p in params}:
            raise ArgumentError(f"{op.id}: unexpected argument {name!r}; the signature is {op.schema}")
        values[name] = value
    for arg in op.parsed.args:
        if arg.name not in values:
            if not arg.has_default:
                raise ArgumentError(f"{op.id}: argument {arg.name!r} is missing; the signature is {op.schema}")
            values[arg.name] = arg.default
    out = values.pop("out", None)
    for arg in op.parsed.tensors:
        value = values[arg.name]
        if not (value is None and arg.optional) and not hasattr(value, "data_ptr"):
            raise ArgumentError(f"{op.id}: {arg.name} must be a Tensor, got {type(value).__name__}")
    return values, out


def read(op: OpSpec, dims_of: Callable[..., dict[str, int]], values: Mapping[str, Any], out: Any = None) -> Facts:
    """Every fact of a call, from its bound arguments."""
    tensors = [(a.name, values[a.name]) for a in op.parsed.tensors if values[a.name] is not None]
    first = tensors[0][1]
    devices = {str(t.device) for _, t in tensors}
    if len(devices) > 1:
        raise ArgumentError(f"{op.id}: tensors are on different devices: {', '.join(sorted(devices))}")
    try:
        dims = dims_of(**values)
    except (IndexError, AttributeError) as error:
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in tensors)
        raise ArgumentError(f"{op.id}: shapes do not fit {op.schema}: {shapes} ({error})") from None
    for name, value in dims.items():
        if not isinstance(value, int):
            raise ArgumentError(f"{op.id}: {name} must be a whole number, got {value!r}")
    everything = tensors if out is None else [*tensors, ("out", out)]
    dims["numel"] = max(t.numel() for _, t in everything)
    dims["extent"] = max(_extent(t) for _, t in everything)
    scheme = values["scheme"] if op.schemes else None
    if op.schemes and scheme not in op.schemes:
        raise ArgumentError(f"{op.id}: unknown scheme {scheme!r}; known: {', '.join(op.schemes)}")
    text = str(values[op.dtype_of].dtype).removeprefix("torch.")
    try:
        dtype = dtype_label(text)
    except ValueError:  # a dtype that no row can name: every row is filtered on it, and says so
        dtype = text
    return Facts(
        op=op.id,
        device=first.device.type,
        index=first.device.index,
        dtype=dtype,
        scheme=scheme,
        dims=dims,
        layout=_layout(op, everything),
    )


def refuse_grad(op: OpSpec, values: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` if autograd records and would expect a gradient of one of the arguments."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, value in values.items():
        if getattr(value, "requires_grad", False):
            raise ArgumentError(
                f"{op.id}: no op has a gradient, and {name} requires one; call it within torch.inference_mode() or "
                f"torch.no_grad(), or pass {name}.detach()"
            )


def given(op: OpSpec, **given: Any) -> Facts:
    """Facts as stated by a caller who has no tensors yet; raises `ArgumentError` on names the op does not have."""
    device, _, index = str(given.pop("device") or "cpu").partition(":")
    if device not in ("cpu", "cuda", "meta") or (index and not index.isdecimal()):
        raise ArgumentError(f"{op.id}: unknown device {device}{':' if index else ''}{index}; use cpu, cuda or cuda:N")
    dims = given.pop("dims")
    dims = {} if dims is None else dims
    if not isinstance(dims, Mapping) or not all(type(v) is int and v >= 0 for v in dims.values()):
        raise ArgumentError(f"{op.id}: dims must map names to whole numbers from 0 up, got {dims!r}")
    dims = {**{name: values[0] for name, values in op.usual.items()}, **dims}
    unknown = sorted(set(dims) - {*op.dims, *AUTO_DIMS})
    if unknown:
        raise ArgumentError(f"{op.id}: unknown dimension {unknown[0]!r}; it has {sorted({*op.dims, *AUTO_DIMS})}")
    dtype, scheme = given.pop("dtype"), given.pop("scheme")
    if scheme is None and op.schemes:
        scheme = op.schemes[0]
    if scheme is not None and scheme not in op.schemes:
        raise ArgumentError(f"{op.id}: unknown scheme {scheme!r}; known: {', '.join(op.schemes) or 'none'}")
    allow, layout = given.pop("allow"), given.pop("layout")
    for name, value in (("allow", allow), ("layout", layout)):
        if isinstance(value, str):
            raise ArgumentError(f"{op.id}: {name} must be a tuple of names, got the text {value!r}")
    allow = frozenset(allow)
    wrong = sorted(set(layout or ()) - {*op.facts, *_all_tags(op)})
    if wrong:
        raise ArgumentError(f"{op.id}: unknown layout tag {wrong[0]!r}; it has {sorted({*op.facts, *_all_tags(op)})}")
    if allow - set(op.numerics.roundings):
        extra = sorted(allow - set(op.numerics.roundings))[0]
        raise ArgumentError(f"{op.id}: unknown rounding {extra!r}; it permits {list(op.numerics.roundings)}")
    tags = frozenset({*op.facts, *(_all_tags(op) if layout is None else layout)})
    try:
        label = None if dtype is None else dtype_label(dtype)
    except ValueError as error:
        raise ArgumentError(f"{op.id}: {error}") from None
    return Facts(
        op=op.id,
        device=device,
        index=int(index) if index else None,
        dtype=label,
        scheme=scheme,
        dims=dims,
        layout=tags,
        allow=allow,
        **given,
    )


def _all_tags(op: OpSpec) -> set[str]:
    """Without tensors, tensors are taken to be dense and aligned."""
    owned = {f"{a.name}:{tag}" for a in op.parsed.tensors for tag in LAYOUT_TAGS}
    return owned | set(LAYOUT_TAGS)


def _layout(op: OpSpec, tensors: list[tuple[str, Any]]) -> frozenset[str]:
    tags = set(op.facts)
    for tag, holds in (("contiguous", _contiguous), ("last_dim_contiguous", _last_dim), ("aligned16", _aligned16)):
        having = [name for name, t in tensors if holds(t)]
        tags.update(f"{name}:{tag}" for name in having)
        if len(having) == len(tensors):
            tags.add(tag)
    return frozenset(tags)


def _contiguous(t: Any) -> bool:
    return bool(t.is_contiguous())


def _last_dim(t: Any) -> bool:
    return bool(t.dim() == 0 or t.shape[-1] <= 1 or t.stride(-1) == 1)


def _aligned16(t: Any) -> bool:
    """The first element and the start of every row lie on 16-byte boundaries."""
    size = t.element_size()
    if type(t).__name__ == "FakeTensor" or t.data_ptr() % 16:
        return False
    return all(s * size % 16 == 0 for s in t.stride()[:-1])


def _extent(t: Any) -> int:
    """One more than the largest element offset that a kernel may form from the first element."""
    if t.numel() == 0:
        return 0
    return 1 + int(sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride(), strict=True)))

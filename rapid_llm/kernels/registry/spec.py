"""The nouns of the kernel layer: `OpSpec` declares an operator once, `KernelSpec` one implementation of it.

Both are frozen, hold plain data, and name code only by `"module.path:attr"` strings, so that declaring every op of the
package imports neither torch nor Triton nor a kernel.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from . import schema as _schema
from .errors import RegistrationError
from .schema import Schema

UNMEASURED: Final = -1
"""The priority of a row that no benchmark has ranked. It loses every tie against a measured row."""

DTYPES: Final = MappingProxyType(
    {
        "float32": "fp32",
        "float16": "fp16",
        "bfloat16": "bf16",
        "float64": "fp64",
        "float8_e4m3fn": "fp8_e4m3",
        "float8_e5m2": "fp8_e5m2",
        "int8": "int8",
        "uint8": "uint8",
        "int16": "int16",
        "int32": "int32",
        "int64": "int64",
        "bool": "bool",
    }
)
"""torch's dtype spelling -> this package's label."""

LAYOUT_TAGS: Final = ("contiguous", "last_dim_contiguous", "aligned16")
"""Facts read off a tensor. Bare, a tag speaks of every tensor argument; `weight:contiguous` of one."""

AUTO_DIMS: Final = ("numel", "extent")
"""Dimensions that every op has: the largest element count, and the largest reachable element offset + 1."""

_TARGET = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_ROW = re.compile(r"^[a-z][a-z0-9_]*/[a-z0-9_]+(\.[a-z0-9_]+)*$")
_OP = re.compile(r"^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?$")


def dtype_label(dtype: object) -> str:
    """The label of a torch dtype, of torch's spelling, or of a label itself; raises `ValueError` on anything else."""
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return DTYPES[text]
    if text in DTYPES.values():
        return text
    raise ValueError(f"unknown dtype {text!r}; known: {', '.join(DTYPES.values())} (torch's spellings too)")


@dataclass(frozen=True, slots=True)
class GoldenRecord:
    """A row's claim about itself: it was compared with `baseline` and differed by at most `max_abs_diff`.

    A claim admits nothing; only evidence made by a run does.
    """

    verified: bool
    max_abs_diff: float | None = None
    baseline: str = ""


@dataclass(frozen=True, slots=True)
class Dim:
    """A condition on one named dimension: inclusive bounds, divisibility, or a set of values."""

    name: str
    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    one_of: tuple[int, ...] = ()

    def holds(self, value: int) -> bool:
        return not (
            (self.min is not None and value < self.min)
            or (self.max is not None and value > self.max)
            or (self.multiple_of is not None and value % self.multiple_of != 0)
            or (bool(self.one_of) and value not in self.one_of)
        )

    def __str__(self) -> str:
        parts = []
        if self.min is not None:
            parts.append(f">= {self.min}")
        if self.max is not None:
            parts.append(f"<= {self.max}")
        if self.multiple_of is not None:
            parts.append(f"a multiple of {self.multiple_of}")
        if self.one_of:
            parts.append(f"one of {', '.join(map(str, self.one_of))}")
        return f"{self.name} {' and '.join(parts) or 'any'}"


@dataclass(frozen=True, slots=True)
class Shape:
    """`require`: the row is wrong or unable outside; `prefer`: it is merely slower outside."""

    require: tuple[Dim, ...] = ()
    prefer: tuple[Dim, ...] = ()


@dataclass(frozen=True, slots=True)
class Numerics:
    """What an op promises about rounding, for the derived error bound and for admission of rows.

    accumulate: dtype of sums. roundings: intermediate roundings that a row may declare, as `argument:dtype`
    (`weight:bf16`: the weight is rounded to bf16 before use; `input:int16`: every 32 values along the last dimension
    become integers times the largest magnitude / 32767), or `subnormal:zero` (fp32 numbers below 2**-126 may become 0
    as under nvcc's -use_fast_math). An op may name intermediates as it names arguments: `probs`, `partials`.
    TF32 is never allowed for fp32.
    """

    accumulate: str = "fp32"
    roundings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Out:
    """How the result is allocated, as expressions over the arguments: `shape` gives a tuple, `dtype` a torch dtype."""

    shape: str
    dtype: str


TAKEN: Final = frozenset(
    (
        *("aot", "backend", "build", "cpp", "csrc", "jit", "nvrtc", "ops", "preparation", "records", "registry"),
        *("torch_ops", "dispatch", "explain", "profiler_ranges", "register", "use_backend"),
        *("compiles", "freeze", "frozen", "prepare", "thaw", "importlib", "sys", "annotations"),
    )
)
"""What `rapid_llm.kernels` has under names that an op's function could have: its interface and its modules."""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One operator, declared once; dispatch, the public function, the torch op and the conformance suite derive from
    it.

    id: `rmsnorm`, `attention.prefill`. schema: torch schema string without name. group: folder under `kernels/ops`.
    dims: named dimensions -> expression over the arguments (`input.shape[-1]`). usual: for dimensions that stand for a
    feature few calls ask for, the values that calls without it have; the first is taken where a caller who has no
    tensors does not give it, and times are kept of calls that have them all. out: result allocation, None for in-place
    ops and for ops of several results, which have an allocation for each in `outs` and take no `out`. dtype_of: the
    argument whose dtype is the op's dtype. dtypes: labels the op is defined for. schemes: values of the `scheme`
    argument. facts: layout facts that hold for every call (`kv:paged`). oracle, cases, bound, work: `"module:attr"`
    strings into `rapid_llm.verify`. doc: the public function's docstring.
    """

    id: str
    schema: str
    group: str
    dims: Mapping[str, str]
    out: Out | None
    dtypes: tuple[str, ...]
    oracle: str
    cases: str
    bound: str
    work: str
    doc: str
    dtype_of: str = "input"
    schemes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    numerics: Numerics = Numerics()
    usual: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    outs: tuple[Out, ...] = ()
    parsed: Schema = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _OP.match(self.id):
            raise RegistrationError(self.id or "<op>", "id", f"{self.id!r} is not of the form 'name' or 'family.name'")
        if keyword.iskeyword(self.function) or self.function in TAKEN:
            text = f"its function cannot be called {self.function!r}, which is a word of Python or of rapid_llm.kernels"
            raise RegistrationError(self.id, "id", text)
        try:
            parsed = _schema.parse(self.schema)
        except ValueError as error:
            raise RegistrationError(self.id, "schema", str(error)) from None
        object.__setattr__(self, "parsed", parsed)
        object.__setattr__(self, "dims", MappingProxyType(dict(self.dims)))
        object.__setattr__(self, "usual", MappingProxyType(dict(self.usual)))
        names = {a.name for a in parsed.args}
        if self.dtype_of not in names:
            raise RegistrationError(self.id, "dtype_of", f"{self.dtype_of!r} is not an argument of {self.schema}")
        if (self.out is None) == parsed.takes_out:
            raise RegistrationError(self.id, "out", "an op that returns one tensor declares Out(...), no other op does")
        if len(self.outs) != (parsed.returns if parsed.returns > 1 else 0):
            raise RegistrationError(self.id, "outs", f"one Out for each of several results, got {len(self.outs)}")
        if self.schemes and "scheme" not in names:
            raise RegistrationError(self.id, "schemes", "the schema has no 'scheme' argument")
        _check_dtypes(self.id, self.dtypes)
        for name in ("oracle", "cases", "bound", "work"):
            _check_target(self.id, name, getattr(self, name))
        reserved = [d for d in self.dims if d in AUTO_DIMS]
        if reserved:
            raise RegistrationError(self.id, "dims", f"{reserved[0]!r} is provided for every op")
        for name, values in self.usual.items():
            if name not in self.dims or not values:
                raise RegistrationError(self.id, "usual", f"{name!r} is no dimension, or has no values: {values!r}")

    @property
    def function(self) -> str:
        """The public function's name: dots become underscores."""
        return self.id.replace(".", "_")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One implementation of an op: what it is called, where its code is, and when it may run.

    name: `<backend>/<op>[.<variant>]`. target, available: `"module.path:attr"`, imported lazily; every row but `native`
    names an `available` probe (a callable returning bool). devices: `cpu`, `cuda`; empty means any. dtypes: labels of
    the op's dtype argument; empty means all of the op's. capability: SM windows as (lowest, highest or None), any of
    them. shape: conditions on named dimensions. layout: required tags. schemes: quantisation schemes it computes.
    roundings: the intermediate roundings it makes beyond the op's own dtype, each of which the caller must allow.
    prepack: `"module:attr"` of a function that turns the raw weight into this row's own form; such a row runs only
    from a handle bound with `prepack=True`. prepare: `"module:attr"` of a function of a call's `Facts` that builds
    and loads the row's code for their device; dispatch calls it before it settles on the row, so no call ever
    compiles. golden: a claim. priority: rank from a benchmark, or `UNMEASURED`. graph_safe: no host work per call,
    so a CUDA graph may capture it. batch_invariant: the bits of a token's or sequence's result depend neither on what
    else is in the batch nor on how much that is, on any device that the row runs on; the verifier refuses a row that
    says so and differs.
    """

    name: str
    op: str
    backend: str
    target: str
    available: str | None = None
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    capability: tuple[tuple[int, int | None], ...] = ()
    shape: Shape = Shape()
    layout: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    roundings: tuple[str, ...] = ()
    prepack: str | None = None
    prepare: str | None = None
    golden: GoldenRecord | None = None
    priority: int = UNMEASURED
    graph_safe: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _ROW.match(self.name):
            raise RegistrationError(str(self.name) or "<row>", "name", "must be '<backend>/<op>[.<variant>]'")
        backend, rest = self.name.split("/", 1)
        if self.backend != backend:
            raise RegistrationError(self.name, "backend", f"{self.backend!r} differs from the name's {backend!r}")
        if not isinstance(self.op, str) or (rest != self.op and not rest.startswith(self.op + ".")):
            raise RegistrationError(self.name, "op", f"{self.op!r} differs from the name's {rest!r}")
        _check_target(self.name, "target", self.target)
        if self.available is not None:
            _check_target(self.name, "available", self.available)
        if self.prepack is not None:
            _check_target(self.name, "prepack", self.prepack)
        if self.prepare is not None:
            _check_target(self.name, "prepare", self.prepare)
        self._check_floor()
        object.__setattr__(self, "dtypes", _check_dtypes(self.name, self.dtypes))
        self._check_values()

    @property
    def is_native(self) -> bool:
        return self.backend == "native"

    def _check_floor(self) -> None:
        if self.is_native:
            if self.available is not None or self.prepack is not None or self.prepare is not None:
                what = "a native row is always there: no probe, no prepack, nothing to prepare"
                raise RegistrationError(self.name, "available", what)
        elif self.available is None:
            raise RegistrationError(self.name, "available", "every row but 'native' names a probe 'module:attr'")

    def _check_values(self) -> None:
        if not isinstance(self.shape, Shape):
            raise RegistrationError(self.name, "shape", f"{self.shape!r} is not a Shape")
        for field_name in ("devices", "dtypes", "capability", "layout", "schemes", "roundings"):
            if not isinstance(getattr(self, field_name), tuple):
                raise RegistrationError(self.name, field_name, f"{getattr(self, field_name)!r} is not a tuple")
        for device in self.devices:
            if device not in ("cpu", "cuda"):
                raise RegistrationError(self.name, "devices", f"unknown device {device!r}; known: cpu, cuda")
        for window in self.capability:
            ok = isinstance(window, tuple) and len(window) == 2 and isinstance(window[0], int)
            if not ok or (window[1] is not None and window[1] < window[0]):
                raise RegistrationError(self.name, "capability", f"{window!r} is not an SM window like (80, None)")
        for tag in self.layout:
            if tag.rsplit(":", 1)[-1] not in LAYOUT_TAGS and ":" not in tag:
                raise RegistrationError(self.name, "layout", f"unknown tag {tag!r}; known: {', '.join(LAYOUT_TAGS)}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or self.priority < UNMEASURED:
            raise RegistrationError(self.name, "priority", f"{self.priority!r}: use a rank >= 0 or UNMEASURED")
        for field_name in ("graph_safe", "batch_invariant"):
            if not isinstance(getattr(self, field_name), bool):
                text = f"{getattr(self, field_name)!r} is neither True nor False"
                raise RegistrationError(self.name, field_name, text)
        if self.golden is not None and not isinstance(self.golden, GoldenRecord):
            raise RegistrationError(self.name, "golden", f"{self.golden!r} is not a GoldenRecord")

    def check_against(self, op: OpSpec) -> None:
        """Raise `RegistrationError` where the row speaks of something that `op` does not have."""
        dims = {*op.dims, *AUTO_DIMS}
        for dim in (*self.shape.require, *self.shape.prefer):
            if dim.name not in dims:
                raise RegistrationError(
                    self.name, "shape", f"unknown dimension {dim.name!r}; {op.id} has {sorted(dims)}"
                )
        tensors = {a.name for a in op.parsed.tensors}
        for tag in self.layout:
            owner, _, bare = tag.rpartition(":")
            if tag not in op.facts and (bare not in LAYOUT_TAGS or (owner and owner not in tensors)):
                raise RegistrationError(self.name, "layout", f"unknown tag {tag!r} for {op.id}")
        for label in self.dtypes:
            if label not in op.dtypes:
                raise RegistrationError(self.name, "dtypes", f"{label!r} is not a dtype of {op.id}: {list(op.dtypes)}")
        if bool(op.schemes) != bool(self.schemes) or set(self.schemes) - set(op.schemes):
            raise RegistrationError(self.name, "schemes", f"{self.schemes!r}; {op.id} has {op.schemes!r}")
        for rounding in self.roundings:
            if rounding not in op.numerics.roundings:
                permitted = list(op.numerics.roundings)
                raise RegistrationError(
                    self.name, "roundings", f"{rounding!r} is not permitted by {op.id}: {permitted}"
                )


def _check_target(name: str, field_name: str, value: object) -> None:
    if not isinstance(value, str) or not _TARGET.match(value):
        raise RegistrationError(name, field_name, f"{value!r} is not of the form 'module.path:attr'")


def _check_dtypes(name: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(dtypes, str):
        raise RegistrationError(name, "dtypes", f"{dtypes!r} is a string; give a tuple of labels")
    try:
        return tuple(dtype_label(d) for d in dtypes)
    except ValueError as error:
        raise RegistrationError(name, "dtypes", str(error)) from None

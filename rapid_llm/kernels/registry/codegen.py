"""The public function of each op, written out as source from its `OpSpec`.

Its fast path is one dictionary look-up under a key that holds only facts that some registered row of the op constrains:
an op whose rows take any shape does not pay for reading shapes, unless measured times rank them by shape. When a row
registers that constrains more, or a device is met that has times, the function's code is replaced in place, so that
`from rapid_llm.kernels import scale` stays valid.

Under `torch.compile` the function is its torch op; eager calls never pass through torch.library.

Ops are for inference. Some rows would record gradients and most would not, so a call of which autograd expects one is
refused before any row is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any, Final

from . import dispatcher as _dispatch
from . import facts as _facts
from . import overrides, plugins, registry, timing_records, trace
from .errors import ArgumentError
from .forking import Lock
from .schema import REQUIRED
from .spec import AUTO_DIMS, OpSpec

_lock: Final = Lock()
_functions: Final[dict[str, FunctionType]] = {}
_caches: Final[dict[str, dict[Any, Callable[..., Any]]]] = {}
_generation: Final = [0]
"""Counts the times that choices were forgotten: one that was made before is not kept after."""
_by_shape: Final[set[str]] = set()
"""Ops that records of times rank by shape, on some device that was met."""

_TAG_CODE: Final = {
    "contiguous": ("{t}.is_contiguous()",),
    "last_dim_contiguous": ("{t}.stride()",),
    "aligned16": ("(type({t}) is not _Fake and {t}.data_ptr() & 15)", "{t}.stride()"),
}
"""What the key holds for a tag. A fake tensor has no address: the type of the first tensor tells it from a real one."""


def public_function(op_id: str) -> FunctionType:
    """The op's public function: one object per op for the life of the process. Needs torch."""
    plugins.scan()  # before the lock: a plugin registers, for which the dispatcher's lock is taken, which may hold us
    with _lock:
        function = _functions.get(op_id)
        if function is None:
            function = _functions[op_id] = _build(registry.get_op(op_id))
        return function


def cache_of(op_id: str) -> dict[Any, Callable[..., Any]]:
    """The public function's own key -> row function table; for benchmarks and tests."""
    return _caches[op_id]


def refresh(touched: set[str] | None) -> None:
    """Empty the caches of the ops given (of all, if None) and bring their code up to the registered rows."""
    with _lock:
        _generation[0] += 1
        known = {op.id for op in registry.ops()}
        for op_id in [o for o in _functions if touched is None or o in touched]:
            if op_id not in known:
                _caches.pop(op_id).clear()
                del _functions[op_id]
                continue
            op = registry.get_op(op_id)
            _functions[op_id].__code__ = _compile(op, _functions[op_id].__globals__).__code__
            _caches[op_id].clear()


def source(op: OpSpec) -> str:
    """The text of the public function."""
    params = op.parsed.parameters()
    names = [name for name, _, _ in params]
    shown, starred = [], False
    for name, kind, default in params:
        if kind == "kw" and not starred:
            shown.append("*")
            starred = True
        shown.append(name if default is REQUIRED else f"{name}={default!r}")
    positional = [name for name, kind, _ in params if kind == "pos"]
    keywords = [f"{name}={name}" for name, kind, _ in params if kind == "kw"]
    call = ", ".join([*positional, *keywords])
    everything = ", ".join(names)
    refusal = [f"        if {_grad_code(op)}:", f"            _refuse_grad({everything})"]
    lines = [f"def {op.function}({', '.join(shown)}):", "    if _is_compiling():", *refusal, *_compiled_branch(op)]
    lines += ["    if _active[0]:", f"        return _slow({everything})"]
    if "out" in names:
        lines += ["    if out is not None:", f"        _check_out({everything})"]
    elif len(op.parsed.tensors) > 1:
        lines += [f"    _check_overlap({everything})"]
    lines += [
        "    try:",
        *refusal,
        f"        row = _cache[{_key(op)}]",
        "    except (KeyError, AttributeError, IndexError):",
        "        row = None  # decided below, outside, so that an error there does not drag this one along",
        "    if row is None:",
        f"        row = _miss({everything})",
        f"    return row({call})",
    ]
    return "\n".join(lines) + "\n"


def _compiled_branch(op: OpSpec) -> list[str]:
    inner = ", ".join(
        [*(a.name for a in op.parsed.positional), *(f"{a.name}={a.name}" for a in op.parsed.keyword_only)]
    )
    if op.parsed.mutated:
        return [f"        return _torch_inplace({inner})"]
    if not op.parsed.takes_out:
        return [f"        return _torch_op({inner})"]
    lines = [f"        if out is None: return _torch_op({inner})"]
    return [*lines, f"        _torch_out({inner}, out=out)", "        return out"]


def _grad_code(op: OpSpec) -> str:
    """Whether autograd expects a gradient of a call: of an argument, or of `out`, which the call would overwrite."""
    maybe = [a.name for a in op.parsed.tensors if a.optional] + (["out"] if op.parsed.takes_out else [])
    sure = [f"{a.name}.requires_grad" for a in op.parsed.tensors if not a.optional]
    return f"_grad() and ({' or '.join([*sure, *(f'({t} is not None and {t}.requires_grad)' for t in maybe)])})"


def _key(op: OpSpec) -> str:
    """The pruned key: type and device of the first tensor, the dtype, and whatever the registered rows constrain."""
    rows = registry.rows(op.id)
    tensors = [a.name for a in op.parsed.tensors if not a.optional]
    first = tensors[0]
    parts = [f"type({first})", f"{op.dtype_of}.dtype", f"{first}.device"]
    if op.schemes:
        parts.append("scheme")
    ranked = (*timing_records.dims_of(op), *op.usual) if op.id in _by_shape else ()
    for name in sorted({*ranked, *(d.name for r in rows for d in (*r.shape.require, *r.shape.prefer))}):
        parts += _dim_code(op, name)
    # A tag about every tensor also speaks of `out` and of the optional ones.
    takes_out = ["out"] if op.parsed.takes_out else []
    optional = [a.name for a in op.parsed.tensors if a.optional]
    for tag in sorted({t for r in rows for t in r.layout if t not in op.facts}):
        owner, _, bare = tag.rpartition(":")
        for t in [owner] if owner else [*tensors, *optional, *takes_out]:
            codes = [code.format(t=t) for code in _TAG_CODE[bare]]
            parts += [f"({t} is None or {code})" for code in codes] if t in (*optional, *takes_out) else codes
    return ", ".join(dict.fromkeys(parts)) + ","


def _key_names() -> dict[str, Any]:
    """What the code of a key refers to."""
    from torch._subclasses.fake_tensor import FakeTensor

    return {**_facts.expression_names(), "_Fake": FakeTensor}


def _dim_code(op: OpSpec, name: str) -> list[str]:
    tensors = [a.name for a in op.parsed.tensors if not a.optional]
    if name not in AUTO_DIMS:
        return [f"({op.dims[name]})"]
    strides = [f"{t}.stride()" for t in tensors] if name == "extent" else []
    return [f"{t}.shape" for t in tensors] + strides


def _compile(op: OpSpec, scope: dict[str, Any]) -> FunctionType:
    text = source(op)
    exec(compile(text, f"<rapid_llm.kernels.{op.function}>", "exec"), scope)
    function = scope[op.function]
    if not isinstance(function, FunctionType):
        raise TypeError(f"{op.id}: {op.function} is not a function")
    return function


def _build(op: OpSpec) -> FunctionType:
    import torch

    from rapid_llm.kernels import torch_ops  # registers every op with torch.library

    cache = _caches[op.id] = {}
    # A module of its own: torch.compile looks a function's globals up under their `__name__`.
    module = ModuleType(f"rapid_llm.kernels.generated.{op.function}", f"The generated public function of {op.id}.")
    sys.modules[module.__name__] = module
    scope = module.__dict__
    scope |= {
        **_key_names(),
        "_active": overrides.active,
        "_cache": cache,
        "_grad": torch.is_grad_enabled,
        "_is_compiling": torch.compiler.is_compiling,
        "_miss": _packed(op, lambda values, out: _miss(op, cache, values, out)),
        "_refuse_grad": _packed(op, lambda values, out: _facts.refuse_grad(op, {**values, "out": out})),
        "_slow": _packed(op, lambda values, out: _slow(op, values, out)),
        "_check_out": _packed(op, lambda values, out: _check_out(op, values, out)),
        "_check_overlap": _packed(op, lambda values, out: check_overlap(op, values)),
        **torch_ops.overloads(op),
    }
    function = _compile(op, scope)
    function.__doc__ = op.doc
    function.__module__ = "rapid_llm.kernels"
    function.__qualname__ = op.function
    return function


def _packed(op: OpSpec, inner: Callable[[dict[str, Any], Any], Any]) -> Callable[..., Any]:
    """Adapt `inner(values, out)` to the generated calls, which pass every parameter by position."""
    names = [name for name, _, _ in op.parsed.parameters()]

    def call(*everything: Any) -> Any:
        values = dict(zip(names, everything, strict=True))
        out = values.pop("out", None)
        return inner(values, out)

    return call


def _miss(op: OpSpec, cache: dict[Any, Callable[..., Any]], values: dict[str, Any], out: Any) -> Callable[..., Any]:
    """Decide for these arguments and remember the row under the function's own key."""
    if _dispatch.environment_unseen():
        _dispatch.notice_environment()
        if overrides.active[0]:  # the trace was just switched on: this call is to be counted too
            return _call_slow(op)
    if _is_fake(values[op.parsed.tensors[0].name]):
        return _through_torch(op)
    generation = _generation[0]
    decision = _decision(op, values, out)
    if op.id not in _by_shape and timing_records.has(op.id, decision.facts):
        _by_shape.add(op.id)
        refresh({op.id})
    function = _dispatch.guarded(decision)
    if not decision.lasting:
        return function
    key = _key_of(op)(**values, **({"out": out} if op.parsed.takes_out else {}))
    with _lock:
        if generation == _generation[0]:
            if len(cache) >= _dispatch.MAX_CACHED:
                cache.clear()
            cache[key] = function
    return function


def _is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and a device but no memory: such a call goes to the torch op's fake kernel."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def _through_torch(op: OpSpec) -> Callable[..., Any]:
    """The op as its torch op, with the signature of a row."""
    from rapid_llm.kernels import torch_ops

    found = torch_ops.overloads(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        if op.parsed.mutated:
            return found["_torch_inplace"](*args, **kwargs)
        names = [name for name, kind, _ in op.parsed.parameters() if kind == "pos"]
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        out = values.pop("out", None)
        if out is None:
            return found["_torch_op"](**values)
        found["_torch_out"](**values, out=out)
        return out

    return call


def _decision(op: OpSpec, values: dict[str, Any], out: Any) -> _dispatch.Decision:
    _facts.bind(op, (), {**values, **({} if out is None else {"out": out})})
    found = _dispatch.with_sm(_facts.read(op, _dispatch.dims_reader(op), values, out))
    return _dispatch.settle(found, overrides.current(op.id))


def _call_slow(op: OpSpec) -> Callable[..., Any]:
    names = [name for name, kind, _ in op.parsed.parameters() if kind == "pos"]

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        return _slow(op, values, values.pop("out", None))

    return call


def _slow(op: OpSpec, values: dict[str, Any], out: Any) -> Any:
    """The path while a context forces a backend, the trace counts, or profiler ranges are on."""
    _dispatch.notice_environment()
    _facts.refuse_grad(op, {**values, "out": out})
    if out is not None:
        _check_out(op, values, out)
    elif op.parsed.mutated:
        check_overlap(op, values)
    decision = _decision(op, values, out)
    if trace.enabled():
        trace.count(decision)
    function = _dispatch.guarded(decision)
    positional = [values[name] if name != "out" else out for name, kind, _ in op.parsed.parameters() if kind == "pos"]
    keywords = {a.name: values[a.name] for a in op.parsed.keyword_only}
    with trace.span(op.id, decision.row.name):
        return function(*positional, **keywords)


def _key_of(op: OpSpec) -> Callable[..., Any]:
    """The key expression as a function, compiled again whenever the op's rows change."""
    code = _key(op)
    names = ", ".join(name for name, _, _ in op.parsed.parameters())
    scope = _key_names()
    exec(compile(f"def key({names}): return ({code})", f"<key of {op.id}>", "exec"), scope)
    key: Callable[..., Any] = scope["key"]
    return key


def _check_out(op: OpSpec, values: dict[str, Any], out: Any) -> None:
    """Raise `ArgumentError` unless `out` has the result's shape, dtype and device, and overlaps no input in part."""
    if op.out is None:
        raise ArgumentError(f"{op.id}: takes no out")
    if not hasattr(out, "data_ptr"):
        raise ArgumentError(f"{op.id}: out must be a Tensor, got {type(out).__name__}")
    _facts.bind(op, (), values)
    shape, dtype = result(op)(**values)
    first = values[op.parsed.tensors[0].name]
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(
            f"{op.id}: out must have the same shape as the result, {tuple(shape)}, got {tuple(out.shape)}"
        )
    if out.dtype != dtype or out.device != first.device:
        raise ArgumentError(
            f"{op.id}: out must be {dtype} on {first.device} like the result, got {out.dtype} on {out.device}"
        )
    for arg in op.parsed.tensors:
        value = values[arg.name]
        if value is not None and _overlap(out, value) and not _same(out, value):
            raise ArgumentError(f"{op.id}: out overlaps {arg.name} in part; pass {arg.name} itself or separate memory")


def check_overlap(op: OpSpec, values: dict[str, Any]) -> None:
    """Raise `ArgumentError` if a tensor that the op writes shares memory with another argument."""
    tensors = [(a.name, a.mutated, values[a.name]) for a in op.parsed.tensors if values[a.name] is not None]
    for i, (name, mutated, one) in enumerate(tensors):
        for other, other_mutated, two in tensors[i + 1 :]:
            if (mutated or other_mutated) and _overlap(one, two):
                raise ArgumentError(f"{op.id}: {name} and {other} overlap in memory, and the op writes one of them")


def result(op: OpSpec) -> Callable[..., tuple[tuple[int, ...], Any]]:
    """A function of the op's arguments that returns its result's (shape, dtype)."""
    import torch

    if op.out is None:
        raise ArgumentError(f"{op.id}: has no result")
    names = ", ".join(a.name for a in op.parsed.args)
    scope = {**_facts.expression_names(), "torch": torch}
    exec(
        compile(f"def result({names}): return ({op.out.shape}), ({op.out.dtype})", f"<result of {op.id}>", "exec"),
        scope,
    )
    reader: Callable[..., tuple[tuple[int, ...], Any]] = scope["result"]
    return reader


def results(op: OpSpec) -> Callable[..., tuple[tuple[tuple[int, ...], Any], ...]]:
    """As `result`, for an op that returns several tensors: (shape, dtype) of each."""
    schema = f"{op.schema.rpartition('->')[0]}-> Tensor"
    each = [result(replace(op, schema=schema, out=out, outs=())) for out in op.outs]
    return lambda **values: tuple(read(**values) for read in each)


def _same(one: Any, two: Any) -> bool:
    same = one.data_ptr() == two.data_ptr() and one.stride() == two.stride()
    return bool(same and one.shape == two.shape and one.dtype == two.dtype)


def _overlap(one: Any, two: Any) -> bool:
    """Whether two tensors may share memory; those without any share none."""
    from rapid_llm.kernels.ops.arguments import overlaps  # imports torch, as nothing above may

    if one.device.type == "meta" or _is_fake(one) or _is_fake(two):
        return False
    return overlaps(one, two)

"""Copies of arguments by storage: views of one storage stay views of one storage, with their strides and offsets.

A `clone()` of a sliced view is packed, and a kernel that has the strides at heart then reads other memory than the one
that is measured.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final

Arguments = dict[int | str, Any]
"""Arguments of a call: positional ones under 0, 1, ..., keywords under their names."""


BLOCK_ROWS: Final = 128


def bind(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Arguments:
    bound: Arguments = dict(enumerate(args))
    bound.update(kwargs or {})
    return bound


def call(fn: Callable[..., Any], arguments: Arguments) -> Callable[[], Any]:
    """`fn` with its arguments bound."""
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return functools.partial(fn, *positional, **{k: v for k, v in arguments.items() if isinstance(k, str)})


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor in `value`, within tuples, lists, dicts and dataclasses too, with a name for messages."""
    if is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(
                item, f"{name}.{key}" if name else f"argument {key}" if isinstance(key, int) else str(key)
            )
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from tensors(getattr(value, part.name), f"{name}.{part.name}")


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def storage_key(tensor: Any) -> int:
    """Equal for views of one storage, also for one without memory."""
    return int(tensor.untyped_storage()._cdata)


def storages_of(arguments: Arguments, keys: Iterable[int | str]) -> frozenset[int]:
    """Keys of the storages behind the arguments called `keys`."""
    return frozenset(storage_key(t) for key in keys for _, t in tensors(arguments[key]))


def unique_bytes(values: Any) -> int:
    """Bytes of the distinct storages behind `values`: an expanded tensor counts what it holds."""
    found = {storage_key(t): t.untyped_storage().nbytes() for _, t in tensors(values)}
    return sum(found.values())


def copy_arguments(arguments: Arguments) -> Arguments:
    """The same call on fresh memory: every storage copied once, every tensor a view of its copy."""
    made: dict[int, Any] = {}

    def fresh_view(tensor: Any) -> Any:
        import torch

        key = storage_key(tensor)
        if key not in made:
            made[key] = tensor.untyped_storage().clone()
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(made[key], tensor.storage_offset(), tensor.size(), tensor.stride())

    return {key: rebuild(value, fresh_view) for key, value in arguments.items()}


def rebuild(value: Any, each: Callable[[Any], Any]) -> Any:
    """`value` with every tensor replaced by `each(tensor)`."""
    if is_tensor(value):
        return each(value)
    if isinstance(value, Mapping):
        return {key: rebuild(item, each) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(item, each) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(rebuild(item, each) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for part in fields(value):
            object.__setattr__(made, part.name, rebuild(getattr(value, part.name), each))
        return made
    return value


def opaque(value: Any) -> str:
    """The type of anything in `value` that may hold memory which cannot be copied; empty if there is none."""
    if value is None or is_tensor(value) or isinstance(value, (bool, int, float, complex, str, bytes)):
        return ""
    if isinstance(value, Mapping):
        return next((found for item in value.values() if (found := opaque(item))), "")
    if isinstance(value, (tuple, list)):
        return next((found for item in value if (found := opaque(item))), "")
    if is_dataclass(value) and not isinstance(value, type):
        return next((found for part in fields(value) if (found := opaque(getattr(value, part.name)))), "")
    name = type(value).__name__
    return "" if name in ("dtype", "device", "layout", "memory_format") else name


def storage_pairs(target: Any, source: Any, skip: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any, Any]]:
    """(name, bytes of target, bytes of source) of each distinct storage, as flat uint8 tensors; `skip`: storages of
    `target` to leave out."""
    seen: set[int] = set(skip)
    for (name, mine), (_, theirs) in zip(tensors(target), tensors(source), strict=True):
        if storage_key(mine) not in seen:
            seen.add(storage_key(mine))
            yield name, as_bytes(mine), as_bytes(theirs)


def as_bytes(tensor: Any) -> Any:
    """The whole storage behind `tensor` as a flat uint8 tensor."""
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def vary(arguments: Arguments, step: int) -> bool:
    """Roll the rows of every tensor of numbers by `step`, in place; whether anything changed.

    Indices (int32, int64, bool) stay: they must fit each other. Rows of bytes are moved whole, for they may be blocks
    of a quantised format, and by `BLOCK_ROWS` where that goes, for such formats may share a scale among them. What
    overlaps itself (stride 0) stays too.
    """
    import torch

    changed = False
    for _, tensor in tensors(arguments):
        whole = tensor.dtype in (torch.int8, torch.uint8)
        if not (whole or tensor.dtype.is_floating_point) or not tensor.numel():
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            continue
        dims = range(1 if whole and tensor.dim() > 1 else 0 if whole else tensor.dim())
        dim = next((d for d in dims if tensor.shape[d] > 1), None)
        if dim is None:
            continue
        bits = _as_integers(tensor)
        block = BLOCK_ROWS if whole and tensor.shape[dim] % BLOCK_ROWS == 0 and tensor.shape[dim] > BLOCK_ROWS else 1
        rolled = bits.roll(step * block % tensor.shape[dim], dim)
        changed = changed or not torch.equal(rolled, bits)
        bits.copy_(rolled)
    return changed


_POISON: Final = {
    "float64": 0x7FF8_BEEF_0000_5A5A,
    "float32": 0x7FC0_BEEF,
    "float16": 0x7E5A,
    "bfloat16": 0x7FDA,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7D,
    "int64": 0x7FFF_BEEF_0000_5A5A,
    "int32": 0x7FFF_BEEF,
    "int16": 0x7E5A,
    "int8": 0x5A,
    "uint8": 0x5A,
}
"""Bits that no result has: a NaN of one payload, or an unlikely integer."""


def poison(tensor: Any) -> None:
    """Fill with poison; `bool`, which has none, stays as it is."""
    bits = _POISON.get(str(tensor.dtype).removeprefix("torch."))
    if bits is not None:
        _as_integers(tensor).fill_(bits)


def poisoned(tensor: Any) -> int:
    """How many elements still hold the poison."""
    bits = _POISON.get(str(tensor.dtype).removeprefix("torch."))
    return 0 if bits is None else int((_as_integers(tensor) == bits).sum())


def _as_integers(tensor: Any) -> Any:
    """The same elements as integers of their size."""
    import torch

    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])

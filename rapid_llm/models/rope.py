"""Rotary positions: from what a checkpoint states to frequencies in float64.

A way of scaling is a row of `SCALINGS`, and the fields of its class are the keys that it reads: a key that no field
takes, like a type that no row describes, is an error. A model with another rotary base still writes fluent text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from .errors import MetadataError, UnsupportedArchitectureError

TAU: Final = 2 * math.pi


def unscaled(theta: float, dim: int) -> list[float]:
    """theta ** (-2i / dim) for i < dim / 2, in radians a token (RoFormer, Su et al. 2021)."""
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


class Scaling(Protocol):
    """How the frequencies of a longer context follow from those of the first training."""

    @property
    def magnitude(self) -> float:
        """Multiplies cosines and sines, so scores by its square."""
        ...

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        """dim / 2 angles a token, for sequences of at most `length` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Default:
    """No scaling."""

    magnitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        return unscaled(theta, dim)


UNSCALED: Final = Default()


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions divided by factor (position interpolation, Chen et al. 2023)."""

    factor: float
    magnitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        return [f / self.factor for f in unscaled(theta, dim)]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A base that grows with the sequence beyond max_position_embeddings ("dynamic NTK").

    The definition rotates by the length that a sequence has now, cached keys included, which no cache can follow: here
    the base is that of the longest sequence to be served, so nothing changes up to max_position_embeddings.
    """

    factor: float
    max_position_embeddings: int
    magnitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        over = max(length / self.max_position_embeddings, 1.0)
        growth = self.factor * over - (self.factor - 1)
        return unscaled(float(theta * growth ** (dim / (dim - 2))) if dim > 2 else theta, dim)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's rule: waves longer than original / low_freq_factor tokens are stretched by factor, those shorter than
    original / high_freq_factor are left, and in between the two are blended linearly in the number of turns."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    magnitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(f"high_freq_factor {self.high_freq_factor} is not above {self.low_freq_factor}, the low")

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        out = []
        for frequency in unscaled(theta, dim):
            turns = self.original_max_position_embeddings * frequency / TAU
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = min(max(keep, 0.0), 1.0)
            out.append(frequency * (keep + (1 - keep) / self.factor))
        return out


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): pairs that turn more than beta_fast times in the original context are left, those that
    turn less than beta_slow times are stretched by factor, with a ramp over the pairs between.

    truncate: the ramp's ends are rounded outwards to whole pairs. magnitude: attention_factor where that is stated;
    else 0.1 ln(factor) + 1, or, where both are stated, the quotient of that with the logarithm weighted by mscale
    and by mscale_all_dim (DeepSeek).
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._size(self.mscale) / self._size(self.mscale_all_dim)
        return self._size(1.0)

    def _size(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        low, high = self._pair(self.beta_fast, theta, dim), self._pair(self.beta_slow, theta, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        out = []
        for i, frequency in enumerate(unscaled(theta, dim)):
            stretched = min(max((i - low) / width, 0.0), 1.0)
            out.append(frequency * (1 - stretched) + frequency / self.factor * stretched)
        return out

    def _pair(self, turns: float, theta: float, dim: int) -> float:
        """Where among the pairs the one lies that turns so often in the original context."""
        return dim * math.log(self.original_max_position_embeddings / (turns * TAU)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each frequency has a divisor of its own, from one list for sequences within
    `original` tokens and from another for longer ones. The list is chosen once, by the longest sequence to be served:
    keys in a cache keep the rotation that they were written with."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def frequencies(self, theta: float, dim: int, length: int) -> list[float]:
        divisors = self.long_factor if length > self.original_max_position_embeddings else self.short_factor
        return [f / d for f, d in zip(unscaled(theta, dim), divisors, strict=True)]


@dataclass(frozen=True, slots=True)
class Rope:
    """A base, in powers of which the frequencies fall, and how they are scaled."""

    theta: float
    scaling: Scaling = UNSCALED

    def frequencies(self, dim: int, length: int) -> list[float]:
        """`Scaling.frequencies` of this base."""
        return self.scaling.frequencies(self.theta, dim, length)


SCALINGS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        "default": Default,
        "linear": Linear,
        "dynamic": Dynamic,
        "llama3": Llama3,
        "yarn": Yarn,
        "longrope": LongRope,
        "su": LongRope,
    }
)
"""`rope_type` -> its class; 'su' is what Phi-3 called longrope first."""

_OTHERWISE: Final = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor"})
"""Keys of the same dictionary that are not about scaling."""


def scaling(stated: Mapping[str, Any], *, max_positions: int, where: str) -> Scaling:
    """The `Scaling` that a checkpoint's rotary dictionary states.

    max_positions: the model's context, which stands for an original context or a factor that is not stated. where: what
    to name in errors. Raises `UnsupportedArchitectureError` for an unknown type or key,
    `MetadataError` for a missing or impossible value.
    """
    kind = rope_type(stated, where)
    if kind not in SCALINGS:
        raise UnsupportedArchitectureError(
            f"{where}: rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    values = {k: v for k, v in stated.items() if k not in _OTHERWISE and v is not None}
    if SCALINGS[kind] is LongRope:
        values = _longrope(values, max_positions, where)
    elif SCALINGS[kind] is Yarn and "factor" not in values:
        original: Any = values.get("original_max_position_embeddings")
        values |= {"factor": max_positions / original} if _is_positive(original) else {}
    return _build(SCALINGS[kind], values, max_positions, f"{where}: rope_type {kind!r}")


def rope_type(stated: Mapping[str, Any], where: str) -> str:
    """The type under either of its spellings; raises `MetadataError` where the two differ."""
    new, old = stated.get("rope_type"), stated.get("type")
    if new is not None and old is not None and new != old:
        raise MetadataError(f"{where}: rope_type is {new!r} and type is {old!r}; state one")
    found = new if new is not None else old
    return "default" if found is None else str(found)


def _build(kind: type[Any], values: Mapping[str, Any], max_positions: int, where: str) -> Scaling:
    known = {f.name: f for f in fields(kind)}
    unread = sorted(set(values) - set(known))
    if unread:
        raise UnsupportedArchitectureError(f"{where} with {unread[0]} = {values[unread[0]]!r} is not understood")
    given = dict(values)
    for name in {"original_max_position_embeddings", "max_position_embeddings"} & set(known):
        given.setdefault(name, max_positions)
    missing = [n for n, f in known.items() if n not in given and f.default is MISSING]
    if missing:
        raise MetadataError(f"{where} needs {', '.join(missing)}")
    made = {name: _value(name, str(known[name].type), value, where) for name, value in given.items()}
    try:
        found: Scaling = kind(**made)
    except ValueError as error:
        raise MetadataError(f"{where}: {error}") from None
    return found


def _value(name: str, kind: str, value: Any, where: str) -> Any:
    """`value` as the field's annotation says; numbers are finite and above zero."""
    if kind == "bool":
        if isinstance(value, bool):
            return value
    elif kind.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(map(_is_positive, value)):
            return tuple(float(v) for v in value)
    elif kind == "int":
        if _is_positive(value) and int(value) == value:
            return int(value)
    elif _is_positive(value) or (value == 0 and name.startswith("mscale")):
        return float(value)
    raise MetadataError(f"{where} with {name} = {value!r}: not {'a' if kind == 'bool' else 'a positive'} {kind}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _longrope(values: Mapping[str, Any], max_positions: int, where: str) -> dict[str, Any]:
    """Both lists, and the factor on cosines and sines: stated, or sqrt(1 + ln s / ln original) with s the factor by
    which the context grew."""
    out = dict(values)
    original = out.setdefault("original_max_position_embeddings", max_positions)
    growth = out.pop("factor", None)
    if not _is_positive(original) or not (growth is None or _is_positive(growth)):
        raise MetadataError(f"{where}: longrope with original context {original!r} and factor {growth!r}: not positive")
    growth = max_positions / original if growth is None else growth
    stretched = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    out.setdefault("attention_factor", stretched)
    return out

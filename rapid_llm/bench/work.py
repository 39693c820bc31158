"""What one call has to move and to compute: declared, never guessed from tensors. 1 GB is 10^9 bytes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .errors import NoWorkError

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Work:
    """bytes: the least traffic of one call. flops: its arithmetic, a multiplication and an addition being two.
    read_bytes: the part that is read, by default all of it. dtype: the label whose FLOP peak applies, by default that
    of the first floating-point argument."""

    bytes: int
    flops: int = 0
    read_bytes: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("bytes", self.bytes), ("flops", self.flops), ("read_bytes", self.read_bytes or 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"work: {name}={value!r} must be a whole number from 0 up")
        if self.read_bytes is not None and self.read_bytes > self.bytes:
            raise ValueError(f"work: read_bytes={self.read_bytes} is more than bytes={self.bytes}")
        if self.bytes == 0 and self.flops == 0:
            raise NoWorkError("work: 0 bytes and 0 FLOPs are no work; declare what one call moves and computes")

    @property
    def reads(self) -> int:
        return self.bytes if self.read_bytes is None else self.read_bytes

    def json(self) -> dict[str, Any]:
        return asdict(self)


def work_of(given: Any) -> Work:
    """`given` itself, or a Work of any object with read_bytes, write_bytes and flops; raises `NoWorkError` on None."""
    if given is None:
        raise NoWorkError("no work is declared: pass work=Work(bytes=..., flops=...), what one call moves and computes")
    if isinstance(given, Work):
        return given
    read, write = int(given.read_bytes), int(given.write_bytes)
    return Work(read + write, int(given.flops), read)


def rate(amount: float, seconds: float) -> float:
    """Amount a second; raises `ValueError` where no time passed."""
    if not seconds > 0 or not math.isfinite(seconds):
        raise ValueError(f"{amount:g} in {seconds} s is no rate")
    return amount / seconds


def amount_text(value: float, unit: str, places: int = 3) -> str:
    """`1e9, "B/s"` is `1.000 GB/s`."""
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:.{places}f} {prefix}{unit}"
    return f"{value:.{places}f} {unit}"


def seconds_text(seconds: float) -> str:
    """In s, ms, us or ns, four significant digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"

"""Checks of a request's values. Each returns the value in the one form it is held in, or raises `ParameterError`.

An error names the field, the value and what is accepted, so that a server can hand it on as it is. Nothing here knows
which fields there are; `params` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Final

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1


class ParameterError(ValueError):
    """A sampling parameter that is not accepted. `field` is its name; the text holds the value and what is accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field}={shown} is not accepted; use {accepted}")
        self.field = field


def integer(field: str, value: Any, low: int, high: int, note: str = "") -> int:
    # bool is an int to Python: True as a count is a mistake of the caller's, not a 1
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        raise ParameterError(field, value, _range("an integer", low, high, note))
    return int(value)


def number(field: str, value: Any, low: float, high: float, note: str = "") -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # written so that NaN, which fails every comparison, is refused
    if not is_number or not low <= value <= high:
        raise ParameterError(field, value, _range("a finite number", low, high, note))
    return float(value)


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(field, value, "True or False")
    return value


def strings(field: str, value: Any, most: int | None = None) -> tuple[str, ...]:
    """One string or several, none of them empty, each once. most: of them, None for any number."""
    accepted = "a non-empty string or a list of them"
    given = (value,) if isinstance(value, str) else _listed(field, value, accepted)
    for string in given:
        if not isinstance(string, str) or not string:
            raise ParameterError(field, value, accepted)
        if not is_text(string):
            raise ParameterError(field, value, "text without lone surrogates, which no model output contains")
    found = tuple(dict.fromkeys(given))
    if most is not None and len(found) > most:
        raise ParameterError(field, value, f"at most {most} strings, not {len(found)}")
    return found


def is_text(string: str) -> bool:
    """Whether UTF-8 can hold it: a lone surrogate is half of a character that a broken JSON escape left behind."""
    return string.isascii() or not any("\ud800" <= c <= "\udfff" for c in string)


def token_ids(field: str, value: Any) -> tuple[int, ...]:
    accepted = f"a list of token ids, integers from 0 to {INT32_MAX}"
    ids = _listed(field, value, accepted)
    if not all(_is_id(token) for token in ids):
        raise ParameterError(field, value, accepted)
    return tuple(dict.fromkeys(int(token) for token in ids))


def biases(field: str, value: Any, most: int, low: float, high: float) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by id; from a mapping, whose keys may be decimal strings as JSON has them."""
    span = f"from {low:g} to {high:g}"
    accepted = f"token ids, integers from 0 to {INT32_MAX}, each with a finite number {span}"
    if isinstance(value, Mapping):
        pairs = list(value.items())
    else:  # the form in which they are held, so that parameters can be made from others
        pairs = list(_listed(field, value, accepted))
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ParameterError(field, value, accepted)
    if len(pairs) > most:
        raise ParameterError(field, value, f"at most {most} token ids, not {len(pairs)}")
    found: dict[int, float] = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10 else key
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not _is_id(token) or not is_number or not low <= bias <= high:
            raise ParameterError(field, {key: bias}, accepted)
        if int(token) in found:
            raise ParameterError(field, {key: bias}, f"token {int(token)} once")
        found[int(token)] = float(bias)
    return tuple(sorted(found.items()))


def _is_id(token: Any) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool) and 0 <= int(token) <= INT32_MAX


def _listed(field: str, value: Any, accepted: str) -> tuple[Any, ...]:
    """`value` as a tuple; a mapping, a number or bytes is not a list, however iterable it may be."""
    if isinstance(value, Mapping | bytes | bytearray | str) or not isinstance(value, Iterable):
        raise ParameterError(field, value, accepted)
    return tuple(value)


def _range(kind: str, low: float, high: float, note: str) -> str:
    shown = [str(int(bound)) if bound == int(bound) else str(bound) for bound in (low, high)]
    return f"{kind} from {shown[0]} to {shown[1]}" + (f" ({note})" if note else "")

"""What an answer must look like: the part of a request that `grammar` turns into masks. Torch-free, needs no library.

Exactly one form is given, and it is held as text, so that a request is hashable and a compiled form can be found again.
Whether the text means something (a regular expression that parses, a schema whose keywords are known) is for the
library to say, before the request runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from .checks import ParameterError, flag, is_text, strings

FIELD: Final = "structured"
MAX_CHARACTERS: Final = 1 << 18
"""Of a schema, a grammar, a regular expression, or all choices together."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """One of:

    json_schema: a JSON schema, as a mapping or as JSON text. Held as JSON text.
    json_object: True for any JSON object.
    regex: a regular expression (the syntax of Rust's regex crate) that the whole text matches.
    choices: texts of which the answer is one. Held as a tuple.
    grammar: a context-free grammar whose first rule is `start` (Lark syntax) or `root` (GBNF, llama.cpp's).

    Raises `ParameterError` naming `structured`.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choices: Iterable[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        flag(f"{FIELD}.json_object", self.json_object)
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ParameterError(FIELD, dict.fromkeys(given, ...), f"exactly one of {', '.join(FORMS)}")
        (form,) = given
        if form == "choices":
            choices = strings(f"{FIELD}.{form}", self.choices)
            if not choices:
                raise ParameterError(f"{FIELD}.{form}", self.choices, "a non-empty string or a list of them")
            self._set(form, choices)
        elif form == "json_schema":
            self._set(form, _schema(self.json_schema))
        elif form != "json_object":
            _require(f"{FIELD}.{form}", getattr(self, form))
        self._check_size()

    @classmethod
    def of(cls, value: Any) -> StructuredOutput:
        """`value` itself, or a mapping of this class's fields, in which None is the same as absent."""
        if isinstance(value, StructuredOutput):
            return value
        accepted = f"a StructuredOutput or a mapping with exactly one of {', '.join(FORMS)}"
        if not isinstance(value, Mapping) or not set(value) <= set(FORMS):
            raise ParameterError(FIELD, value, accepted)
        return cls(**{name: given for name, given in value.items() if given is not None})

    @property
    def form(self) -> str:
        """Which of the fields is given."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def source(self) -> str:
        """The given form as one text."""
        value: Any = getattr(self, self.form)
        if self.form == "choices":
            return json.dumps(value)
        return '{"type": "object"}' if self.form == "json_object" else str(value)

    def _check_size(self) -> None:
        if len(self.source) > MAX_CHARACTERS:
            field = f"{FIELD}.{self.form}"
            raise ParameterError(field, getattr(self, self.form), f"at most {MAX_CHARACTERS} characters")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


FORMS: Final = tuple(f.name for f in fields(StructuredOutput))


def _schema(value: Any) -> str:
    field, accepted = f"{FIELD}.json_schema", "a JSON schema: a mapping, or the text of a JSON object"
    if isinstance(value, str):
        _require(field, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ParameterError(field, value, f"{accepted} ({error})") from error
    if not isinstance(value, Mapping):
        raise ParameterError(field, value, accepted)
    try:  # the order of keys is kept: it is the order in which an object's properties are written
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError(field, value, f"{accepted} ({error})") from error
    _require(field, text)
    return text


def _require(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ParameterError(field, value, "a non-empty string")
    if not is_text(value):
        raise ParameterError(field, value, "text without lone surrogates, which no model output contains")

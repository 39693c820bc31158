"""StructuredOutput: exactly one form, held as text, refused with a name where it cannot be meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rapid_llm.engine.params import ParameterError, StructuredOutput
from rapid_llm.engine.structured import MAX_CHARACTERS

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def test_a_form_is_held_as_text() -> None:
    """Catches a schema whose properties are sorted (their order is that of the answer), and a form that is lost."""
    given = StructuredOutput(json_schema=SCHEMA)
    assert given == StructuredOutput(json_schema=json.dumps(SCHEMA)) == StructuredOutput.of({"json_schema": SCHEMA})
    assert (given.form, list(json.loads(given.source)["properties"])) == ("json_schema", ["b", "a"])
    assert StructuredOutput.of(given) is given
    several = StructuredOutput(choices=iter(["yes", "no", "yes"]))
    assert (several.form, several.choices, json.loads(several.source)) == ("choices", ("yes", "no"), ["yes", "no"])
    assert json.loads(StructuredOutput(json_object=True).source) == {"type": "object"}
    for form in ("regex", "grammar"):
        one = StructuredOutput(**{form: "x"})
        assert (one.form, one.source, hash(one)) == (form, "x", hash(StructuredOutput(**{form: "x"})))


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "structured={} is not accepted; use exactly one of json_schema, json_object, regex, choices, grammar"),
    ({"json_object": False}, "structured={} .* exactly one"),
    ({"regex": "a", "choices": ["b"]}, "structured={'regex': Ellipsis, 'choices': Ellipsis} .* exactly one"),
    ({"regex": ""}, "structured.regex='' .* a non-empty string"),
    ({"regex": 5}, "structured.regex=5 .* a non-empty string"),
    ({"regex": "a\ud83d"}, "structured.regex=.* without lone surrogates"),
    ({"grammar": b"x"}, "structured.grammar=b'x' .* a non-empty string"),
    ({"choices": []}, "structured.choices=.* a non-empty string or a list of them"),
    ({"choices": ["a", ""]}, "structured.choices=.* a non-empty string"),
    ({"choices": {"a": 1}}, "structured.choices=.* a non-empty string"),
    ({"choices": ["\udc00"]}, "structured.choices=.* without lone surrogates"),
    ({"json_object": 1}, "structured.json_object=1 .* True or False"),
    ({"json_schema": "{"}, "structured.json_schema='{' .* a JSON schema"),
    ({"json_schema": "[1]"}, r"structured.json_schema=\[1\] .* a JSON schema"),
    ({"json_schema": ["x"]}, "structured.json_schema=.* a JSON schema"),
    ({"json_schema": {"const": float("nan")}}, "structured.json_schema=.* a JSON schema"),
    ({"json_schema": {"const": {1, 2}}}, "structured.json_schema=.* not JSON serializable"),
    ({"json_schema": {"const": "\ud800"}}, "structured.json_schema=.* without lone surrogates"),
    ({"json_schema": "[" * 100_000}, "structured.json_schema=.* a JSON schema"),
    ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"structured.regex=.* at most {MAX_CHARACTERS} characters"),
]


@pytest.mark.parametrize(("fields", "says"), BAD)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], says: str) -> None:
    """E7. Catches a form that is passed over because another is there, half a character, and a text without end."""
    with pytest.raises(ParameterError, match=f"^{says}") as caught:
        StructuredOutput(**fields)
    assert caught.value.field.startswith("structured")
    assert len(str(caught.value)) < 400


def test_a_mapping_has_known_keys() -> None:
    """Catches a misspelt form that is ignored, and a null that counts as a form."""
    assert StructuredOutput.of({"regex": "a", "choices": None, "json_object": None}).regex == "a"
    for wrong in ("a", 5, {"pattern": "a"}, ["regex"], {1: "a"}):
        with pytest.raises(ParameterError, match="a StructuredOutput or a mapping with exactly one of json_schema"):
            StructuredOutput.of(wrong)

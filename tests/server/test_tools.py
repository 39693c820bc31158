"""Answers taken apart: reasoning, text, calls; whole and in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rapid_llm.server.tools import Reading, Splitter, call_schema, detect, knows_tools

OFFERED = frozenset({"add", "look_up"})
HERMES = Reading(form="hermes", offered=OFFERED)
LLAMA = Reading(form="llama3", offered=OFFERED)
MISTRAL = Reading(form="mistral", offered=OFFERED)
THINKS = Reading(form="hermes", offered=OFFERED, thinks=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool>"}}\n</tool_call>'
ADD = ("add", {"a": 1, "b": "</tool>"})


def split(reading: Reading, pieces: list[str]) -> tuple[str, str, list[Any]]:
    """(reasoning, content, calls)."""
    splitter = Splitter(reading)
    found = [piece for text in pieces for piece in splitter.feed(text)]
    found += splitter.finish()
    texts = {kind: "".join(p.text for p in found if p.kind == kind) for kind in ("reasoning", "content")}
    calls = [(p.call.name, json.loads(p.call.arguments)) for p in found if p.call is not None]
    assert splitter.calls == len(calls)
    assert len({p.call.id for p in found if p.call is not None}) == len(calls)
    return texts["reasoning"], texts["content"], calls


CASES = [
    (HERMES, "plain text, 3 < 4 <tool", ("", "plain text, 3 < 4 <tool", [])),
    (HERMES, " leading and trailing \n", ("", " leading and trailing \n", [])),
    (HERMES, CALL, ("", "", [ADD])),
    (HERMES, f"Let me see.\n{CALL}\n", ("", "Let me see.", [ADD])),
    (HERMES, f"{CALL}\n{CALL}", ("", "", [ADD, ADD])),
    (HERMES, f"{CALL} and then", ("", " and then", [ADD])),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>', ("", "", [("add", {"a": 2})])),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', ("", "", [("add", {})])),
    (HERMES, "x <tool_call>no json</tool_call> y", ("", "x <tool_call>no json</tool_call> y", [])),
    (HERMES, '<tool_call>{"name": "rm"}</tool_call>', ("", '<tool_call>{"name": "rm"}</tool_call>', [])),
    (HERMES, '<tool_call>{"name": ["add"]}</tool_call>', ("", '<tool_call>{"name": ["add"]}</tool_call>', [])),
    (HERMES, "<tool_call>[[[[", ("", "<tool_call>[[[[", [])),
    (HERMES, '<tool_call>{"name": "add", "argu', ("", '<tool_call>{"name": "add", "argu', [])),
    (HERMES, '<tool_call>{"name": "add", "arguments": 5}</tool_call>',
     ("", '<tool_call>{"name": "add", "arguments": 5}</tool_call>', [])),
    (HERMES, "<think>no</think>", ("", "<think>no</think>", [])),
    (THINKS, "<think>\nhm, 1 < 2\n</think>\n\nYes.", ("hm, 1 < 2", "Yes.", [])),
    (THINKS, f"<think>call?</think>{CALL}", ("call?", "", [ADD])),
    (THINKS, "<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
    (THINKS, "\n <think>never ends ", ("never ends", "", [])),
    (THINKS, "<thin ice", ("", "<thin ice", [])),
    (THINKS, "Yes. <think>late</think>", ("", "Yes. <think>late</think>", [])),
    (Reading(thinks=True, thinking=True), "begun\n</think>\nYes.", ("begun", "Yes.", [])),
    (Reading(thinks=True, thinking=True), "begun and cut", ("begun and cut", "", [])),
    (Reading(), f"<think>x</think>{CALL}", ("", f"<think>x</think>{CALL}", [])),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", {"a": 1})])),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ("", "", [("add", {"a": 1})])),
    (LLAMA, '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {}}',
     ("", "", [("add", {}), ("look_up", {})])),
    (LLAMA, '{"an": "object"} that is none', ("", '{"an": "object"} that is none', [])),
    (LLAMA, "Sure: {}", ("", "Sure: {}", [])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": {}}]',
     ("", "", [("add", {"a": 1}), ("look_up", {})])),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]look_up[ARGS]{}',
     ("", "", [("add", {"a": 1}), ("look_up", {})])),
    (MISTRAL, "a list [TOO many]", ("", "a list [TOO many]", [])),
    (MISTRAL, 'so [TOOL_CALLS] [{"name": "add"', ("", 'so [TOOL_CALLS] [{"name": "add"', [])),
    (Reading(form="hermes", offered=OFFERED, forced=True), '{"name": "add", "arguments": {"a": 1}}',
     ("", "", [("add", {"a": 1})])),
    (Reading(form="hermes", offered=OFFERED, forced=True), '{"name": "ad', ("", '{"name": "ad', [])),
]  # fmt: skip


@pytest.mark.parametrize(("reading", "text", "wanted"), CASES)
def test_however_it_is_cut_the_same_comes_out(reading: Reading, text: str, wanted: tuple[str, str, list[Any]]) -> None:
    """Catches: a marker missed where two pieces meet, text that is dropped, doubled or sent as what it is not."""
    assert split(reading, [text]) == wanted
    assert split(reading, list(text)) == wanted
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        assert split(reading, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == wanted


def test_text_without_a_marker_is_not_held_back() -> None:
    """Catches: an answer that comes all at once because tools were offered."""
    splitter = Splitter(HERMES)
    said = [[piece.text for piece in splitter.feed(word)] for word in ("One", " two", " <", " three")]
    assert said == [["One"], [" two"], [], [" < three"]]


def test_calls_for_mistral_have_ids_of_nine_letters() -> None:
    """Catches: ids that Mistral's own template refuses in the next turn."""
    splitter = Splitter(MISTRAL)
    (piece,) = [*splitter.feed('[TOOL_CALLS][{"name": "add"}]'), *splitter.finish()]
    assert piece.call is not None
    assert len(piece.call.id) == 9
    assert piece.call.id.isalnum()


@pytest.mark.parametrize(
    ("template", "form", "knows"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", True),
        ("{{ '[TOOL_CALLS]' }}{%- if tools is defined %}{% endif %}", "mistral", True),
        ("{% if tools is not none %}{{ '<|python_tag|>' }}{% endif %}", "llama3", True),
        ("{{ messages }} use your tools", "hermes", False),
    ],
)
def test_templates_tell_how_calls_are_written(template: str, form: str, knows: bool) -> None:
    """Catches: a family's calls read in another's way, and tools that a template never shows to its model."""
    assert detect(template) == form
    assert knows_tools(template) is knows


def test_the_schema_admits_calls_of_the_functions_and_nothing_else() -> None:
    """Catches: a forced call with a made-up name or argument."""
    pytest.importorskip("llguidance")
    from rapid_llm.engine.grammar import Grammars
    from rapid_llm.engine.structured import StructuredOutput
    from tests.engine.mocks import byte_tokenizer

    number = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"function": {"name": "add", "parameters": number}}, {"function": {"name": "look_up"}}]
    grammars = Grammars(byte_tokenizer())

    def fits(text: str) -> bool:
        constraint = grammars.start(StructuredOutput(json_schema=call_schema(tools, "hermes")))
        for byte in text.encode():
            if byte not in constraint.allowed():
                return False
            constraint.advance(byte)
        return constraint.complete or not constraint.may_go_on()

    assert fits('{"name":"add","arguments":{"a":5}}')
    assert fits('{"name":"look_up","arguments":{"x":[1]}}')
    assert not fits('{"name":"rm","arguments":{}}')
    assert not fits('{"name":"add","arguments":{"b":5}}')
    assert not fits('{"name":"add"}')

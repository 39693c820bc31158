"""/v1/chat/completions: conversations, tools, reasoning, on a model that says what a test has written for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from rapid_llm import LLM, SamplingParams
from tests.engine.mocks import EOS, VOCAB, MockConfig, byte_tokenizer

from .conftest import HeldDecoder
from .live import Live, live, until

PATH = "/v1/chat/completions"

TEMPLATE = (
    "{% if tools %}T{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "look_up", "description": "Finds things.", "strict": True}}


class Script:
    """Says what is written after `SAY:` in the last message, byte by byte; then ends."""

    def __call__(self, history: Sequence[int]) -> np.ndarray:
        said = bytes(token for token in history if token < 256)
        prompt, _, answer = said.rpartition(b"assistant\n")
        wanted = prompt.rpartition(b"SAY:")[2].rstrip(b"\n")
        if not wanted.startswith(b"<think>"):  # then it was the template that wrote it
            answer = answer.removeprefix(b"<think>\n")
        logits = np.full(VOCAB, -8.0, dtype=np.float32)
        logits[wanted[len(answer)] if wanted.startswith(answer) and len(answer) < len(wanted) else EOS] = 8.0
        return logits


def script_llm(template: str) -> LLM:
    decoder = HeldDecoder(Script(), MockConfig(max_model_len=1024))
    return LLM.from_parts(decoder, byte_tokenizer(chat_template=template), threads=1, kv_cache_tokens=8192)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(script_llm(TEMPLATE)) as found:
        yield found
        until(found.idle)


def say(server: Live, text: str, **fields: Any) -> dict[str, Any]:
    """The choice of an answer that is `text`, which the stream must tell in the same way."""
    asked = {"messages": [{"role": "user", "content": f"SAY:{text}"}], "temperature": 0, **fields}
    status, answer = server.post(PATH, asked)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert streamed(server.stream(PATH, asked)) == unnamed(choice)
    return choice


def unnamed(choice: dict[str, Any]) -> dict[str, Any]:
    """What a stream must add up to: no null, no ids, which differ from request to request."""
    message = {k: v for k, v in choice["message"].items() if v is not None}
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", [])]
    return {"content": "", "reasoning_content": "", **message, "finish_reason": choice["finish_reason"]}


def streamed(events: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert found["finish_reason"] is None, "something comes behind the end"
        found["role"] = delta.get("role", found.get("role"))
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            assert call["index"] == len(found["tool_calls"])
            assert call["id"]
            found["tool_calls"].append(call["function"])
        found["finish_reason"] = choice["finish_reason"]
    return found


def test_an_answer(server: Live) -> None:
    """E85, E86. Catches: a message without its role, text that is cut, an end that is wrong."""
    choice = say(server, "Hello.")
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert say(server, "Hello.", max_tokens=3)["message"]["content"] == "Hel"
    *_, last = server.stream(
        PATH, {"messages": [{"role": "user", "content": "SAY:x"}], "stream_options": {"include_usage": True}}
    )
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_max_completion_tokens_counts(server: Live) -> None:
    """E38. Catches: the newer name of the limit accepted and ignored."""
    choice = say(server, "Hello.", max_completion_tokens=3)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")


def test_without_a_limit_an_answer_goes_on_to_its_end(server: Live) -> None:
    """Catches: a chat cut after the 16 tokens that completions have."""
    text = "A sentence that is longer than sixteen tokens of one byte."
    assert say(server, text)["message"]["content"] == text
    answer = server.chat("long " * 190, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 1024


def test_null_is_absent(server: Live) -> None:
    """E37. Catches: null taken for a value."""
    from rapid_llm.server.protocol import UNSUPPORTED, ChatRequest

    names = {*ChatRequest.model_fields, *UNSUPPORTED} - {"messages"}
    answer = server.chat("SAY:Hello.", **{**dict.fromkeys(names), "temperature": 0, "model": "mock"})
    assert answer["choices"][0]["message"]["content"] == "Hello."


def test_messages_are_the_librarys(server: Live) -> None:
    """E18, E19. Catches: a prompt that the server renders otherwise, and control tokens made of what a user types."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}, {"type": "text", "text": "SAY:ok"}]},
    ]
    (wanted,) = server.llm.chat(messages, SamplingParams(temperature=0, max_tokens=None))
    status, answer = server.post("/tokenize", {"messages": messages})
    assert status == 200
    assert answer["tokens"] == wanted.prompt_token_ids
    assert answer["tokens"].count(EOS) == 2
    answer = server.chat(messages=messages, temperature=0)
    assert answer["choices"][0]["message"]["content"] == wanted.outputs[0].text == "ok"
    assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)


def test_logprobs_have_the_chats_shape(server: Live) -> None:
    """Catches: another shape than clients read, alternatives without bytes, tokens and log-probabilities apart."""
    choice = server.chat("SAY:h\u00e9", temperature=0, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:3]).decode() == "h\u00e9"
    assert [entry["token"] for entry in content[:2]] == ["h", "bytes:\\xc3"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}
        assert entry["logprob"] == pytest.approx(-259 * np.exp(-16.0), abs=1e-4)
    events = server.stream(
        PATH,
        {
            "messages": [{"role": "user", "content": "SAY:h\u00e9"}],
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
        },
    )
    parts = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert [entry for part in parts for entry in part] == content


def test_a_call_of_a_tool(server: Live) -> None:
    """Catches: a call that is told as text, arguments that are no JSON text, an end that says stop."""
    text = 'So:\n<tool_call>{"name": "add", "arguments": {"a": [1, "é"]}}</tool_call>'
    choice = say(server, text, tools=[TOOL, OTHER])
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"], call["type"]) == ("tool_calls", "So:", "function")
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": [1, "é"]}
    assert say(server, text, tools=[TOOL, OTHER], tool_choice="none")["message"]["content"] == text
    assert say(server, text, tools=[TOOL], tool_choice="auto")["message"]["tool_calls"]
    assert say(server, "<tool_call>{", tools=[TOOL])["finish_reason"] == "stop"


def test_tools_are_told_unless_they_must_not_be_called(server: Live) -> None:
    """Catches: tools that the template never gets, and ones that tool_choice none leaves in the prompt."""

    def prompt(**fields: Any) -> int:
        return server.chat("SAY:x", tools=[TOOL], max_tokens=1, **fields)["usage"]["prompt_tokens"]

    bare = server.chat("SAY:x", max_tokens=1)["usage"]["prompt_tokens"]
    assert (prompt(), prompt(tool_choice="none")) == (bare + len("Tadd"), bare)


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [("required", {"add", "look_up"}), ({"type": "function", "function": {"name": "look_up"}}, {"look_up"})],
)
def test_a_call_can_be_forced(server: Live, choice: Any, allowed: set[str]) -> None:
    """Catches: required taken for auto: this model says words of its own unless a grammar forbids them."""
    pytest.importorskip("llguidance")
    closed = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**closed, "additionalProperties": False}}}
        for name in ("add", "look_up")
    ]
    terse = {"logit_bias": dict.fromkeys(("9", "10", "13", "32"), -100.0)}  # white space that JSON has room for
    found = say(server, "I will not.", tools=tools, tool_choice=choice, parallel_tool_calls=False, **terse)
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls"
    assert call["function"]["name"] in allowed
    assert json.loads(call["function"]["arguments"])["n"] in range(10)
    assert found["message"]["content"] is None
    cut = say(server, "I will not.", tools=tools, tool_choice=choice, max_tokens=8, **terse)
    assert (cut["message"]["content"], cut["finish_reason"]) == ('{"name":', "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required", "structured": {"regex": "a"}}, "structured"),
    ],
)
def test_what_tools_cannot_do_is_refused(server: Live, fields: dict[str, Any], param: str) -> None:
    """Catches: a choice that is accepted and not kept."""
    status, found, _ = server.refusal(PATH, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert (status, found) == (400, param)


def test_a_turn_with_a_tool_goes_on(server: Live) -> None:
    """Catches: arguments that reach the template as text and are quoted twice, and results that are refused."""
    messages = [
        {"role": "user", "content": "one and one?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "SAY:2"},
    ]
    answer = server.chat(messages=messages, tools=[TOOL], temperature=0)
    assert answer["choices"][0]["message"]["content"] == "2"
    shown = (
        "Tadd<|im_start|>user\none and one?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"a": 1}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nSAY:2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["usage"]["prompt_tokens"] == len(server.llm.tokenizer.encode(shown))


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    """Catches: tools dropped in silence by a template that does not know the word."""
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with live(script_llm(turns + "{{ '<|im_start|>assistant\n' }}")) as server:
        text = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
        found = say(server, text, tools=[OTHER])
        assert found["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": "{}"}
        told = []
        render = server.server.service.served.render
        server.server.service.served.render = lambda *a, **k: told.append(render(*a, **k)) or told[-1]  # type: ignore[method-assign]
        call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"x": 1}'}}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "SAY:y"},
        ]
        assert server.chat(messages=messages, tools=[OTHER], temperature=0)["usage"]["completion_tokens"]
        prompt = told[0].text
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
        assert '{"name": "look_up", "description": "Finds things.", "strict": true}' in prompt
        assert '<tool_call>\n{"name": "look_up", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in prompt
        assert "user\n<tool_response>\nSAY:y\n</tool_response>" in prompt


def test_reasoning_is_kept_apart(server: Live) -> None:
    """Catches: thoughts told as the answer, where the model begins them and where the prompt has."""
    choice = say(server, "<think>\nhm\n</think>\n\nYes.")
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "hm"}
    choice = say(server, "hm\n</think>\n\nYes.", chat_template_kwargs={"think": True})
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hm", "Yes.")


def test_a_structure_leaves_no_room_for_thoughts(server: Live) -> None:
    """Catches: an answer that a grammar holds taken for the thought that the prompt began."""
    pytest.importorskip("llguidance")
    found = say(server, "no", structured={"choices": ["yes"]}, chat_template_kwargs={"think": True})
    assert (found["message"]["content"], found["finish_reason"]) == ("yes", "stop")


def test_several_samples_stream_apart(server: Live) -> None:
    """E87. Catches: samples that share one reader of calls and thoughts."""
    asked = {
        "messages": [{"role": "user", "content": "SAY:a<tool_call>{}</tool_call>b"}],
        "n": 3,
        "tools": [TOOL],
        "temperature": 0,
    }
    whole = server.post(PATH, asked)[1]["choices"]
    events = server.stream(PATH, asked)
    for choice in whole:
        mine = [{"choices": [c]} for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert streamed(mine) == unnamed(choice)
        assert choice["message"]["content"] == "a<tool_call>{}</tool_call>b"

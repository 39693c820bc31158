"""What a chat request wants of the template, the sampler, and the reader of the answer, which must agree.

Tools are told to the model by its own chat template. Where that knows none, a message in the form of Hermes tells them,
and earlier calls and their results become plain text in that form, so that tools work with any chat model, as well as
it can. `required` and a named tool hold the answer to a call by a grammar.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.prompts import ParsedPrompt

from .errors import ApiError
from .protocol import ChatRequest, NamedTool
from .served import Served
from .tools import THINK, Reading, begin_marker, call_schema, knows_tools

RESERVED: Final = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Variables of a template that a request may not set by another way."""

_INTRODUCTION: Final = """\
You can call functions. Here they are, each as JSON on a line of its own:
{tools}

To call one, answer with its name and its arguments like this, and nothing else:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
What it returns is then told to you between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that is decided before the prompt is rendered. tools: those that the model is told of."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]
    params: SamplingParams
    reading: Reading

    def render(self, served: Served) -> ParsedPrompt:
        """The prompt. Raises `ValueError` or `TypeError`."""
        return served.render(self.messages, tools=self.tools, **self.variables)

    def reading_behind(self, prompt: str) -> Reading:
        """How the answer to the rendered prompt is to be read, which may end within a thought."""
        return replace(self.reading, thinking=self.reading.thinks and prompt.rstrip().endswith(THINK[0]))


def read_conversation(asked: ChatRequest, served: Served, form: str) -> Conversation:
    """form: how the model writes calls. Raises `ApiError`."""
    template = served.template_source
    variables = dict(asked.chat_template_kwargs or {})
    for name in RESERVED:
        if name in variables:
            raise ApiError(
                400, f"chat_template_kwargs may not set {name}", param="chat_template_kwargs", code="invalid_value"
            )
    if asked.add_generation_prompt is not None:
        variables["add_generation_prompt"] = asked.add_generation_prompt
    offered = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
    told, forced = _choose(asked, offered)
    more: dict[str, Any] = {}
    structured = asked.structured is not None or (
        asked.response_format is not None and asked.response_format.type != "text"
    )
    if told and structured:
        raise ApiError(
            400,
            "an answer cannot both be held to a structure and call tools: leave one out, or set tool_choice to none",
            param="response_format" if asked.structured is None else "structured",
            code="invalid_value",
        )
    if forced:
        more["structured"] = {"json_schema": call_schema(forced, form)}
    if told and begin_marker(form) in served.tokenizer.control_texts:
        more["skip_special_tokens"] = False
    free = not forced and not structured
    reading = Reading(
        form=form if told else None,
        offered=frozenset(tool["function"]["name"] for tool in told),
        forced=bool(forced),
        thinks=free and any(marker in template for marker in THINK),
    )
    messages: Sequence[Mapping[str, Any]] = [_with_arguments(message) for message in asked.messages]
    if not knows_tools(template):
        messages = _in_plain_text(messages, told)
        told = []
    return Conversation(messages, told or None, variables, asked.params(**more), reading)


def _choose(asked: ChatRequest, offered: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(tools that the model is told of, those of which it must call one)."""
    choice = asked.tool_choice
    names = [tool["function"]["name"] for tool in offered]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ApiError(400, f"tools: the function {twice!r} is there twice", param="tools", code="invalid_value")
    if not offered:
        if choice not in (None, "none"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice", code="invalid_value")
        if asked.parallel_tool_calls is not None:
            raise ApiError(400, "parallel_tool_calls needs tools", param="parallel_tool_calls", code="invalid_value")
        return [], []
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in offered if tool["function"]["name"] == choice.function.name]
        if not chosen:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name!r:.80}, which is not among tools: {', '.join(names)}",
                param="tool_choice",
                code="invalid_value",
            )
        return offered, chosen
    if choice == "required":
        return offered, offered
    if choice == "none":
        return [], []
    if asked.parallel_tool_calls is False:
        raise ApiError(
            400,
            "parallel_tool_calls false needs tool_choice required or a named tool, which make exactly one call; a free "
            "answer may hold several",
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    return offered, []


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as objects, as templates expect, where the text is one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):  # a model wrote it, and is shown what it wrote
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _in_plain_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The same conversation without what a template that knows no tools would drop or choke on."""
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool" and isinstance(message.get("content"), str):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            changed.append({"role": "user", "content": text})
        elif isinstance(message.get("tool_calls"), list):
            calls = [call.get("function") for call in message["tool_calls"] if isinstance(call, dict)]
            said = [message["content"]] if isinstance(message.get("content"), str) and message["content"] else []
            said += [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            changed.append({"role": "assistant", "content": "\n".join(said)})
        else:
            changed.append(message)
    if not tools:
        return changed
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    first = changed[0] if changed else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{introduction}"}, *changed[1:]]
    return [{"role": "system", "content": introduction}, *changed]

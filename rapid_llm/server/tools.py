"""An answer's text taken apart: what was thought, what is said, which functions are to be called.

The text comes in pieces, and whatever comes out is final: of a marker (`<think>`, `<tool_call>`) that may have begun,
the text is held back until it is decided. A call comes out once it is whole. Nothing is dropped: what looks like a call
and is none (no JSON, a function that was not offered, cut by the length) comes out as the text it is.

How models write calls, by what their chat templates hold:

- `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do;
- `mistral`: `[TOOL_CALLS]` and a list of such objects, or `[TOOL_CALLS]name[ARGS]{...}`;
- `llama3`: the whole answer is `{"name": ..., "parameters": {...}}`, maybe behind `<|python_tag|>`.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

FORMATS: Final = ("hermes", "llama3", "mistral")

THINK: Final = ("<think>", "</think>")

_BEGIN: Final = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
_END: Final = "</tool_call>"
_ARGS: Final = "[ARGS]"
_DECODER: Final = json.JSONDecoder()
_MISTRAL_ID: Final = string.ascii_letters + string.digits


class Call(NamedTuple):
    """arguments: a JSON object's text."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """kind: `content`, `reasoning` (text in both), or `call`."""

    kind: str
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How answers to one request are to be read.

    form: how calls are written, None where none are looked for. offered: names of functions. forced: the whole answer
    is a call, held to it by a grammar. thinks: answers may begin with reasoning. thinking: the prompt has begun it.
    """

    form: str | None = None
    offered: frozenset[str] = frozenset()
    forced: bool = False
    thinks: bool = False
    thinking: bool = False


def detect(template: str) -> str:
    """The format that a chat template writes calls in; `hermes` where it knows none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": ' in template):
        return "llama3"
    return "hermes"


def knows_tools(template: str) -> bool:
    """Whether a chat template reads the variable `tools`."""
    return any(re.search(r"\btools\b", part) for part in re.findall(r"{[{%].*?[%}]}", template, re.DOTALL))


def begin_marker(form: str) -> str:
    """What begins a call; a control token in some vocabularies, and then to be shown."""
    return _BEGIN[form]


def call_schema(tools: Sequence[Mapping[str, Any]], form: str) -> dict[str, Any]:
    """A JSON schema of one call of one of the functions. tools: as in a request."""
    key = "parameters" if form == "llama3" else "arguments"
    each = []
    for tool in tools:
        function = tool["function"]
        arguments = function.get("parameters") or {"type": "object"}
        each.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: arguments},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return each[0] if len(each) == 1 else {"anyOf": each}


class Splitter:
    """One answer's text. `feed` what comes, `finish` at its end; however it is cut, the same comes out.

    White space at the ends of what is thought, and in front of and behind calls, is layout and left out.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._buffer = ""
        self._fresh = True
        self.calls = 0
        self._answer = self._opening if reading.form == "llama3" else self._content
        self._state: Callable[[], Iterator[Piece]] = self._answer
        if reading.forced:
            self._state = self._forced
        elif reading.thinking:
            self._state = self._reasoning
        elif reading.thinks:
            self._state = self._start

    def feed(self, text: str) -> Iterator[Piece]:
        """What is certain now."""
        self._buffer += text
        state = None
        while state != self._state:
            state = self._state
            yield from state()

    def finish(self) -> Iterator[Piece]:
        """What was held back."""
        rest, self._buffer = self._buffer, ""
        state, form = self._state, self._reading.form
        if state == self._reasoning:
            yield from _text("reasoning", rest.strip())
        elif state == self._forced or (state == self._call and form != "hermes"):
            yield from self._calls(rest)
        elif rest.strip() or not self.calls:
            yield from _text("content", rest)

    # ---- states: each takes what it can from the buffer, and says which comes next -----------------------------------

    def _start(self) -> Iterator[Piece]:
        """Nothing has been said; it may be that reasoning comes."""
        said = self._buffer.lstrip()
        if said.startswith(THINK[0]):
            self._buffer = said[len(THINK[0]) :]
            self._state = self._reasoning
        elif said and not THINK[0].startswith(said):
            self._state = self._answer
        return iter(())

    def _reasoning(self) -> Iterator[Piece]:
        if self._fresh:
            self._buffer = self._buffer.lstrip()
            self._fresh = not self._buffer
        thought, found, rest = self._buffer.partition(THINK[1])
        if found:
            self._buffer, self._state = rest, self._behind
            yield from _text("reasoning", thought.rstrip())
        else:
            yield from _text("reasoning", self._certain(THINK[1]))

    def _behind(self) -> Iterator[Piece]:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._answer
        return iter(())

    def _opening(self) -> Iterator[Piece]:
        """An answer that begins with an object may be a call as a whole."""
        said = self._buffer.lstrip()
        if said.startswith("{"):
            self._state = self._call
        elif said and (said.startswith(_BEGIN["llama3"]) or not _BEGIN["llama3"].startswith(said)):
            self._state = self._content
        return iter(())

    def _content(self) -> Iterator[Piece]:
        form = self._reading.form
        if form is None:
            text, self._buffer = self._buffer, ""
            yield from _text("content", text)
            return
        said, found, _ = self._buffer.partition(_BEGIN[form])
        if found:
            said = said.rstrip()
            self._buffer, self._state = self._buffer[len(said) :], self._call
            yield from _text("content", said)
        else:
            yield from _text("content", self._certain(_BEGIN[form]))

    def _call(self) -> Iterator[Piece]:
        """Only an end marker tells that a call is whole before the answer is."""
        written, found, rest = self._buffer.partition(_END)
        if found and self._reading.form == "hermes":
            self._buffer, self._state = rest, self._content
            yield from self._calls(written + found)

    def _forced(self) -> Iterator[Piece]:
        return iter(())

    def _certain(self, marker: str) -> str:
        """Takes out the buffer up to white space at its end and to what may become `marker`."""
        sizes = range(min(len(marker) - 1, len(self._buffer)), 0, -1)
        held = next((size for size in sizes if self._buffer.endswith(marker[:size])), 0)
        text = self._buffer[: len(self._buffer) - held].rstrip()
        self._buffer = self._buffer[len(text) :]
        return text

    def _calls(self, written: str) -> Iterator[Piece]:
        """The calls in `written`; where it holds none, that is what was said."""
        found = _read_calls(written, self._reading.form or "hermes", self._reading.offered)
        if not found:
            yield from _text("content", written)
        for name, arguments in found:
            self.calls += 1
            yield Piece("call", call=Call(_call_id(self._reading.form), name, arguments))


def _text(kind: str, text: str) -> Iterator[Piece]:
    if text:
        yield Piece(kind, text)


def _read_calls(written: str, form: str, offered: Collection[str]) -> list[tuple[str, str]]:
    """(name, arguments) of each call; empty unless all of it is calls of functions that were offered."""
    body = written.strip().removeprefix(_BEGIN[form]).strip()
    if form == "hermes":
        body = body.removesuffix(_END)
    elif form == "mistral" and _ARGS in body:
        parts = [part.partition(_ARGS) for part in body.split(_BEGIN[form])]
        return _checked([{"name": name.strip(), "arguments": arguments} for name, _, arguments in parts], offered)
    values: list[Any] = []
    try:
        while body:
            value, end = _DECODER.raw_decode(body)
            values += value if isinstance(value, list) else [value]
            body = body[end:].strip()
            if form == "llama3":  # it writes several with semicolons between them
                body = body.lstrip("; \n")
            elif body:
                return []
    except (ValueError, RecursionError):
        return []
    return _checked(values, offered)


def _checked(values: Sequence[Any], offered: Collection[str]) -> list[tuple[str, str]]:
    found = []
    for value in values:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in offered:
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                return []
        if not isinstance(arguments, dict):
            return []
        found.append((name, json.dumps(arguments, ensure_ascii=False)))
    return found


def _call_id(form: str | None) -> str:
    """An id of this call; Mistral's templates want nine letters or digits."""
    if form == "mistral":
        return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"

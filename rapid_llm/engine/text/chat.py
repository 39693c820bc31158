"""Chat messages to a prompt, through the model's own Jinja template, with no way from message text to a control token.

The template decides where control tokens stand; the people who write messages must not. The rendered prompt is one
string in which both look alike, so the difference is marked before rendering. A *mark*, a Unicode noncharacter that
occurs neither in the messages nor in the template, is put into message text right before every place where a control
token could begin: where its name is spelled out, and where a string starts or ends with a piece of a name that
neighbouring text could complete. The tokenizer refuses a control token behind a mark, and then drops the marks. Nothing
else of the text changes, so templates may trim it, compare it, split it or measure it as usual, and text without such a
place gets no mark and has exactly the ids that it has in the plainly rendered prompt.

A template that rewrites message text (`replace`, `lower`) could still build a name out of pieces that were none. That
is found by rendering once more with a mark before every character that begins some control token's name: where the
prompts differ in their control tokens, the second one is used.

Templates are data from a model file, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .tokenizer import Tokenizer, require_text

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_MARKS: Final = range(0xFDD0, 0xFDF0)
"""Code points that Unicode keeps free for a program's own use inside text."""

_MAX_DEPTH: Final = 64
_WORD: Final = re.compile(r"[A-Za-z_]+")


class ChatTemplateError(ValueError):
    """The chat template cannot be read, or refuses these messages; the text holds the template's own words."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation: its text, as the model's documentation would show it, and its token ids."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """A compiled chat template, bound to the tokenizer whose control tokens it may write.

    source: Jinja text; None takes the model's own. Raises `ChatTemplateError` if there is none or it cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        source = tokenizer.chat_template if source is None else source
        if not source:
            raise ChatTemplateError(
                "this model's file holds no chat template, so it is no chat model; use generate instead"
            )
        self._tokenizer = tokenizer
        self._source = source
        self._guard = _Guard(tokenizer.control_texts)
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> ChatPrompt:
        """The prompt for `messages`: mappings with `role` (one of `ROLES`) and `content`, text or a list of text parts.

        add_generation_prompt: end where the assistant speaks next. tools, variables: handed to the template, for those
        that know them. BOS stands once, whether the template writes it or the file asks for it.

        Raises `ValueError` (`ChatTemplateError` where the template itself refuses), or `TypeError` where a value is not
        plain JSON data; the text names the message by its position.
        """
        given: dict[str, Any] = {**variables, "messages": check_messages(messages), "tools": _plain(tools, "tools")}
        mark = _unused_mark([self._source, *_strings(given)])
        context = {**self._token_names, "add_generation_prompt": add_generation_prompt}
        text = self._render({**context, **_map_strings(given, lambda s: self._guard.places(s, mark))})
        ids = self._tokenizer.encode(text, mark=mark)
        if self._guard.concerns(_strings(given)):  # see the module's docstring
            strict = self._render({**context, **_map_strings(given, lambda s: self._guard.everywhere(s, mark))})
            strict_ids = self._tokenizer.encode(strict, mark=mark)
            if self._control_tokens(ids) != self._control_tokens(strict_ids):
                text, ids = strict, strict_ids
        return ChatPrompt(text.replace(mark, ""), ids)

    @cached_property
    def _token_names(self) -> dict[str, str]:
        """`bos_token` and `eos_token`, which templates write out."""
        tokenizer = self._tokenizer
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        return {name: "" if token is None else tokenizer.tokens[token] for name, token in ids.items()}

    def _render(self, context: Mapping[str, Any]) -> str:
        try:
            return self._template.render(context)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # the template's own code went wrong, such as adding text to a missing content
            raise ChatTemplateError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error

    def _control_tokens(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if self._tokenizer.is_control(i)]


class _Guard:
    """Puts marks into message text so that no control token in `names` can begin in it or end in it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._beginnings = frozenset(name[:size] for name in names for size in range(1, len(name)))
        self._endings = frozenset(name[-size:] for name in names for size in range(1, len(name)))
        self._longest = max(map(len, names), default=0)
        firsts = "".join(re.escape(c) for c in sorted({name[0] for name in names}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def concerns(self, texts: Iterable[str]) -> bool:
        """Whether any of `texts` holds a character that begins a name."""
        return any(map(self._first.search, texts))

    def places(self, text: str, mark: str) -> str:
        """`text` with a mark at each name in it, and at each piece of a name where it starts or ends."""
        places = {at for name in self._names for at in _find_all(text, name)}
        core = text.strip()  # what a template's `trim` leaves
        places |= self._at_ends(text) | {at + text.find(core) for at in self._at_ends(core)}
        for at in sorted(places, reverse=True):
            text = text[:at] + mark + text[at:]
        return text

    def everywhere(self, text: str, mark: str) -> str:
        """`text` with a mark before every character that begins a name, on top of `places`."""
        marked = self.places(text, mark)
        return self._first.sub(lambda match: mark + match[0], marked)

    def _at_ends(self, text: str) -> set[int]:
        """Where a mark breaks a name that runs over the start or the end of `text`, or that has it in its middle."""
        places = set()
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._beginnings:
                places.add(len(text) - size)
            if text[:size] in self._endings:
                places.add(size - 1)
        if 0 < len(text) < self._longest and any(text in name for name in self._names):
            places.add(0)
        return places


def check_messages(messages: object) -> list[dict[str, Any]]:
    """`messages` as plain dicts whose content is a str (None for an assistant's bare tool calls), or a clear error."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages must be a list like [{{'role': 'user', 'content': 'Hi'}}], not {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hi'}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} must be a mapping with 'role' and 'content', not {type(message).__name__}")
    checked: dict[str, Any] = _plain(message, where)
    role = checked.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}: role={role!r} is not known; use one of {', '.join(ROLES)}")
    content = checked.get("content")
    if isinstance(content, list):
        checked["content"] = _join_parts(content, where)
    elif content is None:
        if role != "assistant" or not checked.get("tool_calls"):
            raise ValueError(f"{where}: content is missing; it may be left out only beside an assistant's tool_calls")
        checked["content"] = None
    elif not isinstance(content, str):
        raise TypeError(f"{where}: content must be a str or a list of text parts, not {type(content).__name__}")
    return checked


def _join_parts(parts: list[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where}: content[{i}]={part!r:.80} is not supported; use {{'type': 'text', 'text': '...'}}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy of JSON-like data with every str checked; other objects, which could hide text, are refused."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(require_text(value, where))
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where[:80]}... is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {_plain(k, where, depth + 1): _plain(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise TypeError(f"{where} is of type {type(value).__name__}; use str, numbers, lists and dicts")


def _strings(value: Any) -> Iterator[str]:
    """Every str in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every str changed, but for words that templates compare: plain keys, roles, types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if _is_word(key) else change(str(key)): (
                item if key in ("role", "type") and _is_word(item) else _map_strings(item, change)
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def _find_all(text: str, name: str) -> Iterator[int]:
    """Positions of `name` in `text`, overlapping ones included."""
    at = text.find(name)
    while at >= 0:
        yield at
        at = text.find(name, at + 1)


def _unused_mark(texts: Iterable[str]) -> str:
    """A character that is in none of `texts`: a noncharacter, or, where all 32 are taken, one for private use."""
    used = set[str]().union(*texts)
    return next(c for c in map(chr, (*_MARKS, *range(0xF0000, 0xF0000 + len(used) + 1))) if c not in used)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja set up as chat templates expect it: the whitespace rules, filters and functions of `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which only training reads: its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes. Marks stay as they are even in ASCII output: they are taken out later."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub("[^\x00-\x7f\ufdd0-\ufdef]", lambda m: json.dumps(m[0])[1:-1], text) if ensure_ascii else text

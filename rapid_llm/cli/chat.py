"""`rapid-llm chat`: a conversation on a terminal, or one message per line through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from .generate import make_llm, make_params, write
from .support import USAGE, fail

HELP: Final = """\
/clear          forget the conversation
/system TEXT    tell the model something else beforehand, and forget the conversation
/help           this list
/exit           end (or Ctrl-D)
//TEXT          say /TEXT
Ctrl-C          while the model speaks: stop it; at the prompt: end"""


class Conversation:
    """Messages so far: an optional system message, then user and assistant in turn."""

    def __init__(self, system: str | None) -> None:
        self.messages: list[dict[str, str]] = []
        self.clear(system)

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {"role": "user", "content": ""}
        return first["content"] if first["role"] == "system" else None

    def clear(self, system: str | None) -> None:
        self.messages = [] if system is None else [{"role": "system", "content": system}]


def run(*, model: str | None, system: str | None, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Read lines and answer them until /exit or the end of input."""
    params = make_params(sampling)
    llm = make_llm(model, options)
    conversation = Conversation(system)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # line editing and history, where Python has them
            import readline  # noqa: F401
        print("Type a message; /help lists the commands, /exit or Ctrl-D ends.", file=sys.stderr)
    while (line := _read_line(terminal)) is not None:
        line = line.strip()
        if line in ("/exit", "/quit"):
            break
        if line.startswith("/") and not line.startswith("//"):
            _command(line, conversation)
        elif line:
            _answer(llm, conversation, line.removeprefix("/") if line.startswith("//") else line, params, terminal)


def _read_line(terminal: bool) -> str | None:
    """The next line, None at the end of input."""
    try:
        return input("> " if terminal else "")
    except EOFError:
        if terminal:
            print()
        return None
    except UnicodeDecodeError as error:
        fail(f"standard input is not {error.encoding}: {error.reason} at byte {error.start}", USAGE)


def _command(line: str, conversation: Conversation) -> None:
    name, _, rest = line.partition(" ")
    if name == "/clear":
        conversation.clear(conversation.system)
    elif name == "/system":
        conversation.clear(rest.strip() or None)
    elif name == "/help":
        print(HELP, file=sys.stderr)
    else:
        print(f"{name} is no command; /help lists them. To say it, write /{name}", file=sys.stderr)


def _answer(llm: Any, conversation: Conversation, text: str, params: Any, terminal: bool) -> None:
    """Stream one answer and keep it. A message that cannot be served is taken back, and the conversation goes on."""
    conversation.messages.append({"role": "user", "content": text})
    try:
        deltas = llm.stream_chat(conversation.messages, params)
    except (ValueError, TypeError) as error:
        conversation.messages.pop()
        print(f"Error: {error}\n/clear begins anew", file=sys.stderr)
        return
    said: list[str] = []
    reason = stop_reason = None
    with contextlib.closing(write(deltas)) as written:
        try:
            for delta in written:
                said.append(str(delta))
                reason, stop_reason = delta.finish_reason, delta.stop_reason
        except KeyboardInterrupt:
            if not terminal:
                raise
            reason = "abort"
    print(flush=True)
    if reason == "error":
        print(f"Error: {stop_reason}", file=sys.stderr)
    elif reason in ("length", "abort"):
        why = "stopped" if reason == "abort" else f"cut: --max-tokens {params.max_tokens}, or the context, is used up"
        print(f"[{why}]", file=sys.stderr)
    conversation.messages.append({"role": "assistant", "content": "".join(said)})

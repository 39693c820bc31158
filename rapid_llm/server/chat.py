"""/v1/chat/completions, from a request to what answers it."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from .answers import chat_logprobs, ending, usage
from .async_engine import Ticket
from .conversation import read_conversation
from .protocol import ChatRequest, read
from .service import Service
from .tools import Piece, Splitter

if TYPE_CHECKING:
    from rapid_llm.engine.job import Job
    from rapid_llm.engine.outputs import CompletionOutput, TextDelta


async def chat(service: Service, request: Request) -> Response:
    """One conversation, `n` answers."""
    asked = read(ChatRequest, await service.body(request))
    service.served.check_model(asked.model)
    plan = read_conversation(asked, service.served, service.tool_format)
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.served.name}
    tokenizer = service.served.tokenizer
    reading = plan.reading

    def make() -> list[Job]:
        nonlocal reading
        prompt = plan.render(service.served)
        reading = plan.reading_behind(prompt.text or "")
        return service.served.jobs([prompt], plan.params, streamed=bool(asked.stream), cache_salt=asked.cache_salt)

    def logprobs(answer: CompletionOutput | TextDelta) -> dict[str, Any] | None:
        if not answer.logprobs:
            return None
        return chat_logprobs(tokenizer, answer.token_ids, answer.logprobs, asked.top_logprobs or 0)

    def whole(jobs: Sequence[Job]) -> dict[str, Any]:
        output = jobs[0].output()
        choices = []
        for answer in output.outputs:
            splitter = Splitter(reading)
            message = _message([*splitter.feed(answer.text), *splitter.finish()])
            end = _ending(splitter, answer.finish_reason, answer.stop_reason)
            choices.append({"index": answer.index, "message": message, "logprobs": logprobs(answer), **end})
        return {**head, "object": "chat.completion", "choices": choices, "usage": usage([output]).json()}

    async def events(ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        base = {**head, "object": "chat.completion.chunk"}
        extra = {"usage": None} if asked.include_usage else {}
        splitters = [Splitter(reading) for _ in range(plan.params.n)]
        for index in range(plan.params.n):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield {**base, "choices": [{**first, "finish_reason": None}], **extra}
        async for _, delta in ticket.deltas():
            for choice in _chunks(splitters[delta.sample_index], delta, logprobs(delta)):
                yield {**base, "choices": [choice], **extra}
        if asked.include_usage:
            yield {**base, "choices": [], "usage": usage(ticket.jobs).json()}

    return await service.answer(
        request,
        plan.params.n,
        make,
        whole=whole,
        events=events if asked.stream else None,
        param="messages",
        user=asked.user,
    )


def _message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """What a whole answer says; content is null beside calls where nothing else was said."""
    texts: dict[str, str] = {}
    calls = []
    for piece in pieces:
        if piece.call is None:
            texts[piece.kind] = texts.get(piece.kind, "") + piece.text
        else:
            calls.append(_call(piece))
    content = texts.get("content", None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if "reasoning" in texts:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _chunks(splitter: Splitter, delta: TextDelta, logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The choices of a stream's events for one delta: what it says, then how it ends."""
    before = splitter.calls
    pieces = list(splitter.feed(delta.text))
    if delta.finish_reason is not None:
        pieces += splitter.finish()
    says: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.call is not None:
            says.append({"tool_calls": [{"index": before, **_call(piece)}]})
            before += 1
        else:
            says.append({"content" if piece.kind == "content" else "reasoning_content": piece.text})
    if logprobs is not None and not says:
        says.append({"content": ""})  # their text is held back
    choices = [
        {"index": delta.sample_index, "delta": said, "logprobs": logprobs if i == 0 else None, "finish_reason": None}
        for i, said in enumerate(says)
    ]
    if delta.finish_reason is not None:
        end = _ending(splitter, delta.finish_reason, delta.stop_reason)
        choices.append({"index": delta.sample_index, "delta": {}, "logprobs": None, **end})
    return choices


def _ending(splitter: Splitter, reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    end = ending(reason, stop_reason)
    if reason == "stop" and splitter.calls:
        end["finish_reason"] = "tool_calls"
    return end


def _call(piece: Piece) -> dict[str, Any]:
    call = piece.call
    if call is None:
        raise TypeError(f"a piece of {piece.kind} is no call")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

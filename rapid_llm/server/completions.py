"""/v1/completions and /v1/embeddings, from a request to what answers it."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from .answers import TextLogprobs, ending, text_choice, usage
from .async_engine import Ticket
from .errors import ApiError, dump
from .protocol import CompletionRequest, EmbeddingRequest, read
from .service import Service
from .sse import unless_gone

if TYPE_CHECKING:
    from rapid_llm.engine.job import Job


async def completions(service: Service, request: Request) -> Response:
    """One prompt or several, `n` answers to each: choice number p * n + i is answer i to prompt p."""
    asked = read(CompletionRequest, await service.body(request))
    service.served.check_model(asked.model)
    params = asked.params()
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", **_head(service)}
    n, top, echo = params.n, params.logprobs, params.echo
    tokenizer = service.served.tokenizer

    def make() -> list[Job]:
        prompts = service.served.parse(asked.prompt)
        return service.served.jobs(prompts, params, streamed=bool(asked.stream), cache_salt=asked.cache_salt)

    def whole(jobs: Sequence[Job]) -> dict[str, Any]:
        outputs = [job.output() for job in jobs]
        choices = [
            text_choice(tokenizer, output, answer, p * n + answer.index, top=top, echo=echo)
            for p, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return {**head, "choices": choices, "usage": usage(outputs).json()}

    async def events(ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        shapes: dict[int, TextLogprobs] = {}
        async for p, delta in ticket.deltas():
            index = p * n + delta.sample_index
            choice: dict[str, Any] = {"index": index, "text": delta.text, "logprobs": None}
            if top is not None and delta.logprobs:
                shape = shapes.setdefault(index, TextLogprobs(tokenizer, top))
                choice["logprobs"] = shape.take(delta.token_ids, delta.logprobs)
            choice |= ending(delta.finish_reason, delta.stop_reason)
            if delta.text or choice["logprobs"] or choice["finish_reason"]:
                yield {**head, "choices": [choice], **({"usage": None} if asked.include_usage else {})}
        if asked.include_usage:
            yield {**head, "choices": [], "usage": usage(ticket.jobs).json()}

    return await service.answer(
        request,
        n * _prompts(asked.prompt),
        make,
        whole=whole,
        events=events if asked.stream else None,
        param="prompt",
        user=asked.user,
    )


async def embeddings(service: Service, request: Request) -> Response:
    """Vectors of texts or ids: pooled final hidden states, at length 1."""
    from rapid_llm.engine.embedding import Embedding

    asked = read(EmbeddingRequest, await service.body(request))
    service.served.check_model(asked.model)
    served = service.served
    service.require_engine()
    with service.slots.take(_prompts(asked.input)):

        def make() -> tuple[Embedding, int]:
            prompts = served.parse(asked.input)
            served.check_lengths(prompts, "input")
            ids = [prompt.ids for prompt in prompts]
            return Embedding(served.engine, ids, asked.pooling or "mean"), sum(map(len, ids))

        chore, tokens = await service.in_pool(make, "input")
        await unless_gone(request.receive, service.engine.do(chore))
        try:
            vectors = await service.in_pool(lambda: chore.vectors)
        except ArithmeticError as error:
            raise ApiError(500, str(error), code="answer_failed") from error
    data = [
        {"object": "embedding", "index": i, "embedding": _packed(v) if asked.encoding_format == "base64" else v}
        for i, v in enumerate(vectors)
    ]
    total = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"object": "list", "data": data, "model": served.name, "usage": total}
    return Response(dump(body), media_type="application/json")


def _packed(vector: Sequence[float]) -> str:
    """Little-endian fp32 in base64, as OpenAI's client asks for by itself."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _prompts(prompt: object) -> int:
    """How many prompts there are, as far as that can be told before they are read."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return len(prompt)
    return 1


def _head(service: Service) -> dict[str, Any]:
    return {"created": int(time.time()), "model": service.served.name}

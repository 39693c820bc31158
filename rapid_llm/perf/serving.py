"""Load on a server through its OpenAI-compatible API: every request at its time, each token stamped as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from rapid_llm.bench.host import quiet

from .http import HttpError
from .traffic import Answer, Traffic, figures

KIND: Final = "serving"
SCHEMA: Final = 1
WARMUPS: Final = 2
RETRY_S: Final = 0.2
DRAIN_S: Final = 600.0
"""Longest wait for the answers once the last request was sent."""

Now = Callable[[], float]


class Client(Protocol):
    """What is asked of `http.Endpoint`."""

    async def get(self, path: str) -> Any: ...
    def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]: ...


async def load(
    client: Client,
    model: str | None,
    runs: Sequence[Traffic],
    *,
    now: Now = time.perf_counter,
    told: Callable[[dict[str, Any]], None] = lambda found: None,
    patience: float = 0.0,
) -> dict[str, Any]:
    """Run after run against one server, the next when the last one's answers are there.

    model: as the server calls it; None takes the first that it lists. told: is called with the figures of each run.
    patience: seconds in which a server that is starting may refuse to be connected to. Raises `HttpError` where the
    server refuses the first request, `OSError` where it cannot be reached.
    """
    listed = await _listed(client, now() + patience, now)
    name = model if model is not None else served_name(listed)
    extra = await _warm(client, name, runs[0], now)
    results = []
    for traffic in runs:
        results.append(await _run(client, name, traffic, extra, now))
        told(results[-1])
    return {
        "model": name,
        "ignore_eos": extra.get("ignore_eos", False),
        "runs": results,
        "server_report": await _report(client),
    }


async def _report(client: Client) -> Any:
    """Which row runs each op, and its share of the memory's limit, if the server is one that tells."""
    try:
        return await client.get("/v1/report")
    except HttpError as error:
        return {"missing": str(error)}


async def _listed(client: Client, until: float, now: Now) -> Any:
    while True:
        try:
            return await client.get("/v1/models")
        except ConnectionError:
            if now() >= until:
                raise
        await asyncio.sleep(RETRY_S)


def served_name(listed: Any) -> str:
    """The first model of what the server lists. Raises `HttpError` if there is none."""
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise HttpError(0, f"/v1/models lists no model: {str(listed)[:200]}") from None


async def _warm(client: Client, name: str, traffic: Traffic, now: Now) -> dict[str, Any]:
    """A few requests one by one, which also tell whether the server goes on past the model's end token when asked.

    It is no field of OpenAI's. Without it answers may be shorter than planned, and the record says so.
    """
    extra: dict[str, Any] = {"ignore_eos": True}
    for number in range(WARMUPS):
        answer = await ask(client, body(name, traffic, -1 - number, extra), now(), now)
        if answer.error.startswith("400") and extra:
            extra = {}
            answer = await ask(client, body(name, traffic, -1 - number, extra), now(), now)
        if not answer.good:
            raise HttpError(0, f"a first request failed: {answer.error or 'no text came'}")
    return extra


async def _run(client: Client, name: str, traffic: Traffic, extra: Mapping[str, Any], now: Now) -> dict[str, Any]:
    bodies = [body(name, traffic, number, extra) for number in range(traffic.requests)]
    due = traffic.arrivals()
    with quiet():
        start = now()
        tasks = [
            asyncio.create_task(_at(client, content, start + at, now)) for content, at in zip(bodies, due, strict=True)
        ]
        try:
            async with asyncio.timeout(due[-1] + DRAIN_S):
                answers = await asyncio.gather(*tasks)
        except TimeoutError:
            raise HttpError(0, f"answers were still missing {DRAIN_S:g} s behind the last request") from None
    return figures(traffic, answers, start)


async def _at(client: Client, content: Mapping[str, Any], due: float, now: Now) -> Answer:
    if (wait := due - now()) > 0:
        await asyncio.sleep(wait)
    return await ask(client, content, due, now)


def body(name: str, traffic: Traffic, number: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A completion of so many tokens of a prompt of ids, streamed, greedy."""
    return {
        "model": name,
        "prompt": traffic.prompt(number),
        "max_tokens": traffic.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


async def ask(client: Client, content: Mapping[str, Any], due: float, now: Now) -> Answer:
    """One request to its end; a failure is part of the answer."""
    answer = Answer(due, sent=now())
    try:
        async with contextlib.aclosing(client.events("/v1/completions", content)) as events:
            async for event in events:
                if "error" in event:
                    answer.error = f"in the stream: {event['error'].get('message', event['error'])}"
                    break
                if any(choice.get("text") for choice in event.get("choices", ())):
                    answer.times.append(now())
                if event.get("usage"):
                    answer.tokens = int(event["usage"]["completion_tokens"])
    except (HttpError, OSError) as error:
        answer.error = str(error) or type(error).__name__
    return answer

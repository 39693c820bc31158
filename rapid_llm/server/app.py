"""The application: which path does what, and what every path has in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .chat import chat
from .completions import completions, embeddings
from .errors import ApiError, dump
from .protocol import DetokenizeRequest, TokenizeRequest, read
from .report import Report
from .service import Service
from .sse import ClientGoneError

OPEN_PATHS: Final = ("/", "/health")
"""These need no key: the page holds nothing of the model's, and whoever watches over the server has none."""

PATHS: Final = (
    *("/", "/health", "/metrics", "/v1/models", "/v1/report", "/v1/completions", "/v1/chat/completions"),
    *("/v1/embeddings", "/tokenize", "/detokenize"),
)

DRAIN_BYTES: Final = 1 << 28
DRAIN_S: Final = 10.0
"""Of a refused body, so much is read and dropped, so that a client that only writes comes to read the refusal."""

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_log = logging.getLogger(__name__)

Route = Callable[[Service, Request], Awaitable[Response]]


def create_app(service: Service, report: Report) -> FastAPI:
    """The application around a service, which whoever runs it starts and stops."""
    app = FastAPI(title="rapid-llm", openapi_url=None, docs_url=None, redoc_url=None)
    page = (Path(__file__).parent / "page" / "index.html").read_bytes()

    async def show_page(_: Service, __: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    async def show_report(_: Service, __: Request) -> Response:
        service.require_engine()
        return _json(await report.json())

    routes: tuple[tuple[str, str, Route], ...] = (
        ("GET", "/", show_page),
        ("GET", "/health", health),
        ("GET", "/metrics", metrics),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        ("GET", "/v1/report", show_report),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/embeddings", embeddings),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
    )

    async def no_route(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = (
            f"{request.method} {request.url.path} is not served; known: {', '.join(f'{m} {p}' for m, p, _ in routes)}"
        )
        headers = dict(getattr(error, "headers", None) or {})
        found = ApiError(status, text, code="no_such_route", headers=headers)
        return _json(found.json(), status, headers)

    app.add_exception_handler(HTTPException, no_route)
    for method, path, route in routes:
        app.add_route(path, _bound(route, service), methods=[method])
    app.add_middleware(Door, service=service)
    return app


class Door:
    """Around every route: the key, the count of responses, and an error's shape, whatever it was."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._service.keys.check(Request(scope).headers.get("authorization"))
            await self._app(scope, receive, noting)
        except ApiError as error:
            await _refuse(error, receive, noting)
        except ClientGoneError:
            status = 499  # as nginx logs it; nobody is there to read it
        except Exception:
            if status:
                raise
            _log.exception("%s %s failed", scope["method"], scope["path"])
            await _refuse(ApiError(500, "the server failed; its log says how", code="internal_error"), receive, noting)
        finally:
            self._service.metrics.responded(_known(scope["path"]), status)


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    """Send an error; of a body that is still coming, read on for a while, or its sender never gets to read it."""
    body = dump(error.json())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    unread = error.status in (401, 408, 413)
    if unread:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread:
        with contextlib.suppress(TimeoutError):  # as said: for a while
            async with asyncio.timeout(0 if error.status == 408 else DRAIN_S):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    dropped, more = 0, True
    while more and dropped < DRAIN_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)


async def health(service: Service, _: Request) -> Response:
    """200 while the engine can answer; 503 with the reason otherwise. Waits for nothing."""
    trouble = service.engine.trouble() or service.slots.closed
    if trouble is not None:
        return _json({"status": "unhealthy", "reason": trouble}, 503)
    return _json({"status": "ok"})


async def metrics(service: Service, _: Request) -> Response:
    text = await service.in_pool(service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(service: Service, _: Request) -> Response:
    return _json({"object": "list", "data": [_model(service, name) for name in service.served.names]})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.served.check_model(name)
    return _json(_model(service, name))


async def tokenize(service: Service, request: Request) -> Response:
    """Ids of a text, in which control tokens count, or of a conversation's prompt."""
    asked = read(TokenizeRequest, await service.body(request))
    service.served.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give exactly one of prompt and messages", param="prompt", code="invalid_value")

    def ids() -> list[int]:
        if asked.messages is not None:
            generation = asked.add_generation_prompt is not False
            return service.served.render(asked.messages, tools=None, add_generation_prompt=generation).ids
        add_bos = False if asked.add_special_tokens is False else None
        return service.served.tokenizer.encode(asked.prompt or "", add_bos=add_bos)

    tokens = await service.in_pool(ids, "messages" if asked.prompt is None else "prompt")
    return _json({"tokens": tokens, "count": len(tokens), "max_model_len": service.served.max_model_len})


async def detokenize(service: Service, request: Request) -> Response:
    """The text of ids; bytes that are no UTF-8 become U+FFFD."""
    asked = read(DetokenizeRequest, await service.body(request))
    service.served.check_model(asked.model)
    skip = bool(asked.skip_special_tokens)
    text = await service.in_pool(
        lambda: service.served.tokenizer.decode(asked.tokens, skip_special_tokens=skip), "tokens"
    )
    return _json({"prompt": text})


def _bound(route: Route, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await route(service, request)

    return handle


def _model(service: Service, name: str) -> dict[str, Any]:
    length = service.served.max_model_len
    return {"id": name, "object": "model", "created": service.started, "owned_by": "rapid-llm", "max_model_len": length}


def _known(path: str) -> str:
    """The path as a label: no more of them than there are routes, whatever is asked for."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{name}"
    return path if path in PATHS else "other"


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status_code=status, headers=headers, media_type="application/json")

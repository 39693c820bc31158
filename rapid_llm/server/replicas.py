"""Replicas on Ray Serve: whole servers beside each other, each with an engine of its own, behind one `front`.

Each replica is a deployment of its own, so that the front, and not Ray, says which of them answers. Needs the extra
`replicas`: pip install 'rapid-llm[serve,replicas]'.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response

from .front import Call, Front, ReplicaLostError, Start
from .replica import ReplicaServer, ReplicaSpec

NAME: Final = "rapid-llm"
"""Of the application in Ray Serve."""

MOST_ONGOING: Final = 1 << 20
"""Requests in a replica as Ray sees it: the replica has a limit of its own."""

WORD_S: Final = 5.0
"""Seconds that a replica may take to say that a request has come. What it then does may take as long as it wants."""

LAST_S: Final = 5.0
"""Seconds behind `shutdown_timeout` after which Ray ends a replica."""


class RayReplica:
    """A replica behind a handle of Ray Serve."""

    def __init__(self, handle: Any) -> None:
        self._answer = handle.options(method_name="acknowledged", stream=True)
        self._trouble = handle.options(method_name="trouble")

    async def answer(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """See `front.Replica`."""
        parts = self._answer.remote(call)
        try:
            # Ray keeps a request for a replica that it is starting anew; another one can answer before that.
            await asyncio.wait_for(anext(parts), WORD_S)
            async for part in parts:
                yield part
        except TimeoutError as error:
            raise ReplicaLostError(f"no word for {WORD_S:g} s") from error
        except (RayActorError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        finally:
            parts.cancel()

    async def trouble(self) -> str | None:
        """See `front.Replica`."""
        try:
            found: str | None = await self._trouble.remote()
        except (RayActorError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        return found


class RayFront:
    """The deployment that HTTP comes to."""

    def __init__(self, max_body_bytes: int | None, *handles: Any) -> None:
        self._front = Front([RayReplica(handle) for handle in handles], max_body_bytes=max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        return await self._front(request)


def application(spec: ReplicaSpec, count: int) -> Any:
    """The application of `count` replicas, for `serve.run`."""
    seconds, gpus, spec = spec.options.shutdown_timeout + LAST_S, spec.gpus, spec.placed(count)
    replicas = [
        serve.deployment(
            name=f"replica-{index}",
            num_replicas=1,
            max_ongoing_requests=MOST_ONGOING,
            graceful_shutdown_timeout_s=seconds,
            ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
        )(ReplicaServer).bind(spec)
        for index in range(count)
    ]
    front = serve.deployment(
        name="front",
        max_ongoing_requests=MOST_ONGOING,
        graceful_shutdown_timeout_s=seconds,
        ray_actor_options={"num_cpus": 0},
    )
    return front(RayFront).bind(spec.options.max_body_bytes, *replicas)


def run(spec: ReplicaSpec, count: int, *, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. ready: called once requests are answered.

    Ray is started here unless RAY_ADDRESS names a cluster. Raises Ray's errors where a replica cannot be made.
    """
    if not ray.is_initialized():
        ray.init(include_dashboard=False, namespace=NAME, log_to_driver=True)
    ended = threading.Event()
    before = {n: signal.signal(n, lambda *_: ended.set()) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(spec, count), name=NAME, route_prefix="/")
        ready()
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)

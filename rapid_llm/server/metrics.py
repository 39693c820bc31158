"""What /metrics tells, in Prometheus' text format. Each server counts for itself: no registry of the process's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rapid_llm.kernels.registry import trace

if TYPE_CHECKING:
    from rapid_llm.engine.job import Job

    from .served import Served
    from .service import Service

_FIRST: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_WHOLE: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Told of every step by the engine's thread and of every response by the application."""

    def __init__(self, served: Served, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._progress: dict[Job, tuple[int, float]] = {}
        self._first = self._histogram("time_to_first_token", "From a request's arrival to its first token", _FIRST)
        self._between = self._histogram("inter_token_latency", "Between tokens of one answer", _BETWEEN)
        self._whole = self._histogram("request_duration", "From a request's arrival to its end", _WHOLE)
        self._finished = self._counter("answers", "Answers that ended, by how", ["finish_reason"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts of requests that ended")
        self._output_tokens = self._counter("generation_tokens", "Tokens that were generated")
        self._responses = self._counter("http_responses", "Responses, by path and status", ["path", "status"])
        self._registry.register(_Engine(served, service))

    def stepped(self, jobs: Sequence[Job], time: float) -> None:
        """After a step: `jobs` are those that were in it or waited for it. time: when it ended."""
        for job in jobs:
            metrics = job.metrics
            seen, last = self._progress.get(job, (0, metrics.arrival))
            new = metrics.output_tokens - seen
            if new > 0:
                if seen == 0 and metrics.first_token is not None:
                    self._first.observe(metrics.first_token - metrics.arrival)
                elif seen:
                    self._between.observe((time - last) / max(1.0, new / metrics.samples))
                self._output_tokens.inc(new)
                self._progress[job] = (metrics.output_tokens, time)
            if job.finished:
                self._ended(job, time)

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' format."""
        return generate_latest(self._registry)

    def _ended(self, job: Job, time: float) -> None:
        self._progress.pop(job, None)
        self._whole.observe(time - job.metrics.arrival)
        self._prompt_tokens.inc(job.metrics.prompt_tokens)
        for request in job.requests:
            self._finished.labels(request.finish_reason or "error").inc()

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"rapid_llm_{name}_seconds", f"{what}, in seconds", buckets=buckets, registry=self._registry)

    def _counter(self, name: str, what: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"rapid_llm_{name}", what, labels, registry=self._registry)


class _Engine(Collector):
    """Figures that are read off the engine when they are asked for."""

    def __init__(self, served: Served, service: Service) -> None:
        self._served = served
        self._service = service

    def collect(self) -> Iterator[Metric]:
        engine = self._served.engine
        scheduler, totals, pool = engine.scheduler, engine.totals, engine.scheduler.pool
        kept = pool.kept_pages
        held = pool.usable_pages - pool.free_pages
        for name, what, value in (
            ("requests_running", "Sequences that are being computed", len(scheduler.running)),
            ("requests_waiting", "Sequences that wait to be computed", len(scheduler.waiting)),
            ("answers_open", "Answers that hold one of --max-concurrent-requests", self._service.slots.used),
            (
                "kv_cache_usage_ratio",
                "Share of the key/value cache's pages that sequences hold",
                held / pool.usable_pages,
            ),
            ("kv_cache_kept_ratio", "Share of its pages that only the prefix cache keeps", kept / pool.usable_pages),
            ("healthy", "Whether /health says so", int(self._service.engine.trouble() is None)),
        ):
            yield GaugeMetricFamily(f"rapid_llm_{name}", what, value)
        for name, what, value in (
            ("prefix_cache_hit_tokens", "Tokens of prompts that were in the cache", scheduler.hit_tokens),
            ("preemptions", "Sequences that gave up their cache to others", scheduler.preemptions),
            ("prefill_tokens", "Tokens that prefill steps computed", totals.prefill_tokens),
            ("decode_tokens", "Tokens that decode steps computed", totals.decode_tokens),
            ("step_failures", "Steps that failed", self._service.engine.step_failures),
            ("guessed_tokens", "Tokens of guesses", totals.guessed),
            ("accepted_tokens", "Tokens of guesses that were right", totals.accepted),
        ):
            yield CounterMetricFamily(f"rapid_llm_{name}", what, value)
        steps = CounterMetricFamily("rapid_llm_steps", "Steps, by phase", labels=["phase"])
        steps.add_metric(["prefill"], totals.prefill_steps)
        steps.add_metric(["decode"], totals.decode_steps)
        yield steps
        yield from self._rows()

    def _rows(self) -> Iterator[Metric]:
        chosen = GaugeMetricFamily(
            "rapid_llm_row", "Rows that the engine calls, by op: how many calls are bound to each", labels=["op", "row"]
        )
        counts: dict[tuple[str, str], int] = {}
        for _, op, handle in self._served.llm.bindings():
            key = (op, handle.spec.name)
            counts[key] = counts.get(key, 0) + 1
        for (op, row), count in sorted(counts.items()):
            chosen.add_metric([op, row], count)
        yield chosen
        falls = CounterMetricFamily(
            "rapid_llm_floor_falls", "Choices of a floor because a faster row is missing or broken", labels=["op"]
        )
        for what, count in trace.falls().items():
            falls.add_metric([what], count)
        yield falls

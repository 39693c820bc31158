"""A short version of `make soak`: every kind of client at once."""

from __future__ import annotations

import gc

from rapid_llm.engine.job import Job
from rapid_llm.server.async_engine import Ticket

from .conftest import mock_llm
from .live import live, until
from .load import Load, figures


def test_nothing_is_lost_or_left_behind() -> None:
    """E82, E83, E90. Catches: a request that never ends, pages or places that stay taken, an answer that changes, and
    a request that something still remembers.

    The pool is small, so that requests are preempted; places are few, so that some are put off.
    """
    llm = mock_llm(kv_cache_tokens=512, max_running=16, max_batch_tokens=64)
    with live(llm, max_concurrent_requests=40, max_body_bytes=100_000) as server:
        before = server.text("the same as ever", temperature=0, max_tokens=20)
        load = Load(server.port, longest=40, flood=5_000_000)
        load.run(clients=24, seconds=2.0)
        until(server.idle)
        server.engine.check()
        assert server.text("the same as ever", temperature=0, max_tokens=20) == before
        for kind in ("streams", "answers", "left", "refused", "embeddings"):
            assert load.counts[kind], load.counts
        found = figures(server.request("GET", "/metrics")[2].decode())
        assert found["rapid_llm_step_failures_total"] == 0
        assert found["rapid_llm_answers_open"] == found["rapid_llm_requests_running"] == 0
        assert found["rapid_llm_kv_cache_usage_ratio"] == 0
        assert found["rapid_llm_generation_tokens_total"] > 100
        assert found["rapid_llm_time_to_first_token_seconds_count"] >= load.counts["streams"] + load.counts["answers"]
        assert not server.server.service.metrics._progress, "requests that ended are still counted"
        until(lambda: not alive(Job) and not alive(Ticket))


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(thing) is kind for thing in gc.get_objects())

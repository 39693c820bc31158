"""A whole offline run on a real GPU."""

from __future__ import annotations

import pytest

from rapid_llm.perf.arms import OURS
from rapid_llm.perf.cases import make_cases
from rapid_llm.perf.run import Request, run_offline

pytestmark = pytest.mark.gpu


def test_a_small_shape_stays_below_its_limits() -> None:
    """Catches: a window that does not wait for the device, graphs that are not counted, bytes that are not moved, a
    cache of the cases that does not fit beside the weights."""
    cases = make_cases(prefills=(512,), batches=(1, 16), contexts=(512,), tokens=32)
    request = Request(
        "qwen3-0.6b", None, {"device": "cuda", "dtype": "bfloat16"}, cases, rounds=5, force_busy=True, profile=True
    )
    outcome = run_offline(request)
    assert outcome.measured == 3, [result.failure for result in outcome.results]
    for result, record in zip(outcome.results, outcome.record["cases"], strict=True):
        arm = record["arms"][OURS]
        assert 0 < arm["share_of_roofline"] < 1.05
        assert arm["share_of_nominal_bandwidth"] < 1
        if result.case.kind == "decode":
            steps = record["graphs"]["graph_steps"] + sum(record["graphs"]["eager_steps"].values())
            assert steps >= 5 * 32
    assert outcome.record["engine"]["rows"]
    assert outcome.record["busy"]["device_percent"] != [None]

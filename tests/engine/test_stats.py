"""`LLM.stats` and `LLM.explain`: figures and reasons that come from what ran."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rapid_llm import LLM, SamplingParams
from rapid_llm.engine.stats import declared_work, measured_bandwidth
from rapid_llm.kernels import KernelSpec, dispatch, register
from rapid_llm.kernels.ops.block_formats import row_bytes
from rapid_llm.kernels.registry import evidence, registry

from .conftest import make_llm
from .mocks import MockConfig, MockDecoder, byte_tokenizer, random_logits

LIMIT = (10e9, "given")
NAP = 2e-3
"""Seconds of the tests' own clock."""
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Clock:
    """Time that passes by a microsecond a look, and in naps: no neighbour of these tests can lengthen a step."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 1e-6
        return self.at

    def nap(self, seconds: float) -> None:
        self.at += seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("clock", "core", "llm", "stats"):
        monkeypatch.setattr(f"rapid_llm.engine.{module}.now", CLOCK)


class WorkingDecoder(MockDecoder):
    """A mock that calls one op a step, of known bytes and at least known time, and can be observed."""

    def __init__(self) -> None:
        super().__init__(random_logits(), MockConfig(num_layers=1))
        self.input, self.weight = torch.ones(64, 256), torch.ones(256)
        self.handle = dispatch("rmsnorm", self.input, self.weight, backend="native")
        self.observer: Any = None
        self.observed_steps = 0

    def observe(self, observer: Any) -> None:
        self.observer = observer

    def forward(self, *args: Any) -> torch.Tensor:
        def slow(*arguments: Any) -> Any:
            CLOCK.nap(NAP)
            return self.handle.func(*arguments)

        if self.observer is not None:
            self.observed_steps += 1
            self.observer.call("rmsnorm", self.handle.spec.name, slow, (self.input, self.weight), {})
        return super().forward(*args)

    def bindings(self) -> list[tuple[str, str, Any]]:
        return [("1 token", "rmsnorm", self.handle), ("2-8 tokens", "rmsnorm", self.handle)]


def imaginary_linear(input: Any, weight: Any, bias: Any = None, out: Any = None, *, scheme: str = "unquantized") -> Any:
    """Target of a row that is never run."""


def imaginary_sample(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any, out: Any = None
) -> Any:
    """Target of a row that is never run."""


def working_llm() -> LLM:
    return LLM.from_parts(WorkingDecoder(), byte_tokenizer(), kv_cache_tokens=512, threads=1)  # type: ignore[arg-type]


def test_report_counts_what_ran() -> None:
    """Catches rates over observed steps, calls or bytes counted twice, shares that do not add up to one."""
    llm = working_llm()
    with llm.stats(every=5) as stats:
        llm.generate("hello", PARAMS)
    report = stats.report(read_bandwidth=LIMIT)
    prefill, decode = report.phases
    assert (prefill.tokens, prefill.steps) == (5, 1)
    assert (decode.steps, decode.tokens, decode.observed_steps) == (15, 15, 4)
    assert llm._decoder.observed_steps == 5
    assert decode.tokens_per_s == pytest.approx(decode.tokens / decode.seconds)
    assert decode.seconds / decode.steps < NAP  # the nap is in observed steps alone
    rms = next(f for f in report.ops if f.op == "rmsnorm" and f.phase == "decode")
    assert (rms.row, rms.calls) == ("native/rmsnorm", 4)
    assert rms.seconds >= 4 * NAP
    moved = 4 * (2 * 64 * 256 + 256) * 4
    assert rms.gb_per_s == pytest.approx(moved / rms.seconds / 1e9)
    assert rms.bandwidth_share == pytest.approx(moved / rms.seconds / LIMIT[0])
    for phase in ("prefill", "decode"):
        ops = [f for f in report.ops if f.phase == phase]
        assert {f.op for f in ops} == {"rmsnorm", "sample", "engine"}
        assert sum(f.share for f in ops) == pytest.approx(1.0)
        assert ops[0].op == "rmsnorm"


def test_report_prints_and_serialises() -> None:
    """Catches a report that only one of its two readers can use."""
    llm = working_llm()
    with llm.stats() as stats:
        llm.generate("hello", PARAMS)
    report = stats.report(read_bandwidth=LIMIT)
    text = str(report)
    assert "native/rmsnorm" in text
    assert "tok/s" in text
    assert "10.0 GB/s (given)" in text
    assert json.loads(json.dumps(report.json()))["phases"][1]["phase"] == "decode"


def test_nothing_is_watched_outside_the_block() -> None:
    """Catches an observer that stays behind, in the decoder or in the sampler, also after an error."""
    llm = working_llm()
    for error in (None, ZeroDivisionError):
        try:
            with llm.stats(every=1):
                llm.generate("hello", PARAMS)
                if error is not None:
                    raise error
        except ZeroDivisionError:
            pass
        assert llm._decoder.observer is None
        assert llm._sampler._observer is None
        assert llm._engine.step_hook is None
    with llm.stats(), pytest.raises(RuntimeError, match="already"), llm.stats():
        pass
    with pytest.raises(ValueError, match="every=0"):
        llm.stats(every=0)


def test_observing_changes_no_result() -> None:
    """Catches an observer that calls an op twice or drops its result."""
    want = working_llm().generate("hello", PARAMS)[0].outputs[0].token_ids
    llm = working_llm()
    with llm.stats(every=1) as stats:
        assert llm.generate("hello", PARAMS)[0].outputs[0].token_ids == want
    report = stats.report(read_bandwidth=LIMIT)
    assert report.phases[1].observed_only
    assert "which slows it" in str(report)


def test_the_cost_of_watching_is_no_ones(monkeypatch: Any) -> None:
    """Catches the observer's own time in the engine's share, or in an op's."""

    def slow_work(*args: Any) -> Any:
        CLOCK.nap(10 * NAP)
        return declared_work(*args)

    monkeypatch.setattr("rapid_llm.engine.stats.declared_work", slow_work)
    llm = working_llm()
    with llm.stats(every=1) as stats:
        llm.generate("hello", PARAMS)
    ops = [f for f in stats.report(read_bandwidth=LIMIT).ops if f.phase == "decode"]
    assert sum(f.seconds for f in ops) < ops[0].calls * 10 * NAP


def test_a_block_without_steps_reports_nothing() -> None:
    """Catches a division by zero."""
    with working_llm().stats() as stats:
        pass
    report = stats.report(read_bandwidth=LIMIT)
    assert (report.phases, report.ops) == ((), ())
    assert str(report)


@pytest.fixture
def packing_row() -> Any:
    """A row of `linear` that reads a form of its own."""
    spec = KernelSpec(
        name="imaginary/linear.packed",
        op="linear",
        backend="imaginary",
        target="tests.engine.test_stats:imaginary_linear",
        available="imaginary_library:available",
        schemes=("q4_1",),
        prepack="imaginary_library:pack",  # never called: only that it is there counts
    )
    register(spec)
    yield spec
    registry.unregister(spec.name)


def test_packed_weights_count_as_the_file_stores_them(packing_row: Any) -> None:
    """Catches bytes taken from a packed copy, which would make the larger form look faster."""
    x = torch.ones(3, 64)
    wide = torch.ones(128, 64)  # what the row made of 40 bytes a row
    work = declared_work("linear", packing_row.name, (x,), {"weight": wide, "scheme": "q4_1"}, torch.ones(3, 128))
    assert work.read_bytes == x.nbytes + 128 * row_bytes(64, "q4_1")
    assert work.flops == 2 * 3 * 64 * 128


def test_measured_bandwidth_is_physical() -> None:
    """Catches a unit slip."""
    found, by = measured_bandwidth(torch.device("cpu"))
    assert 1e9 < found < 2e12
    assert "thread" in by


def test_explain_says_what_runs_and_why() -> None:
    """Catches a report that leaves out an op, the settings in force, or the memory."""
    llm = make_llm(random_logits(), deterministic=True, kv_cache_tokens=160)
    report = llm.explain()
    assert report.settings["cache"].startswith("160 tokens")
    assert report.settings["deterministic"] is True
    assert report.settings["threads"] == 1
    assert report.memory["kv_cache"] == 160 * 2 * 2 * 4
    assert [b.op for b in report.bindings] == ["sample"]
    data = json.loads(json.dumps(report.json()))
    assert data["ops"][0]["row"] == "native/sample"
    assert data["ops"][0]["explanation"]["op"] == "sample"
    text = str(working_llm().explain())
    assert "every size" in text
    assert "native/rmsnorm" in text
    assert "the floor of its op" in text


@pytest.fixture
def absent_row() -> Any:
    """A faster row of `sample` whose library is not installed."""
    spec = KernelSpec(
        name="imaginary/sample",
        op="sample",
        backend="imaginary",
        target="tests.engine.test_stats:imaginary_sample",
        available="imaginary_library:available",
        priority=50,
    )
    register(spec)
    evidence.record(spec.name, "cpu", "fp32", cases=1, worst_ulp=0.0, worst_ratio=0.0)
    yield spec
    evidence.forget(spec.name)
    registry.unregister(spec.name)


def test_a_missing_row_is_explained_and_warned_of_once(absent_row: Any, caplog: Any) -> None:
    """E94. Catches a slow path that is taken in silence, and a warning for every engine or every step."""
    llms = [make_llm(random_logits()) for _ in range(2)]
    for llm in llms:
        llm.generate("hello", PARAMS)
        text = str(llm.explain())
        assert "native/sample" in text
        assert "imaginary/sample" in text
        assert "imaginary_library" in text
    assert sum("imaginary/sample" in record.getMessage() for record in caplog.records) == 1

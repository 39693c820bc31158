"""Warm-up: it covers what an engine will launch, touches nobody's memory, and leaves nothing to compile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams, kernels
from rapid_llm.engine import warmup
from rapid_llm.kernels.ops import triton_support
from rapid_llm.models import decoder
from tests.kernels import triton_standin

from .test_gpu import PROMPTS, engine, ids

needs_triton = pytest.mark.skipif(
    bool(triton_support.MISSING_REASON) or triton_support.INTERPRETED, reason="needs Triton, not its interpreter"
)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine on the CPU whose rows are the floor's, so that they ask for Triton where launches are recorded."""
    monkeypatch.setenv("RAPID_LLM_FORCE_BACKEND", "native")
    return engine("cpu", threads=1)


def steps(llm: LLM, most: int, requests: int) -> list[tuple[str, Callable[[], Any]]]:
    return list(warmup.steps(llm._decoder, llm._kv, llm._sampler, max_tokens=most, max_sequences=requests))


@pytest.mark.parametrize("most", [1, 2, 33, 34, 8192])
def test_sizes_have_both_ends_and_every_kind_between(most: int) -> None:
    """Catches: a largest step that is never made, or a size beyond it; no size on either side of a power of two."""
    sizes = warmup.step_sizes(most)
    assert (sizes[0], sizes[-1]) == (1, most)
    assert sizes == sorted(set(sizes))
    power = 1
    while power < most:
        assert {power, power + 1} <= set(sizes)
        power *= 2
    assert len(sizes) < 100


def test_steps_touch_the_null_page_alone(native: LLM) -> None:
    """Catches: a rehearsal that overwrites the keys of a request that is being served."""
    for k_cache, v_cache in native._kv:
        k_cache[1:], v_cache[1:] = 7.0, 7.0
    for _, step in steps(native, 40, 5):
        step()
    for k_cache, v_cache in native._kv:
        assert bool((k_cache[1:] == 7.0).all())
        assert bool((v_cache[1:] == 7.0).all())
        assert bool(k_cache[0, 0].any())


@needs_triton
def test_no_size_of_step_is_left_to_compile(native: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """P66: a size of step whose kernels the warm-up did not think of, and which then compiles while serving."""
    compiled = triton_standin.install(monkeypatch)

    def warm(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=grid, **meta)

    triton_support.record_launches(warm)
    try:
        for _, step in steps(native, 700, 48):
            step()
        done = len(compiled)
        assert done > 20
        draw = random.Random(0)
        for _ in range(60):
            sequences = draw.randint(1, 48)
            tokens = draw.randint(sequences, 700)
            warmup._step(native._decoder, native._kv, None, tokens, sequences)
            warmup._step(native._decoder, native._kv, native._sampler, sequences, sequences)
    finally:
        triton_support.record_launches(None)
    assert compiled[done:] == []


def test_an_engine_on_a_cpu_prepares_its_rows_and_rehearses_nothing(native: LLM) -> None:
    """Catches: an LLM.prepare() that leaves an op out, or that computes steps where nothing compiles for them."""
    assert list(native.rehearsals()) == []
    report = native.prepare()
    assert report.ok
    assert {key.op for key in report.keys} == {op for _, op, _ in native.bindings()}
    assert {key.row for key in report.keys} == {handle.spec.name for _, _, handle in native.bindings()}


def test_a_model_prepares_what_it_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: keys that differ from those of binding, whose rows are then built one after another all the same."""
    keys: list[dict[str, Any]] = []
    monkeypatch.setattr(decoder, "prepare", keys.extend)
    bound = [handle.decision for _, _, handle in engine("cpu", threads=1)._decoder.bindings()]
    prepared = [kernels.dispatch(**key).decision for key in keys]
    assert len(prepared) == len(bound)
    assert all(decision in prepared for decision in bound)
    assert all(decision in bound for decision in prepared)


@pytest.mark.gpu
def test_after_prepare_and_freeze_serving_compiles_nothing() -> None:
    """P66: a compile while serving, over prompts and batches of every size; tokens that differ for it."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [*PROMPTS, *([5] * size for size in range(1, 130, 7))]
    options = {"max_batch_tokens": 300, "max_running": 24}
    llm = engine("cuda:0", "bfloat16", **options)
    report = llm.prepare()
    print(report)
    assert report.ok
    assert report.notes == ()
    kernels.freeze()
    try:
        before, falls = kernels.compiles(), kernels.registry.trace.falls()
        for count in (1, 2, 3, 7, 16, len(prompts)):
            llm.generate(prompts[:count], params)
        tokens = ids(llm, params)
        assert kernels.compiles() == before
        assert kernels.registry.trace.falls() == falls
    finally:
        kernels.thaw()
    assert tokens == ids(engine("cuda:0", "bfloat16", **options), params)

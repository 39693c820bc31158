"""This engine as an arm, on a tiny model: what a round does, and that it says when it was not what it should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rapid_llm.perf.arms import EngineArm, InterruptedCaseError
from rapid_llm.perf.cases import Case
from rapid_llm.perf.engine import Built, TooLargeError, build
from rapid_llm.perf.offline import prompts_of

from .support import TINY

OPTIONS = {"device": "cpu", "dtype": "float32"}
CASES = (Case("prefill", 1, 40), Case("decode", 3, 37, 5))


@pytest.fixture(scope="module")
def built() -> Built:
    return build(TINY, None, {**OPTIONS, "threads": 1}, CASES)


def steps(built: Built, arm: EngineArm, case: Case, number: int) -> list[tuple[int, bool]]:
    """(tokens of the batch, whether they decode) of every step of a round."""
    seen: list[tuple[int, bool]] = []

    def hook(chunks: Any, compute: Any) -> None:
        figures = compute()
        seen.append((figures.tokens, figures.decode))

    engine = built.llm._engine
    engine.step_hook = hook
    try:
        assert arm.run(case, prompts_of(case, 320, 0, number), number) > 0
    finally:
        engine.step_hook = None
    return seen


def test_a_decode_round_is_whole_steps_of_the_whole_batch(built: Built) -> None:
    """Catches: prompts computed inside the window, sequences that join or leave while it runs, a step too few."""
    arm = EngineArm(built.llm)
    arm.ready(CASES[1], prompts_of(CASES[1], 320, 0, -1))
    for number in range(3):
        first, *window = steps(built, arm, CASES[1], number)
        assert first == (3 * (37 % 16), False)
        assert window == [(3, True)] * 5


def test_a_prefill_round_computes_the_whole_prompt(built: Built) -> None:
    """Catches: a prompt of an earlier round found in the cache."""
    arm = EngineArm(built.llm)
    arm.ready(CASES[0], prompts_of(CASES[0], 320, 0, -1))
    for number in range(3):
        assert steps(built, arm, CASES[0], number) == [(40, False)]


class Said:
    """An engine that answers with given times."""

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    def generate(self, prompts: Any, params: Any, cache_salt: str) -> Any:
        return self.outputs


def said(first: float = 1.0, last: float = 2.0, tokens: int = 6, reason: str = "length", preemptions: int = 0) -> Any:
    metrics = SimpleNamespace(arrival=0.5, first_token=first, finished=last, preemptions=preemptions)
    return SimpleNamespace(
        metrics=metrics, outputs=[SimpleNamespace(finish_reason=reason, stop_reason=None, token_ids=[0] * tokens)]
    )


def test_the_window_is_from_the_first_token_to_the_last() -> None:
    """Catches: a window that opens with the request, or closes with the first sequence that ends."""
    assert EngineArm(Said(said(last=3.0), said(last=3.5))).run(CASES[1], [[1]], 0) == 2.5
    assert EngineArm(Said(said(first=2.0, tokens=1))).run(CASES[0], [[1]], 0) == 1.5


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([said(tokens=4, reason="stop")], "4 of 6 tokens, by stop"),
        ([said(preemptions=1)], "computed twice"),
        ([said(first=1.0), said(first=1.25)], r"0\.250 s apart"),
    ],
)
def test_a_round_that_was_no_whole_batch_is_refused(outputs: list[Any], says: str) -> None:
    """Catches: tokens counted that were not made, prompts computed within the window, smaller batches at its ends."""
    with pytest.raises(InterruptedCaseError, match=says):
        EngineArm(Said(*outputs)).run(CASES[1], [[1]], 0)


def test_the_engine_is_made_for_its_cases(built: Built) -> None:
    """Catches: a batch that waits for room, a cache that forgets prompts, bytes a token that are not the cache's."""
    assert built.llm.options.max_running == 3
    assert built.llm.kv_cache_tokens >= CASES[1].cache_tokens
    assert built.needs.kv_bytes == 2 * 2 * 2 * 16 * 4
    assert built.needs.row_bytes == 64 * 4
    many = build(TINY, None, {**OPTIONS, "threads": 1}, [Case("decode", 40, 2, 2)])
    assert many.llm.options.max_batch_tokens == 640


def test_what_does_not_fit_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a run that ends where one of its cases is too large, and one that quotes a smaller case in its place."""
    small, large = Case("decode", 1, 16, 4), Case("decode", 64, 200, 4)
    made = build(TINY, None, {**OPTIONS, "threads": 1, "kv_cache_tokens": 128}, [small, large])
    assert list(made.left_out) == [large]
    assert "of key/value cache" in made.left_out[large]
    with pytest.raises(TooLargeError, match="decode, batch 64, context 200 needs"):
        build(TINY, None, {**OPTIONS, "kv_cache_tokens": 128}, [large])
    with pytest.raises(ValueError, match="300 tokens: a sequence has 301 tokens at its end, and the context is 256"):
        build(TINY, None, OPTIONS, [Case("prefill", 1, 300)])
    monkeypatch.setattr("rapid_llm.engine.kv_memory.free_memory", lambda device: 1000)
    with pytest.raises(TooLargeError, match="tiny: the weights take"):
        build(TINY, None, OPTIONS, [small])

"""The engine with the default model: the reference's ids, and independence from batching, chunking and preemption.

One compute thread, so that a busy machine slows the suite without stalling it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rapid_llm import LLM, SamplingParams

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())["cases"]
PROMPTS = [
    "Hi",
    "The sky is",
    "Once upon a time there was a",
    "1, 2, 3, 4,",
    "def add(a, b):\n    return",
    "Water boils at a temperature of one hundred degrees. Ice melts at",
    "Q: What colour is grass?\nA:",
    "A list of five fruits, in alphabetical order, with a short description of each of them:\n\n- Apple",
]
LENGTH = 10
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(model_path, dtype="float32", device="cpu", threads=1, kv_cache_tokens=8192)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Each prompt's ids when nothing else runs."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def around(llm: LLM, **options: Any) -> LLM:
    """Another engine around the same weights."""
    return LLM.from_parts(llm._decoder, llm.tokenizer, threads=1, **options)


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_reference_ids_and_logprobs(llm: LLM, name: str) -> None:
    """Catches any fault of the model, the cache or the sampler that moves a token, or a logprob by 1e-3."""
    case = REFERENCE[name]
    params = SamplingParams(temperature=0, max_tokens=len(case["greedy_token_ids"]), ignore_eos=True, logprobs=5)
    (output,) = llm.generate([case["prompt_token_ids"]], params)
    assert output.outputs[0].token_ids == case["greedy_token_ids"]
    for found, wanted in zip(output.outputs[0].logprobs, case["top5_logprobs_first3"], strict=False):
        assert list(found) == [token for token, _ in wanted]
        for token, logprob in wanted:
            assert found[token].logprob == pytest.approx(logprob, abs=1e-3)


def test_reference_ends_at_eos_and_text_is_the_references(llm: LLM) -> None:
    """Catches end ids that are not the model's, and a prompt of text that gets other ids than the reference's."""
    case = REFERENCE["plain"]
    deltas = list(llm.stream(case["prompt_text"], SamplingParams(temperature=0, max_tokens=40)))
    assert [token for delta in deltas for token in delta.token_ids] == case["generate_api_ids"]
    assert deltas[-1].finish_reason == "stop"
    assert "".join(deltas) == case["greedy_text"].split("<|im_end|>")[0]


def test_a_batch_of_eight_gives_each_prompt_its_own_ids(llm: LLM, alone: list[list[int]]) -> None:
    """Catches rows that read a neighbour's keys, positions or length."""
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == alone


@pytest.mark.parametrize("chunk", [3, 16])
def test_chunked_prefill_changes_nothing(llm: LLM, alone: list[list[int]], chunk: int) -> None:
    """E75. Catches positions or masks that start anew with each chunk, and steps that mix chunks with decodes."""
    chunked = around(llm, max_batch_tokens=chunk, max_running=3, kv_cache_tokens=1024)
    assert ids_of(chunked.generate(PROMPTS[4:], GREEDY)) == alone[4:]


def test_preemption_changes_nothing(llm: LLM, alone: list[list[int]]) -> None:
    """Catches a resumed request that attends to pages of another."""
    tight = around(llm, kv_cache_tokens=48)
    outputs = tight.generate(PROMPTS, GREEDY)
    assert ids_of(outputs) == alone
    assert sum(output.metrics.preemptions for output in outputs) > 0


def test_stream_joins_to_generate_in_chat(llm: LLM) -> None:
    """Catches a stream whose text is not the text, on the path that the chat command takes."""
    messages = [{"role": "user", "content": "Say hello in French."}]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    (output,) = llm.chat(messages, params)
    assert "".join(llm.stream_chat(messages, params)) == output.outputs[0].text
    assert output.outputs[0].text


def test_stats_of_the_real_model(llm: LLM) -> None:
    """Catches an op that is not observed, and work formulas that do not take what the decoder passes."""
    with llm.stats(every=4) as stats:
        llm.generate(PROMPTS[1], GREEDY)
    report = stats.report(read_bandwidth=(40e9, "given"))
    ops = {f.op for f in report.ops if f.phase == "decode"}
    assert ops == {
        *("embedding", "rmsnorm", "fused_add_rmsnorm", "linear", "rope_kvcache_write", "attention.decode"),
        *("silu_and_mul", "sample", "engine"),
    }
    moved = sum(f.gb_per_s * 1e9 * f.seconds for f in report.ops if f.op == "linear" and f.phase == "decode")
    steps = report.phases[1].observed_steps
    assert moved / steps == pytest.approx(96.6e6, rel=0.02)  # the weights that a token reads


def test_explain_covers_every_op_that_runs(llm: LLM) -> None:
    """Catches an op whose row is chosen but not told."""
    report = llm.explain()
    with llm.stats(every=1) as stats:
        llm.generate(PROMPTS[1], GREEDY)
    ran = {(f.op, f.row) for f in stats.report(read_bandwidth=(40e9, "given")).ops if f.row}
    assert ran <= {(b.op, b.row) for b in report.bindings}
    assert report.memory["weights_quantized"] > 90e6

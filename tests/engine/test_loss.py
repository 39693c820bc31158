"""The default model's mean loss on a text, through the whole engine, against what transformers finds in float32.

`python -m benchmarks.loss` compares over the whole text, for every dtype and quantisation; this is the short version.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rapid_llm import LLM, SamplingParams

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_loss.json").read_text())
TOKENS = 160


@pytest.mark.parametrize(("dtype", "bound", "each"), [("float32", 1e-4, 1e-3), ("auto", 2e-3, 0.5)])
def test_mean_loss(model_path: Path, dtype: str, bound: float, each: float) -> None:
    """Catches any fault of the weights or the computation that moves the mean loss by 1e-4 in fp32; for auto, whose
    rounding of weights to bf16 moved it by 6e-4 when measured, by 2e-3. each: nats of a single token."""
    text = (Path(__file__).parents[1] / "data" / "loss_text.txt").read_text()
    llm = LLM(model_path, dtype=dtype, device="cpu", threads=1, max_model_len=TOKENS + 1, kv_cache_tokens=256)
    ids = REFERENCE["token_ids"][:TOKENS]
    assert llm.tokenizer.encode(text)[:TOKENS] == ids
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    found = [-row[token].logprob for token, row in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    wanted = REFERENCE["losses"][: TOKENS - 1]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < each
    assert abs(sum(found) - sum(wanted)) / len(found) < bound

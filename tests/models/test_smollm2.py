"""The default model in float32 against recorded ids and log-probabilities of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.weights import load_weights
from tests.models.paged import PagedRunner, greedy

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text())["cases"]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(path: Path, device: torch.device, dtype: str) -> Decoder:
    file = GGUFFile(path)
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=device, dtype=activation_dtype(dtype, device))
    return Decoder(config, weights, device=device, dtype=dtype)


@pytest.fixture(scope="module", params=DEVICES)
def decoder(model_path: Path, request: pytest.FixtureRequest) -> Decoder:
    return build(model_path, torch.device(request.param), "float32")


@pytest.mark.parametrize("case", sorted(REFERENCE))
def test_greedy_ids_and_logprobs_equal_the_reference(decoder: Decoder, case: str) -> None:
    """Catches any error of loading or computing on the real model: 32 ids exactly, first logprobs to 1e-3."""
    want = REFERENCE[case]
    ids, logprobs = greedy(decoder, want["prompt_token_ids"], len(want["greedy_token_ids"]))
    assert ids == want["greedy_token_ids"]
    for row, top in zip(logprobs, want["top5_logprobs_first3"], strict=False):
        for token, value in top:
            assert abs(row[token].item() - value) < 1e-3


def test_prefill_and_decode_agree_across_every_range(decoder: Decoder) -> None:
    """Catches a row of one range that differs from the others' on the real shapes (576 is no power of two)."""
    case = REFERENCE["chat"]
    ids = case["prompt_token_ids"] + case["greedy_token_ids"]
    whole = PagedRunner(decoder, 1, len(ids)).logits([(0, ids)])
    runner = PagedRunner(decoder, 1, len(ids))
    start, rows = 0, []
    for size in (33, 20, 8, 2, 1, 1, 1, 1):
        rows.append(runner.logits([(0, ids[start : start + size])]))
        start += size
    got = torch.cat(rows)
    assert (got - whole[: len(got)]).abs().max() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_auto_stays_near_the_reference(model_path: Path, device: str) -> None:
    """Catches a fast row that is wrong on the real shapes: bf16 activations move these logprobs by 0.17, wrong rows by
    far more; on a CPU, where only weights may be rounded, by less."""
    fast = build(model_path, torch.device(device), "auto")
    for want in REFERENCE.values():
        ids, logprobs = greedy(fast, want["prompt_token_ids"], 3)
        assert ids == want["greedy_token_ids"][:3]
        for row, top in zip(logprobs, want["top5_logprobs_first3"], strict=True):
            worst = max(abs(row[token].item() - value) for token, value in top)
            assert worst < (0.1 if device == "cpu" else 0.4)

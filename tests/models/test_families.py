"""Every family against transformers, which writes the checkpoint and computes its logits in float64.

The bound. Two float32 evaluations of one function in different orders err alike, by what the model's condition makes of
their roundings; so transformers' own float32, measured against its float64 on the same ids, gives the size, and `SLACK`
covers the spread of one such error about another. transformers' frequencies are float32 even in float64: what that may
move is measured too, by running it once more with every frequency off by `ANGLE`, four times their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import hf_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SLACK, ANGLE = 8.0, 2**-22
PROMPT, LENGTH = 19, 40
"""Longer than every window, both before and after the first decode step."""


@dataclass(frozen=True)
class Truth:
    """A model, some ids, their logits in float64, and how far ours may be from those."""

    made: hf_tiny.Made
    ids: list[int]
    logits: torch.Tensor
    bound: float


def turned(made: hf_tiny.Made, ids: list[int]) -> torch.Tensor:
    """The logits with frequencies off by `ANGLE`."""
    buffers = [b for name, b in made.model.named_buffers() if name.endswith("inv_freq")]
    assert buffers
    kept = [b.clone() for b in buffers]
    for buffer in buffers:
        buffer.mul_(1 + ANGLE)
    try:
        return made.logits(ids)
    finally:
        for buffer, old in zip(buffers, kept, strict=True):
            buffer.copy_(old)


def truth_of(made: hf_tiny.Made, ids: list[int]) -> Truth:
    logits = made.logits(ids)
    own = (made.logits(ids, torch.float32) - logits).abs().max().item()
    return Truth(made, ids, logits, SLACK * own + (turned(made, ids) - logits).abs().max().item())


@pytest.fixture(scope="module", params=list(hf_tiny.FAMILIES))
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return truth_of(hf_tiny.make(tmp_path_factory.mktemp(request.param), request.param), hf_tiny.random_ids(LENGTH))


def test_prefill_and_decode_equal_transformers(truth: Truth) -> None:
    """Catches a flag, name or constant of a family misread: logits beyond the module's bound, which itself is far below
    what any of these would change (the next test)."""
    assert truth.bound < 2e-4 * truth.logits.abs().max()
    got = hf_tiny.stepwise(hf_tiny.decoder(truth.made, max_model_len=64), truth.ids, PROMPT)
    assert (got - truth.logits).abs().max() <= truth.bound


def variations(stated: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a config.json states, taken away or moved by a little."""
    if stated.get("sliding_window"):
        yield {"sliding_window": stated["sliding_window"] + 1}
    if "full_attention" in stated.get("layer_types", ()):
        yield {"layer_types": stated["layer_types"][::-1]}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if stated.get(key):
            yield {key: None}
    if "query_pre_attn_scalar" in stated:
        yield {"query_pre_attn_scalar": stated["query_pre_attn_scalar"] + 1}
    if "norm_topk_prob" in stated:
        yield {"norm_topk_prob": not stated["norm_topk_prob"]}
    if "num_experts_per_tok" in stated:
        yield {"num_experts_per_tok": 1}
    yield {"rms_norm_eps": 1e-2}
    rope = stated["rope_parameters"]
    if "sliding_attention" in rope:
        yield {"rope_parameters": {**rope, "sliding_attention": rope["full_attention"]}}
    if rope.get("rope_type") == "longrope":
        yield {"rope_parameters": {**rope, "attention_factor": 1.0}}


def test_each_flag_matters(truth: Truth) -> None:
    """Catches a vacuous comparison: by transformers alone, every variation of the configuration, with the same weights,
    breaks the bound tenfold."""
    for change in variations(truth.made.stated):
        other = hf_tiny.Made(hf_tiny.varied(truth.made, **change), truth.made.folder)
        assert (other.logits(truth.ids) - truth.logits).abs().max() > 10 * truth.bound, change


@pytest.mark.parametrize("length", [40, 100])
def test_longrope_takes_the_list_of_the_longest_sequence(tmp_path: Path, length: int) -> None:
    """Catches the short list for a long context, or the long for a short: transformers chooses by the sequence, we by
    what is to be served."""
    made = hf_tiny.make(tmp_path, "phi3", sliding_window=None)
    truth = truth_of(made, hf_tiny.random_ids(length, seed=1))
    got = hf_tiny.stepwise(hf_tiny.decoder(made, max_model_len=length), truth.ids, length - 3)
    assert (got - truth.logits).abs().max() <= truth.bound
    lists = {"short_factor": "long_factor", "long_factor": "short_factor"}
    rope = made.stated["rope_parameters"]
    swapped = hf_tiny.varied(made, rope_parameters={**rope, **{new: rope[old] for new, old in lists.items()}})
    assert (hf_tiny.Made(swapped, tmp_path).logits(truth.ids) - truth.logits).abs().max() > 10 * truth.bound


@pytest.mark.parametrize("stated", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_scaled_rotation_reaches_the_logits(tmp_path: Path, stated: dict[str, Any]) -> None:
    """Catches a scaling that is read and not applied, its magnitude too; dynamic beyond the trained context, at the
    length that it is for."""
    made = hf_tiny.make(tmp_path, "llama", max_position_embeddings=64, rope_parameters={**stated, "rope_theta": 1e4})
    truth = truth_of(made, hf_tiny.random_ids(80, seed=2))
    got = hf_tiny.stepwise(hf_tiny.decoder(made, max_model_len=80), truth.ids, 80)
    assert (got - truth.logits).abs().max() <= truth.bound
    plain = hf_tiny.Made(hf_tiny.varied(made, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), tmp_path)
    assert (plain.logits(truth.ids) - truth.logits).abs().max() > 10 * truth.bound

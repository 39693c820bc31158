"""Rotary scaling against formulas in numpy and against transformers, and refusal of what is not understood."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import MetadataError, ModelError, UnsupportedArchitectureError
from rapid_llm.models.rope import LongRope, Rope, Yarn, scaling
from rapid_llm.models.rotary_table import rotary_table

DIM, THETA, POSITIONS = 24, 10_000.0, 128
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + 0.5 * i for i in range(12)],
    "original_max_position_embeddings": 64,
}

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-whole-pairs": {**YARN, "truncate": True},
    "yarn-between-pairs": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-no-ramp": {**YARN, "original_max_position_embeddings": 4},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-mscale-alone": {**YARN, "mscale": 0.7},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.25},
    "yarn-all-three": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "attention_factor": 0.5},
    "longrope": LONG,
    "longrope-factor": {**LONG, "factor": 16.0},
    "longrope-attention-factor": {**LONG, "attention_factor": 1.1},
}


def made(case: str, theta: float = THETA) -> Rope:
    stated = {"rope_type": case.partition("-")[0], **CASES[case]}
    return Rope(theta, scaling(stated, max_positions=POSITIONS, where="config.json"))


def formula(case: str, length: int) -> tuple[np.ndarray, float]:
    """Frequencies and magnitude, written from the papers' and authors' definitions."""
    stated, kind = CASES[case], case.partition("-")[0]
    exponents = np.arange(DIM // 2) * 2 / DIM
    plain, s = THETA**-exponents, stated.get("factor", 1.0)
    if kind == "linear":
        return plain / s, 1.0
    if kind == "dynamic":
        grown = THETA * (s * max(length, POSITIONS) / POSITIONS - (s - 1)) ** (DIM / (DIM - 2))
        return grown**-exponents, 1.0
    if kind == "llama3":
        wave, context = 2 * np.pi / plain, stated["original_max_position_embeddings"]
        smooth = (context / wave - 1.0) / (4.0 - 1.0)
        blend = (1 - smooth) * plain / s + smooth * plain
        return np.where(wave > context / 1.0, plain / s, np.where(wave < context / 4.0, plain, blend)), 1.0
    if kind == "yarn":
        return _yarn(plain, stated)
    if kind == "longrope":
        context = stated["original_max_position_embeddings"]
        growth = stated.get("factor", POSITIONS / context)
        divisors = stated["long_factor"] if length > context else stated["short_factor"]
        return plain / divisors, stated.get("attention_factor", math.sqrt(1 + math.log(growth, context)))
    return plain, 1.0


def _yarn(plain: np.ndarray, stated: dict[str, Any]) -> tuple[np.ndarray, float]:
    """The pair that turns r times in L tokens is d / 2 * log_theta(L / 2 pi r)."""
    s, context = stated["factor"], stated["original_max_position_embeddings"]
    ends = [
        DIM / 2 * math.log(context / (2 * math.pi * stated.get(beta, default)), THETA)
        for beta, default in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if stated.get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], DIM - 1)
    ramp = np.clip((np.arange(DIM // 2) - low) / (high - low if high != low else 1e-3), 0, 1)
    weighted = [0.1 * m * math.log(s) + 1 for m in (stated.get("mscale") or 1, stated.get("mscale_all_dim") or 0)]
    size = weighted[0] / weighted[1] if "mscale_all_dim" in stated else 0.1 * math.log(s) + 1
    return plain / s * ramp + plain * (1 - ramp), stated.get("attention_factor", size)


@pytest.mark.parametrize("length", [40, POSITIONS, 300])
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_the_formulas(case: str, length: int) -> None:
    """E31. Catches a magnitude dropped (mscale, attention_factor), a list for the wrong length, angles taken in fp32:
    the table is the fp64 value rounded once, relatively by 2**-24, with a few ulps of fp64's angles beside."""
    frequencies, magnitude = formula(case, length)
    angles = np.arange(length)[:, None] * frequencies
    want = np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * magnitude
    got = rotary_table(made(case), DIM, length)
    assert got.shape == (length, DIM)
    assert (np.abs(got.double().numpy() - want) <= 2**-24 * np.abs(want) + magnitude * length * 2**-48).all()


@pytest.mark.parametrize("length", [None, 40, 300])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_those_of_transformers(case: str, length: int | None) -> None:
    """Catches a misreading shared by our code and our formula. transformers computes in fp32: a power (4 ulps), and a
    handful of roundings; the ramp's subtraction loses at most two bits more."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = case.partition("-")[0]
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **CASES[case]},
    )
    if kind == "default":
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    if kind == "longrope" and length is None:  # transformers then means the short list
        length = 1
    ours = made(case)
    frequencies = torch.tensor(ours.frequencies(DIM, length or POSITIONS), dtype=torch.float64)
    assert ((frequencies - theirs[0]).abs() <= 2**-19 * frequencies).all()
    assert abs(ours.scaling.magnitude - theirs[1]) <= 1e-12


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 4 * DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**CONFIG, **changes})


@pytest.mark.parametrize("case", [c for c in CASES if c != "default"])
def test_both_spellings_and_both_versions_say_the_same(case: str) -> None:
    """E29, E30. Catches `type` read and `rope_type` not, or a base that v5 states beside the scaling being lost."""
    kind = case.partition("-")[0]
    old = read(rope_theta=100_000.0, rope_scaling={"type": kind, **CASES[case]})
    assert old == read(rope_theta=100_000.0, rope_scaling={"rope_type": kind, **CASES[case]})
    assert old == read(rope_parameters={"rope_type": kind, "rope_theta": 100_000.0, **CASES[case]})
    assert old.rope == made(case, 100_000.0)


def test_the_base_is_read_wherever_it_stands() -> None:
    """E30. Catches the default base in the place of a stated one."""
    for stated in (
        {"rope_theta": 100_000},
        {"rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 100_000.0}},
        {"rope_parameters": {"rope_theta": 100_000.0, "rope_type": "default"}, "rope_theta": 5.0},
    ):
        assert read(**stated).rope == Rope(100_000.0)
    assert read().rope == Rope(10_000.0)


@pytest.mark.parametrize(
    ("stated", "error", "match"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, UnsupportedArchitectureError, "'spiral'.*yarn, longrope"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, MetadataError, "state one"),
        ({"rope_scaling": {"type": "linear"}}, MetadataError, "needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, MetadataError, "factor = -2.0"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, MetadataError, "factor = inf"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, MetadataError, "factor = True"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8}},
            UnsupportedArchitectureError,
            "beta_fast",
        ),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 4]}}, UnsupportedArchitectureError, "mrope_section"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, MetadataError, "low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, MetadataError, "not above 1.0"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, MetadataError, "truncate = 1"),
        ({"rope_scaling": {"type": "longrope", **LONG, "long_factor": [1.0]}}, MetadataError, "12 pairs"),
        ({"rope_scaling": {"type": "longrope", **LONG, "long_factor": None}}, MetadataError, "needs long_factor"),
        ({"rope_parameters": {"rope_theta": 0.5}}, MetadataError, "rope_theta 0.5"),
        ({"rope_parameters": {"rope_theta": "big"}}, MetadataError, "'big', not a float"),
        ({"rope_parameters": {"partial_rotary_factor": 0.3}}, MetadataError, "rotary_dim 7"),
        ({"rope_parameters": {"full_attention": {}, "factor": 2.0}}, UnsupportedArchitectureError, "full_attention"),
        (
            {"rope_parameters": {"factor": 2.0, "type": "linear"}, "rope_scaling": {"type": "yarn"}},
            MetadataError,
            "differ",
        ),
    ],
)
def test_what_is_not_understood_is_refused(stated: dict[str, Any], error: type[ModelError], match: str) -> None:
    """E29. Catches an unknown type run as the default, and a parameter passed over."""
    with pytest.raises(error, match=match):
        read(**stated)


def test_yarn_reaches_beyond_the_stated_context_and_finds_its_factor() -> None:
    """Catches a context cut to what the model was trained for before YaRN, and a factor that two contexts imply."""
    stated = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}
    assert read(rope_scaling=stated).max_model_len == 4 * POSITIONS
    implied = read(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": POSITIONS // 2}).rope.scaling
    assert implied == Yarn(2.0, POSITIONS // 2)


def test_layers_with_a_window_have_their_own_rotation() -> None:
    """Catches Gemma 3's local base lost, or the scaling of full layers applied to those with a window: in version 4's
    keys, in version 5's, and where neither is stated."""
    gemma: dict[str, Any] = {**CONFIG, "model_type": "gemma3_text", "head_dim": 24, "sliding_window_pattern": 2}
    old = ModelConfig.from_hf(
        {**gemma, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 3.0}}
    )
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    new = ModelConfig.from_hf({**gemma, "rope_parameters": nested})
    assert old == new
    assert (new.rope, new.local_rope) == (Rope(5e5, made("linear").scaling), Rope(2e4))
    silent = ModelConfig.from_hf(gemma)
    assert (silent.rope, silent.local_rope) == (Rope(1e6), Rope(1e4))


def test_phi3s_older_names_mean_longrope() -> None:
    """Catches Phi-3's 'su' and its first 'yarn', which hold LongRoPE's lists, and the original context beside them."""
    phi = {**CONFIG, "model_type": "phi3", "original_max_position_embeddings": 64}
    lists = {k: LONG[k] for k in ("short_factor", "long_factor")}
    found = {
        ModelConfig.from_hf({**phi, "rope_scaling": {"type": t, **lists}}).rope for t in ("su", "yarn", "longrope")
    }
    (rope,) = found
    assert isinstance(rope.scaling, LongRope)
    assert rope.scaling.original_max_position_embeddings == 64
    assert rope.scaling.magnitude == pytest.approx(math.sqrt(1 + math.log(2, 64)), rel=1e-12)

"""`ModelConfig` from GGUF metadata: every family that a row describes, and refusal of all else."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import MetadataError, ModelError, TensorSetError, UnsupportedArchitectureError
from rapid_llm.models.families import ARCHITECTURES
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.gguf_config import DEFAULT_ROPE_THETA
from rapid_llm.models.rope import UNSCALED, Linear, Yarn
from tests.models import tiny


def config_of(path: Path, shape: tiny.Shape | None = None, **kwargs: Any) -> ModelConfig:
    tiny.make(path / "m.gguf", shape, **kwargs)
    return ModelConfig.from_gguf(GGUFFile(path / "m.gguf"))


def test_every_field_is_read(tmp_path: Path) -> None:
    """Catches a field read from another's key."""
    entries = {"general.name": "Tiny", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eot_token_id": 5}
    entries |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ x }}"}
    config = config_of(tmp_path, tiny.Shape(theta=5e5, context=77), entries=entries)
    assert config == ModelConfig(
        architecture="llama",
        name="Tiny",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        vocab_size=96,
        num_tokens=96,
        max_model_len=77,
        rope_theta=5e5,
        rms_norm_eps=float(np.float32(1e-5)),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 5),
        add_bos=True,
        chat_template="{{ x }}",
    )
    assert (config.q_size, config.kv_size) == (64, 32)


def test_what_a_file_may_leave_out(tmp_path: Path) -> None:
    """Catches an optional key demanded, or defaulted to another value than the format's."""
    shape = tiny.Shape(tied=False)
    tiny.write(
        tmp_path / "m.gguf",
        "llama",
        {k: v for k, v in tiny.metadata(shape).items() if "freq_base" not in k and "head_count_kv" not in k},
        tiny.dense_weights(shape),
    )
    config = ModelConfig.from_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert (config.rope_theta, config.num_kv_heads) == (DEFAULT_ROPE_THETA, 4)
    assert (config.tie_word_embeddings, config.bos_token_id, config.chat_template) == (False, None, None)
    assert (config.name, config.add_bos) == ("m", False)


def test_heads_may_be_wider_than_hidden_by_count(tmp_path: Path) -> None:
    """Catches head_dim computed from the hidden size where the file states it."""
    config = config_of(tmp_path, tiny.qwen3())
    assert (config.head_dim, config.q_size, config.hidden_size) == (32, 128, 64)


def test_an_unknown_architecture_is_an_error_that_lists_the_known(tmp_path: Path) -> None:
    """Catches a family run as another: fluent text from a wrong model."""
    with pytest.raises(
        UnsupportedArchitectureError, match=r"m.gguf: architecture 'gemma' is not supported.*: llama, qwen2, qwen3"
    ):
        config_of(tmp_path, replace(tiny.Shape(), arch="gemma"))


@pytest.mark.parametrize(
    "entry",
    [
        {"llama.rope.scaling.type": "su"},
        {"llama.rope.scaling.attn_factor": 1.5},
        {"llama.rope.scaling.yarn_ext_factor": 0.5},
        {"llama.expert_gating_func": 2},
        {"llama.attn_logit_softcapping": 50.0},
        {"llama.attention.causal": False},
        {"llama.logit_scale": 0.5},
        {"llama.attention.sliding_window": 4096},
        {"llama.attention.value_length": 32},
    ],
)
def test_hyper_parameters_that_no_code_reads_are_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Catches a parameter that changes the model's function being ignored."""
    with pytest.raises(UnsupportedArchitectureError, match=r"m\.gguf") as caught:
        config_of(tmp_path, entries=entry)
    assert str(next(iter(entry.values()))) in str(caught.value)


def test_a_part_of_a_split_model_is_named_as_such(tmp_path: Path) -> None:
    """Catches a shard reported as a model that lost its layers."""
    with pytest.raises(TensorSetError, match=r"one of 3 parts.*--merge"):
        config_of(tmp_path, entries={"split.count": 3})


@pytest.mark.parametrize(
    "entry",
    [{"llama.rope.scaling.type": "none"}, {"llama.expert_count": 0}, {"general.anything": 1}, {"other.key": "x"}],
)
def test_harmless_entries_are_accepted(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Catches a refusal of what changes nothing."""
    assert config_of(tmp_path, entries=entry).num_layers == 2


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"llama.block_count": 0}, "num_layers is 0"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.attention.head_count": 5}, "not a multiple of its 5 heads"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3"),
        ({"llama.rope.dimension_count": 15}, "rotary_dim 15"),
        ({"llama.rope.dimension_count": 8}, "rotary_dim 8 of 16"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta 0.0"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta nan"),
        ({"llama.context_length": 0}, "max_model_len 0"),
        ({"llama.embedding_length": "wide"}, "'wide', not a int"),
        ({"llama.attention.head_count": [4, 4]}, r"\(4, 4\), not a int"),
        ({"tokenizer.ggml.eos_token_id": 96}, "96, outside the vocabulary of 96"),
        ({"llama.vocab_size": 97}, "96 rows for 96 tokens and llama.vocab_size 97"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(97)]}, "96 rows for 97 tokens"),
    ],
)
def test_contradictions_name_the_value(tmp_path: Path, entry: dict[str, Any], match: str) -> None:
    """Catches an impossible value that would surface later as a shape error or as wrong numbers."""
    with pytest.raises(ModelError, match=match):
        config_of(tmp_path, entries=entry)


def test_padded_vocabularies_keep_both_sizes(tmp_path: Path) -> None:
    """Catches padding rows of the table being taken for tokens."""
    entries = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(90)], "llama.vocab_size": 90}
    config = config_of(tmp_path, entries=entries)
    assert (config.vocab_size, config.num_tokens) == (96, 90)


def test_missing_keys_and_tables_are_named(tmp_path: Path) -> None:
    """Catches a KeyError instead of a fix."""
    path = tmp_path / "m.gguf"
    tiny.write(path, "llama", {}, tiny.dense_weights(tiny.Shape()))
    with pytest.raises(MetadataError, match=r"'llama.embedding_length' is missing"):
        ModelConfig.from_gguf(GGUFFile(path))
    with pytest.raises(TensorSetError, match=r"token_embd.weight"):
        config_of(tmp_path, drop=("token_embd.weight",))


def test_only_the_llama_converter_interleaves() -> None:
    """Catches E27 at its root: a new row that claims the interleaving of llama by copy and paste."""
    assert [name for name, row in ARCHITECTURES.items() if row.qk_permuted] == ["llama"]


def test_rotary_scaling_of_gguf(tmp_path: Path) -> None:
    """Catches a factor read under one of its names alone, and YaRN's magnitude or betas lost."""
    plain = config_of(tmp_path).rope_scaling
    assert plain == UNSCALED
    for entries in (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ):
        assert config_of(tmp_path, entries=entries).rope_scaling == Linear(4.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0}
    found = config_of(
        tmp_path, entries={f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
    ).rope_scaling
    assert found == Yarn(4.0, 32, beta_fast=16.0)
    yarn["yarn_attn_factor"] = 0.5
    found = config_of(
        tmp_path, entries={f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
    ).rope_scaling
    assert found.magnitude == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1), rel=1e-12)


@pytest.mark.parametrize("kept", ["long", "short"])
def test_one_of_longropes_lists_is_not_enough(tmp_path: Path, kept: str) -> None:
    """Catches a file that lost one list and is run as if it had none."""
    shape = replace(tiny.Shape(), arch="phi3")
    entries = {**tiny.metadata(shape), "phi3.rope.scaling.original_context_length": 64}
    tensors = {**tiny.dense_weights(shape), f"rope_factors_{kept}.weight": np.ones(8, np.float32)}
    tiny.write(tmp_path / "m.gguf", "phi3", entries, tensors)
    lost = {"long": "short", "short": "long"}[kept]
    with pytest.raises(TensorSetError, match=f"rope_factors_{lost}.weight' is missing"):
        ModelConfig.from_gguf(GGUFFile(tmp_path / "m.gguf"))


@pytest.mark.model
def test_the_default_model(model_path: Path) -> None:
    """Catches a drift of any number that the default model's file states."""
    config = ModelConfig.from_gguf(GGUFFile(model_path))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.max_model_len, config.vocab_size) == (100_000.0, 8192, 49_152)
    assert (config.bos_token_id, config.eos_token_ids, config.add_bos) == (1, (2,), False)
    assert config.tie_word_embeddings
    assert abs(config.rms_norm_eps - 1e-5) < 1e-11
    assert config.chat_template is not None

"""Engines without a file: random weights of a shape and a tokenizer that was never trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.random_llm import random_llm, synthetic_tokenizer
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import UnknownModelError
from rapid_llm.models.shapes import SHAPES, shape_config

TINY = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    name="tiny",
)


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "gemma-3-1b"])
def test_every_id_has_a_text_of_its_own_and_text_comes_back(name: str) -> None:
    """Catches: a special id taken for a byte (SmolLM2's are 1 and 2), ids that decode to nothing or to the same."""
    config = shape_config(name)
    tokenizer = synthetic_tokenizer(config)
    assert tokenizer.vocab_size == config.vocab_size
    assert len(set(tokenizer.tokens)) == config.vocab_size
    assert all(tokenizer.tokens)
    text = "a \n é\U0001f600\x00<|end|>"
    ids = tokenizer.encode(text, parse_special=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert not set(ids) & tokenizer.control
    assert tokenizer.end_ids == set(config.eos_token_ids)
    assert tokenizer.bos_id == config.bos_token_id


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    """Catches: a tokenizer that maps two bytes to one id."""
    with pytest.raises(ValueError, match=r"vocab_size=100.*260"):
        synthetic_tokenizer(replace(TINY, vocab_size=100))


def test_it_generates_and_chats_and_the_seed_decides() -> None:
    """Catches: weights that the options do not reach, an answer that depends on more than the seeds."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = []
    for seed in (0, 0, 1):
        llm = random_llm(TINY, weights_seed=seed, dtype="float32", device="cpu", kv_cache_tokens=256)
        answers.append(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
        assert len(answers[-1]) == 8
    assert answers[0] == answers[1] != answers[2]
    assert llm.chat([{"role": "user", "content": "hi"}], params)[0].outputs[0].text


def test_options_and_names_are_checked() -> None:
    """Catches: an option that is passed over, or a shape that is guessed."""
    with pytest.raises(UnknownModelError, match=r"did you mean 'qwen3-8b'"):
        random_llm("qwen3-8")
    with pytest.raises(TypeError, match="'kv_tokens'"):
        random_llm(TINY, kv_tokens=5)
    with pytest.raises(ValueError, match="load_format='pt'"):
        random_llm(TINY, load_format="pt")
    llm = random_llm(TINY, quantization="int8", device="cpu", kv_cache_tokens=64)
    assert any("int8_channel" in binding.what for binding in llm.explain().bindings)


def test_shapes_have_room_for_all_bytes() -> None:
    """Catches: a shape that a tokenizer cannot be made for."""
    assert min(shape_config(name).vocab_size for name in SHAPES) >= 260 + 2

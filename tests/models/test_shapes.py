"""Named shapes: that they are the published models', and that weights made for them can be computed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.errors import UnknownModelError
from rapid_llm.models.quant import dequantize
from rapid_llm.models.random_weights import STD, random_weights, weight_bytes
from rapid_llm.models.shapes import SHAPES, matrices, parameter_count, shape_config
from rapid_llm.models.weights import ModelWeights
from tests.models.paged import PagedRunner

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini-4k": 3_821_079_552,
}
"""Parameters as the models' own pages on the hub state them, from the headers of their files."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_the_published_model(name: str) -> None:
    """Catches: a wrong size, a head that is tied or not, a bias or norm too many, in a row of the table."""
    assert parameter_count(shape_config(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["lama-3.1-8b", "qwen9", ""])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    """Catches: a shape guessed from a name that is not in the table, or an error that does not help."""
    with pytest.raises(UnknownModelError, match=r"smollm2-135m") as caught:
        shape_config(name)
    assert repr(name) in str(caught.value)
    assert ("did you mean 'llama-3.1-8b'" in str(caught.value)) == name.startswith("lama")


def _tiny(name: str) -> ModelConfig:
    """The shape with few layers and narrow matrices; everything else, such as a head that is tied, is kept."""
    config = shape_config(name)
    return replace(
        config,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rotary_dim=32,
        vocab_size=300,
        num_tokens=300,
        max_model_len=8192,
        windows=config.windows[:2],
        num_experts=min(config.num_experts, 4),
        experts_per_token=min(config.experts_per_token, 2),
        expert_size=min(config.expert_size, 48),
        bos_token_id=None,
        eos_token_ids=(),
    )


ONE_OF_EACH = ("llama-3.2-1b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "mistral-7b", "mixtral-8x7b")


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "gemma-2-2b", "gemma-3-1b", "phi-3-mini-4k"])
def test_random_weights_are_whole_and_finite(name: str) -> None:
    """Catches: a matrix that is missing, of another shape, uninitialised, or so large that activations overflow."""
    config = _tiny(name)
    weights = random_weights(config, torch.device("cpu"), torch.float32, seed=3)
    held = {id(t): t for t in _tensors(weights)}
    assert sum(t.numel() for t in held.values()) == parameter_count(config)
    for tensor in held.values():
        if tensor.dim() == 1 and bool((tensor == 1).all()):
            continue  # a norm
        assert abs(float(tensor.mean())) < 8 * STD / tensor.numel() ** 0.5
        assert float(tensor.std()) == pytest.approx(STD, rel=0.25)
    assert weight_bytes(config, torch.float32) == sum(t.nbytes for t in held.values())
    decoder = Decoder(config, weights, device=torch.device("cpu"), dtype="float32")
    own = 0 if config.tie_word_embeddings else weights.embedding.nbytes
    assert sum(decoder.weight_bytes(1)) == weight_bytes(config, torch.float32) - own
    assert (decoder.weight_bytes(1)[1] > 0) == (config.num_experts > 0)
    logits = PagedRunner(decoder, 1, 16).logits([(0, list(range(16)))])
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0


def _tensors(weights: ModelWeights) -> Iterator[torch.Tensor]:
    yield from (weights.embedding.data, weights.head.data, weights.final_norm)
    for layer in weights.layers:
        yield from layer.norms().values()
        for weight, bias in layer.linears().values():
            yield weight.data
            if bias is not None:
                yield bias
        if layer.experts is not None:
            yield from (layer.experts.gate_up, layer.experts.down)


def test_the_seed_decides_the_weights() -> None:
    """Catches: weights that differ between two runs of one benchmark, or one seed for all."""
    config, cpu = _tiny("llama-3.1-8b"), torch.device("cpu")
    first, again, other = (random_weights(config, cpu, torch.bfloat16, seed).layers[1].o.data for seed in (0, 0, 1))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_quantised_weights_are_those_of_the_same_seed() -> None:
    """Catches: a quantization that is ignored, reaches the head, or changes what the numbers are."""
    config, cpu = _tiny("qwen3-8b"), torch.device("cpu")
    dense = random_weights(config, cpu, torch.float32, 5)
    quantised = random_weights(config, cpu, torch.float32, 5, quantization="int8")
    assert torch.equal(dense.head.data, quantised.head.data)
    weight = quantised.layers[0].qkv
    assert weight.scheme == "int8_channel"
    assert weight_bytes(config, torch.float32, quantization="int8") == sum(
        t.nbytes for t in {id(t): t for t in _tensors(quantised)}.values()
    )
    truth = dense.layers[0].qkv.data
    step = truth.abs().amax(1, keepdim=True) / 127
    assert bool(((dequantize(weight.data, weight.scheme) - truth).abs() <= step * 0.501).all())
    with pytest.raises(ValueError, match=r"'int3'.*int8"):
        random_weights(config, cpu, torch.float32, quantization="int3")


def test_matrices_count_the_experts_of_each_layer() -> None:
    """Catches: experts counted once a layer, or in layers that have none."""
    config = replace(_tiny("qwen3-30b-a3b"), dense_layers=(0,))
    found = {name: (count, rows, columns) for name, count, rows, columns in matrices(config)}
    assert found["experts.gate_up"] == (4, 96, 64)
    assert found["gate_up"] == (1, 192, 64)
    assert found["router"] == (1, 4, 64)

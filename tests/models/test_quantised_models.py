"""Whole models with quantised weights against transformers, which computes in float64 with the weights that they mean.

Each checkpoint is written here word by word (the packers of `test_checkpoints`); transformers gets the dense weights.
The bound of the logits is that of `test_families`: transformers' own float32 against its float64, with room.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.errors import TensorSetError, UnsupportedQuantizationError
from rapid_llm.models.opening import open_source
from rapid_llm.models.quant import dequantize
from rapid_llm.models.weights import ModelWeights, load_weights
from tests.models import hf_tiny
from tests.models.test_checkpoints import AWQ, GPTQ, words
from tests.models.test_families import truth_of

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 128}
Packed = tuple[dict[str, Tensor], np.ndarray]


def _four_bits(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, zero points and fp16 scales of a matrix in groups of 32; some zero points are high, some low."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.min(2), groups.max(2)
    scales = ((high - low) / 14).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float64)), 1, 15).astype(np.int64)
    each = scales.astype(np.float64).repeat(GROUP, 1)
    codes = np.clip(np.round(weight / each + zeros.repeat(GROUP, 1)), 0, 15).astype(np.int64)
    return codes, zeros, scales


def gptq(weight: np.ndarray) -> Packed:
    """With a bias of zeros, as its tools write one."""
    codes, zeros, scales = _four_bits(weight)
    tensors = {
        "qweight": words(codes, 4).t().contiguous(),
        "qzeros": words((zeros - 1).T, 4),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
        "bias": torch.zeros(weight.shape[0], dtype=torch.float16),
    }
    return tensors, (codes - zeros.repeat(GROUP, 1)) * scales.astype(np.float64).repeat(GROUP, 1)


def shuffled(weight: np.ndarray) -> Packed:
    """Groups in an order of their own."""
    order = np.random.default_rng(4).permutation(weight.shape[1])
    tensors, means = gptq(weight[:, order])
    del tensors["bias"]
    back = np.argsort(order)
    codes, _, _ = _four_bits(weight[:, order])
    tensors["qweight"] = words(codes[:, back], 4).t().contiguous()
    tensors["g_idx"] = tensors["g_idx"][torch.from_numpy(back)]
    return tensors, means[:, back]


def awq(weight: np.ndarray) -> Packed:
    codes, zeros, scales = _four_bits(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.T, 4, order), "qzeros": words(zeros.T, 4, order)}
    tensors["scales"] = torch.from_numpy(scales.T.copy())
    return tensors, (codes - zeros.repeat(GROUP, 1)) * scales.astype(np.float64).repeat(GROUP, 1)


def fp8(weight: np.ndarray) -> Packed:
    dense = torch.from_numpy(weight)
    scale = (dense.abs().amax() / 448).float()
    codes = (dense / scale.double()).float().to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.double().numpy() * float(scale)


def int8(weight: np.ndarray) -> Packed:
    dense = torch.from_numpy(weight)
    scale = (dense.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (dense / scale.double()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.double().numpy() * scale.double().numpy()


INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"]}
METHODS: dict[str, tuple[Callable[[np.ndarray], Packed], dict[str, Any], set[str]]] = {
    "gptq": (gptq, {**GPTQ, "group_size": GROUP}, {"int4_group32"}),
    "act-order": (shuffled, {**GPTQ, "group_size": GROUP, "desc_act": True}, {"unquantized"}),
    "awq": (awq, {**AWQ, "group_size": GROUP}, {"int4_group32"}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}, {"fp8_channel"}),
    "int8": (int8, INT8, {"int8_channel"}),
}


def rewrite(made: hf_tiny.Made, folder: Path, pack: Callable[[np.ndarray], Packed], config: dict[str, Any]) -> None:
    """The model with its layers' matrices packed, in `folder`; `made`'s own get the weights that this means."""
    tensors: dict[str, Tensor] = {}

    def put(name: str, weight: Tensor) -> None:
        parts, means = pack(weight.double().numpy())
        weight.copy_(torch.from_numpy(means))
        tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})

    with torch.no_grad():
        for name, weight in made.model.state_dict().items():
            old = name.replace("mlp.gate.", "block_sparse_moe.gate.").replace("mlp.experts", "block_sparse_moe.experts")
            if weight.dim() == 3:  # of all experts, which older checkpoints have one by one
                at = old.rpartition(".")[0]
                for number, own in enumerate(weight):
                    halves = own.chunk(2) if "gate_up" in name else (own,)
                    for part, half in zip(("w1", "w3") if "gate_up" in name else ("w2",), halves, strict=True):
                        put(f"{at}.{number}.{part}", half)
            elif weight.dim() == 2 and name.endswith("_proj.weight"):
                put(name.removesuffix(".weight"), weight)
            elif name != "lm_head.weight" or not made.stated["tie_word_embeddings"]:
                tensors[old] = weight.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    stated = {**made.stated, "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(stated))


def load(folder: Path, **options: Any) -> tuple[ModelConfig, ModelWeights]:
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return config, load_weights(open_source(folder), config, device=CPU, dtype=torch.float32, **options)


def schemes(weights: ModelWeights) -> set[str]:
    return {w.scheme for layer in weights.layers for w, _ in layer.linears().values()}


@pytest.mark.parametrize("method", METHODS)
def test_prefill_and_decode_equal_transformers_on_the_weights_that_are_meant(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches E34 in a whole model: parts of q, k and v fused in another order than their scales, a tensor of the
    format left over or taken for a bias, a matrix that became dense without a word."""
    pack, config, wanted = METHODS[method]
    made = hf_tiny.make(tmp_path / "dense", "llama", **SIZES)
    rewrite(made, tmp_path / "packed", pack, config)
    truth = truth_of(made, hf_tiny.random_ids(20))
    with caplog.at_level(logging.WARNING):
        found, weights = load(tmp_path / "packed")
    assert schemes(weights) == wanted
    assert [r for r in caplog.messages if "kept dense" in r and "out of order" in r] == caplog.messages
    assert bool(caplog.messages) == (method == "act-order")
    got = hf_tiny.stepwise(Decoder(found, weights, device=CPU, dtype="float32", max_model_len=64), truth.ids, 13)
    assert (got - truth.logits).abs().max() <= truth.bound


def test_the_fp32_rounding_of_a_scale_is_all_that_differs(tmp_path: Path) -> None:
    """Catches a vacuous comparison: the unquantised weights are beyond the bound by far."""
    made = hf_tiny.make(tmp_path / "dense", "llama", **SIZES)
    before = made.logits(hf_tiny.random_ids(20))
    rewrite(made, tmp_path / "packed", gptq, GPTQ)
    truth = truth_of(made, hf_tiny.random_ids(20))
    assert (before - truth.logits).abs().max() > 100 * truth.bound


@pytest.mark.parametrize(
    ("quantization", "scheme"), [("int8", "int8_channel"), ("int4", "int4_group64"), ("fp8", "fp8_channel")]
)
def test_quantised_as_it_is_loaded(tmp_path: Path, quantization: str, scheme: str) -> None:
    """Catches a matrix left dense, the head or the embedding quantised, rows fused before they are quantised in another
    order; the judge is transformers with the weights that were made."""
    made = hf_tiny.make(tmp_path / "dense", "llama", **SIZES)
    config, weights = load(tmp_path / "dense", quantization=quantization)
    assert schemes(weights) == {scheme}
    assert weights.embedding.scheme == weights.head.scheme == "unquantized"
    with torch.no_grad():
        for ours, theirs in zip(weights.layers, made.model.model.layers, strict=True):
            q, k, v = theirs.self_attn.q_proj, theirs.self_attn.k_proj, theirs.self_attn.v_proj
            for weight, parts in (
                (ours.qkv, (q, k, v)),
                (ours.o, (theirs.self_attn.o_proj,)),
                (ours.gate_up, (theirs.mlp.gate_proj, theirs.mlp.up_proj)),
                (ours.down, (theirs.mlp.down_proj,)),
            ):
                assert weight is not None
                dense = dequantize(weight.data, weight.scheme)
                for part in parts:
                    rows, dense = dense.split((part.weight.shape[0], dense.shape[0] - part.weight.shape[0]))
                    assert (rows - part.weight).norm() < 0.1 * part.weight.norm()
                    part.weight.copy_(rows)
    truth = truth_of(made, hf_tiny.random_ids(20))
    got = hf_tiny.stepwise(Decoder(config, weights, device=CPU, dtype="float32", max_model_len=64), truth.ids, 13)
    assert (got - truth.logits).abs().max() <= truth.bound


@pytest.mark.parametrize("method", ["gptq", "act-order"])
def test_quantised_experts_become_dense(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches experts of a quantised checkpoint that are not found or told of twice, or w1 and w3 in each other's
    place."""
    pack, config, _ = METHODS[method]
    made = hf_tiny.make(tmp_path / "dense", "mixtral", **SIZES)
    rewrite(made, tmp_path / "packed", pack, config)
    with caplog.at_level(logging.WARNING):
        _, weights = load(tmp_path / "packed")
    wanted = ["36 tensors of experts", "8 matrices have groups out of order"][: 1 if method == "gptq" else 2]
    assert len(caplog.messages) == len(wanted)
    for said, found in zip(wanted, caplog.messages, strict=True):
        assert said in found
        assert found.count(str(tmp_path)) == 1
    for ours, theirs in zip(weights.layers, made.model.model.layers, strict=True):
        assert ours.experts is not None
        assert ours.experts.router.scheme == "unquantized"
        assert torch.equal(ours.experts.gate_up, theirs.mlp.experts.gate_up_proj)
        assert torch.equal(ours.experts.down, theirs.mlp.experts.down_proj)


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    """Catches an option that does nothing, a bias that is ignored, a layer of another size, an unknown method."""
    made = hf_tiny.make(tmp_path / "dense", "llama", **SIZES)
    rewrite(made, tmp_path / "packed", gptq, {**GPTQ, "group_size": GROUP})
    with pytest.raises(UnsupportedQuantizationError, match="quantization='int8' finds no dense matrix"):
        load(tmp_path / "packed", quantization="int8")
    with pytest.raises(ValueError, match="quantization='int3' is not one of int8, int4, fp8"):
        load(tmp_path / "dense", quantization="int3")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    at = "model.layers.1.mlp.down_proj"
    save_file({**tensors, f"{at}.bias": tensors[f"{at}.bias"] + 1}, file)
    with pytest.raises(TensorSetError, match=f"takes {at}.bias"):
        load(tmp_path / "packed")
    cut = {name: t for name, t in tensors.items() if name != f"{at}.scales"}
    save_file(cut, file)
    with pytest.raises(TensorSetError, match=f"{at}: 'scales' is missing"):
        load(tmp_path / "packed")
    stated = json.loads((tmp_path / "packed" / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(stated))
    with pytest.raises(UnsupportedQuantizationError, match="quant_method is 'aqlm'"):
        load(tmp_path / "packed")

"""Loading: fusion, the llama un-permute on quantised rows, tied heads, and a set of tensors that must fit exactly."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Ggml
from gguf.quants import dequantize as oracle_dequantize

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import TensorSetError, UnsupportedTensorError
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.quant import dequantize
from rapid_llm.models.weights import ModelWeights, Weight, load_weights
from tests.models import tiny

QUANTS = [Ggml.Q4_0, Ggml.Q4_1, Ggml.Q8_0]
CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    file = GGUFFile(path)
    return load_weights(file, ModelConfig.from_gguf(file), device=CPU, dtype=dtype)


def dense(weight: Weight) -> torch.Tensor:
    return weight.data if weight.scheme == "unquantized" else dequantize(weight.data, weight.scheme)


def check_every_tensor(model: tiny.TinyModel, weights: ModelWeights) -> None:
    """Bitwise equality of every loaded tensor with the source, whose q and k rows are in head order."""
    want = model.weights
    assert torch.equal(dense(weights.embedding), want["token_embd.weight"])
    assert torch.equal(weights.final_norm, want["output_norm.weight"])
    for i, layer in enumerate(weights.layers):
        part = {n.removeprefix(f"blk.{i}."): w for n, w in want.items() if n.startswith(f"blk.{i}.")}
        assert torch.equal(dense(layer.qkv), torch.cat([part[f"attn_{n}.weight"] for n in "qkv"]))
        assert torch.equal(dense(layer.gate_up), torch.cat([part["ffn_gate.weight"], part["ffn_up.weight"]]))
        assert torch.equal(dense(layer.o), part["attn_output.weight"])
        assert torch.equal(dense(layer.down), part["ffn_down.weight"])
        assert torch.equal(layer.attn_norm, part["attn_norm.weight"])
        assert torch.equal(layer.ffn_norm, part["ffn_norm.weight"])
        if "attn_q.bias" in part:
            assert layer.qkv_bias is not None
            assert torch.equal(layer.qkv_bias, torch.cat([part[f"attn_{n}.bias"] for n in "qkv"]))
        if "attn_q_norm.weight" in part:
            assert layer.q_norm is not None
            assert layer.k_norm is not None
            assert torch.equal(layer.q_norm, part["attn_q_norm.weight"])
            assert torch.equal(layer.k_norm, part["attn_k_norm.weight"])


@pytest.mark.parametrize("quant", [Ggml.F32, Ggml.F16, Ggml.BF16, *QUANTS], ids=lambda q: q.name)
@pytest.mark.parametrize("shape", [tiny.Shape(), tiny.qwen2(), tiny.qwen3()], ids=lambda s: s.arch)
def test_every_tensor_equals_its_unpermuted_source(tmp_path: Path, shape: tiny.Shape, quant: Ggml) -> None:
    """Catches E26 (llama's q and k left interleaved), E27 (others un-permuted too), and parts in another order."""
    model = tiny.make(tmp_path / "m.gguf", shape, quant=quant)
    check_every_tensor(model, load(model.path))


def test_the_interleaving_matters(tmp_path: Path) -> None:
    """Catches a vacuous E26 test: the file's rows differ from the source's."""
    model = tiny.make(tmp_path / "m.gguf")
    raw = torch.from_numpy(GGUFFile(model.path).data("blk.0.attn_q.weight").copy()).view(torch.float32)
    assert not torch.equal(raw, model.weights["blk.0.attn_q.weight"])


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_quantised_weights_stay_quantised(tmp_path: Path, quant: Ggml) -> None:
    """Catches silent dequantisation: four to eight times the memory."""
    weights = load(tiny.make(tmp_path / "m.gguf", quant=quant).path)
    row = {Ggml.Q4_0: 36, Ggml.Q4_1: 40, Ggml.Q8_0: 68}[quant]
    assert weights.layers[0].qkv.data.shape == (128, row)
    assert weights.layers[0].qkv.data.dtype == torch.uint8
    assert (weights.layers[0].qkv.scheme, weights.layers[0].qkv.shape) == (quant.name.lower(), (128, 64))


def test_dense_weights_take_the_activations_dtype(tmp_path: Path) -> None:
    """Catches a matrix in another dtype than its input's, and norms rounded with it."""
    weights = load(tiny.make(tmp_path / "m.gguf", tiny.qwen2()).path, torch.bfloat16)
    layer = weights.layers[0]
    assert (layer.qkv.data.dtype, layer.attn_norm.dtype) == (torch.bfloat16, torch.float32)
    assert layer.qkv_bias is not None
    assert layer.qkv_bias.dtype == torch.bfloat16


def test_loaded_weights_do_not_point_into_the_file(tmp_path: Path) -> None:
    """Catches weights that change, or crash the process, when the file is replaced after loading."""
    model = tiny.make(tmp_path / "m.gguf", quant=Ggml.Q8_0)
    weights = load(model.path)
    with open(model.path, "r+b") as file:
        file.truncate(64)
    check_every_tensor(model, weights)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_exactly_where_the_file_has_no_other(tmp_path: Path, tied: bool) -> None:
    """Catches a head tied although output.weight is there, or held twice although it isn't."""
    model = tiny.make(tmp_path / "m.gguf", tiny.Shape(tied=tied), quant=Ggml.Q8_0)
    weights = load(model.path)
    assert (weights.head is weights.embedding) == tied
    name = "token_embd.weight" if tied else "output.weight"
    assert torch.equal(dense(weights.head), model.weights[name])


def test_a_group_of_mixed_types_is_kept_dense_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches blocks of one format read as another's, and the cost of mixing passed over in silence."""
    types = {"blk.0.attn_v.weight": Ggml.Q8_0, "blk.1.ffn_up.weight": Ggml.F16}
    model = tiny.make(tmp_path / "m.gguf", quant=Ggml.Q4_1, types=types)
    with caplog.at_level(logging.WARNING):
        weights = load(model.path)
    check_every_tensor(model, weights)
    assert weights.layers[0].qkv.scheme == weights.layers[1].gate_up.scheme == "unquantized"
    assert weights.layers[1].qkv.scheme == "q4_1"
    assert len(caplog.records) == 1
    assert "2 fused groups mix" in caplog.text
    assert "blk.0.attn_v.weight Q8_0" in caplog.text


@pytest.mark.parametrize(
    ("drop", "match"),
    [
        ("blk.1.attn_k.weight", r"blk.1.attn_q.weight, blk.1.attn_v.weight without blk.1.attn_k.weight: the group"),
        ("blk.0.ffn_gate.weight", r"blk.0.ffn_up.weight without blk.0.ffn_gate.weight: the group"),
        ("blk.0.ffn_down.weight", "'blk.0.ffn_down.weight' is missing"),
        ("output_norm.weight", "'output_norm.weight' is missing"),
    ],
)
def test_missing_tensors_are_named(tmp_path: Path, drop: str, match: str) -> None:
    """Catches memory left unwritten for a part of a fused group."""
    with pytest.raises(TensorSetError, match=match):
        load(tiny.make(tmp_path / "m.gguf", drop=(drop,)).path)


def test_a_family_with_biases_needs_all_of_them(tmp_path: Path) -> None:
    """Catches a bias that is treated as zero because the file lost it."""
    with pytest.raises(TensorSetError, match=r"'blk.0.attn_k.bias' is missing"):
        load(tiny.make(tmp_path / "m.gguf", tiny.qwen2(), drop=("blk.0.attn_k.bias",)).path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_norm.weight", "blk.0.ffn_gate_exps.weight"])
def test_tensors_that_nothing_takes_are_an_error(tmp_path: Path, name: str) -> None:
    """Catches a bias, a layer or experts that are in the file and ignored."""
    extra = {name: np.zeros(64, np.float32)}
    with pytest.raises(TensorSetError, match=f"no part of a llama model takes {name}"):
        load(tiny.make(tmp_path / "m.gguf", extra=extra).path)


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.rope_freqs.weight"])
def test_other_rotary_tables_are_refused(tmp_path: Path, name: str) -> None:
    """Catches scaled rotary frequencies being dropped: right on short prompts, wrong on long ones."""
    with pytest.raises(UnsupportedTensorError, match=name):
        load(tiny.make(tmp_path / "m.gguf", extra={name: np.ones(8, np.float32)}).path)


def test_rope_factors_are_read_for_llama_and_refused_elsewhere(tmp_path: Path) -> None:
    """Catches Llama 3's frequency factors ignored, or applied to a family that has none."""
    factors = tuple(float(f) for f in range(1, 9))
    weights = load(tiny.make(tmp_path / "m.gguf", tiny.Shape(rope_factors=factors)).path)
    assert weights.rope_factors is not None
    assert weights.rope_factors.tolist() == list(factors)
    with pytest.raises(UnsupportedTensorError, match="rope_freqs"):
        load(tiny.make(tmp_path / "m.gguf", replace(tiny.qwen2(), rope_factors=factors)).path)
    with pytest.raises(TensorSetError, match=r"rope_freqs.*0.0"):
        load(tiny.make(tmp_path / "m.gguf", tiny.Shape(rope_factors=(0.0, *factors[1:]))).path)


def test_a_wrong_shape_names_both(tmp_path: Path) -> None:
    """Catches a tensor of another size read as if it fitted."""
    entries = {"llama.feed_forward_length": 64}
    with pytest.raises(TensorSetError, match=r"'blk.0.ffn_gate.weight' has shape \(96, 64\), not \(64, 64\)"):
        load(tiny.make(tmp_path / "m.gguf", entries=entries).path)


def test_types_that_no_op_computes_with_are_refused_by_name(tmp_path: Path) -> None:
    """Catches a format of four bits read as another, or an error without the fix."""
    extra = {"blk.0.ffn_down.weight": np.zeros((64, 96 // 32 * 17), np.uint8)}
    tiny.make(tmp_path / "m.gguf")
    shape = tiny.Shape()
    tensors = {**tiny.dense_weights(shape), **extra}
    tiny.write(tmp_path / "m.gguf", "llama", tiny.metadata(shape), tensors, {"blk.0.ffn_down.weight": Ggml.MXFP4})
    with pytest.raises(UnsupportedTensorError, match=r"'blk.0.ffn_down.weight' has the type MXFP4.*Q4_1"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_dequantisation_equals_the_gguf_packages(quant: Ggml) -> None:
    """Catches swapped nibbles, a missing offset or minimum, and a scale read as another number; random blocks, so that
    codes which a quantiser never makes (-128) are there too."""
    rng = np.random.default_rng(3)
    width = {Ggml.Q4_0: 18, Ggml.Q4_1: 20, Ggml.Q8_0: 34}[quant]
    raw = rng.integers(0, 256, (6, 4, width), dtype=np.uint8)
    halves = 2 if quant == Ggml.Q4_1 else 1
    raw[:, :, : 2 * halves] = rng.standard_normal((6, 4, halves)).astype(np.float16).view(np.uint8)
    rows = raw.reshape(6, 4 * width)
    got = dequantize(torch.from_numpy(rows), quant.name.lower())
    assert torch.equal(got, torch.from_numpy(oracle_dequantize(rows, quant).astype(np.float32)))


def test_dequantisation_refuses_what_is_not_blocks() -> None:
    """Catches a scheme or a width that would be read as something else."""
    with pytest.raises(ValueError, match="'q4_9' is not a block format"):
        dequantize(torch.zeros(1, 22, dtype=torch.uint8), "q4_9")
    with pytest.raises(ValueError, match="19 bytes"):
        dequantize(torch.zeros(1, 19, dtype=torch.uint8), "q4_0")


@pytest.mark.model
def test_the_default_model_equals_the_gguf_packages_dequantisation(model_path: Path) -> None:
    """Catches an error in any of the default model's formats, on its real rows (one layer, and part of the table)."""
    file = GGUFFile(model_path)  # its offsets and bytes are compared with the package's in test_gguf
    weights = load(model_path)
    want = oracle_dequantize(file.data("token_embd.weight")[-500:], Ggml.Q8_0)
    assert torch.equal(dequantize(weights.embedding.data[-500:], "q8_0"), torch.from_numpy(want))
    parts = []
    for name, heads in (("attn_q", 9), ("attn_k", 3), ("attn_v", 0)):
        rows = torch.from_numpy(oracle_dequantize(file.data(f"blk.29.{name}.weight"), Ggml.Q4_1))
        source = torch.empty_like(rows)
        source[tiny.gguf_row_order(heads, 64) if heads else slice(None)] = rows
        parts.append(source)
    assert torch.equal(dense(weights.layers[29].qkv), torch.cat(parts))

"""Quantised checkpoints: tensors packed here word by word, as their formats are written down, read by the package.

The packers below know nothing of the package: each puts integers into words by shifts, and says in float64 which
weights that means.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_llm.models.checkpoints import METHODS, from_compressed_tensors, from_gptq, reader
from rapid_llm.models.errors import TensorSetError, UnsupportedQuantizationError
from rapid_llm.models.weights import Weight
from tests.reference_formats import e4m3, row

ROWS, COLUMNS = 24, 256
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def compressed(kind: str = "int", bits: int = 4, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": 64, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def words(fields: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """(a, b) small integers to (a, b * bits / 32) int32 along the last axis; field `order[i]` of a word at place i."""
    each = 32 // bits
    order = order or tuple(range(each))
    result = np.zeros((fields.shape[0], fields.shape[1] // each), np.uint32)
    for column in range(result.shape[1]):
        for place in range(each):
            result[:, column] |= fields[:, column * each + order[place]].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(result.view(np.int32))


class Made:
    """Random codes, zero points and scales of a matrix in groups, and the weights that they stand for."""

    def __init__(self, bits: int = 4, group: int = 64, index: np.ndarray | None = None, low: int = 1) -> None:
        rng = np.random.default_rng(bits + group)
        groups = COLUMNS // group
        self.codes = rng.integers(0, 1 << bits, (ROWS, COLUMNS))
        self.zeros = rng.integers(low, (1 << bits) - 1, (ROWS, groups))
        self.scales = (rng.random((ROWS, groups)) * 0.1 + 0.01).astype(np.float16)
        self.index = np.arange(COLUMNS) // group if index is None else index

    @property
    def weight(self) -> np.ndarray:
        each = self.scales.astype(np.float64)[:, self.index]
        return (self.codes - self.zeros[:, self.index]) * each

    def gptq(self, bits: int = 4, less: int = 1) -> dict[str, Tensor]:
        return {
            "qweight": words(self.codes, bits).t().contiguous(),
            "qzeros": words((self.zeros - less).T, bits),
            "scales": torch.from_numpy(self.scales.T.copy()),
            "g_idx": torch.from_numpy(self.index.astype(np.int32)),
        }

    def awq(self) -> dict[str, Tensor]:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(self.codes.T, 4, order),
            "qzeros": words(self.zeros.T, 4, order),
            "scales": torch.from_numpy(self.scales.T.copy()),
        }

    def compressed(self, bits: int = 4) -> dict[str, Tensor]:
        return {
            "weight_packed": words(self.codes, bits),
            "weight_scale": torch.from_numpy(self.scales).bfloat16(),
            "weight_shape": torch.tensor([ROWS, COLUMNS]),
            "weight_zero_point": words(self.zeros.T, bits).t().contiguous(),
        }


def values(weight: Weight) -> np.ndarray:
    """What the weight stands for, read by the formats' second formulation."""
    assert weight.shape == (ROWS, COLUMNS)
    if weight.scheme == "unquantized":
        return weight.data.double().numpy()
    if weight.scheme == "fp8_block128":
        return np.array([_fp8_blocks(bytes(r.tolist())) for r in weight.data])
    return np.array([row(bytes(r.tolist()), weight.scheme) for r in weight.data])


def _fp8_blocks(data: bytes) -> list[float]:
    scales = np.frombuffer(data[COLUMNS:], np.float32)
    return [e4m3(code) * float(scales[i // 128]) for i, code in enumerate(data[:COLUMNS])]


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> Weight:
    found = reader(config, "m")
    names = [f"model.q_proj.{name}" for name in tensors]
    parts = found.parts(names, "model.q_proj")
    assert set(parts) == set(tensors)
    return found.read({part: tensors[part] for part in parts}, "model.q_proj")


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_gptq(group: int) -> None:
    """Catches E34: zero points ignored, read without the one that the first version takes off, or of other columns; a
    group of 256 read as its first half."""
    made = Made(group=group)
    for fmt, less in (("gptq", 1), ("gptq_v2", 0)):
        got = read(made.gptq(less=less), {**GPTQ, "group_size": group, "checkpoint_format": fmt})
        assert got.scheme == f"int4_group{min(group, 128)}"
        np.testing.assert_array_equal(values(got), made.weight)
    whole = {**GPTQ, "group_size": -1 if group == 256 else group}
    np.testing.assert_array_equal(values(from_gptq(made.gptq(), whole)), made.weight)


def test_gptq_in_the_order_of_activations() -> None:
    """Catches E34: g_idx ignored, so that columns take other groups' scales; one in order made dense for nothing."""
    index = np.random.default_rng(1).permutation(COLUMNS) // 64
    made = Made(index=index)
    got = reader({**GPTQ, "desc_act": True}, "m")
    weight = got.read(made.gptq(), "model.layers.0.mlp.down_proj")
    assert weight.scheme == "unquantized"
    assert got.dense == ["model.layers.0.mlp.down_proj"]
    np.testing.assert_allclose(values(weight), made.weight, rtol=2.0**-23)
    assert from_gptq(Made().gptq(), {**GPTQ, "desc_act": True}).scheme == "int4_group64"


def test_gptq_whose_last_group_is_short() -> None:
    """Catches: 256 columns in groups of 96 spread evenly over three groups."""
    index = np.arange(COLUMNS) // 96
    made = Made(group=64, index=index)
    made.zeros, made.scales = made.zeros[:, :3], made.scales[:, :3]
    tensors = made.gptq()
    del tensors["g_idx"]
    np.testing.assert_allclose(values(from_gptq(tensors, {**GPTQ, "group_size": 96})), made.weight, rtol=2.0**-23)


def test_gptq_of_8_bits() -> None:
    """Catches: bytes read as nibbles, a zero point of 128 lost, an asymmetric matrix taken for a symmetric one."""
    made = Made(8)
    config = {**GPTQ, "bits": 8}
    got = from_gptq(made.gptq(8), config)
    assert got.scheme == "unquantized"
    np.testing.assert_allclose(values(got), made.weight, rtol=2.0**-23)
    whole = Made(8, COLUMNS)
    whole.zeros[:] = 128
    got = from_gptq(whole.gptq(8), {**config, "group_size": -1})
    assert got.scheme == "int8_channel"
    np.testing.assert_array_equal(values(got), whole.weight)


def test_scales_beyond_fp16_are_kept() -> None:
    """Catches: scales of bf16 or fp32 that fp16 rounds to 0 or infinity, or to another number."""
    made = Made()
    tensors = made.gptq()
    tensors["scales"] = tensors["scales"].float() * 1e-6
    got = from_gptq(tensors, GPTQ)
    assert got.scheme == "unquantized"
    np.testing.assert_allclose(values(got), made.weight * 1e-6, rtol=2.0**-21)


@pytest.mark.parametrize("group", [64, 128])
def test_awq(group: int) -> None:
    """Catches: the interleaving of nibbles undone by its inverse, zero points in another order than the codes."""
    made = Made(group=group, low=0)
    got = read(made.awq(), {**AWQ, "group_size": group})
    assert got.scheme == f"int4_group{group}"
    np.testing.assert_array_equal(values(got), made.weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed(symmetric: bool) -> None:
    """Catches: codes without their offset of 8, zero points unpacked along the wrong axis."""
    made = Made(low=0)
    made.scales = torch.from_numpy(made.scales).bfloat16().float().numpy().astype(np.float16)
    tensors = made.compressed()
    if symmetric:
        made.zeros[:] = 8
        del tensors["weight_zero_point"]
    got = read(tensors, compressed(symmetric=symmetric))
    assert got.scheme == "int4_group64"
    np.testing.assert_array_equal(values(got), made.weight)


def test_compressed_tensors_packed_otherwise() -> None:
    """Catches: 8 bits in words taken for 4; an order of groups ignored, or one that is not set believed."""
    made = Made(8, COLUMNS)
    made.zeros[:] = 128
    made.scales = torch.from_numpy(made.scales).bfloat16().float().numpy().astype(np.float16)
    tensors = made.compressed(8)
    del tensors["weight_zero_point"]
    got = read(tensors, compressed(bits=8, strategy="channel"))
    assert got.scheme == "int8_channel"
    np.testing.assert_array_equal(values(got), made.weight)
    made = Made(index=np.random.default_rng(1).permutation(COLUMNS) // 64)
    made.scales = torch.from_numpy(made.scales).bfloat16().float().numpy().astype(np.float16)
    tensors = {**made.compressed(), "weight_g_idx": torch.from_numpy(made.index.astype(np.int32))}
    got = read(tensors, compressed(symmetric=False, actorder="group"))
    np.testing.assert_allclose(values(got), made.weight, rtol=2.0**-23)
    unset = {**tensors, "weight_g_idx": torch.full((COLUMNS,), -1, dtype=torch.int32)}
    assert from_compressed_tensors(unset, compressed()).scheme == "int4_group64"


def _eight(kind: str) -> tuple[Tensor, np.ndarray]:
    """Codes of a byte and the numbers that they are."""
    raw = np.random.default_rng(2).integers(0, 256, (ROWS, COLUMNS), dtype=np.uint8)
    if kind == "int8":
        return torch.from_numpy(raw).view(torch.int8), raw.view(np.int8).astype(np.float64)
    raw[(raw & 127) == 127] = 5
    return torch.from_numpy(raw).view(torch.float8_e4m3fn), np.array(
        [[e4m3(code) for code in line] for line in raw.tolist()]
    )


@pytest.mark.parametrize("kind", ["float8", "int8"])
@pytest.mark.parametrize("shape", [(1,), (ROWS, 1)])
def test_a_scale_for_all_or_for_each_row(kind: str, shape: tuple[int, ...]) -> None:
    """Catches: a scale of a row used for a column, codes read in the other sign or format."""
    codes, numbers = _eight(kind)
    scale = (torch.rand(shape) + 0.1).bfloat16()
    config = compressed(kind="float" if kind == "float8" else "int", bits=8, strategy="channel")
    config["format"] = "float-quantized" if kind == "float8" else "int-quantized"
    got = read({"weight": codes, "weight_scale": scale}, config)
    assert got.scheme == ("fp8_channel" if kind == "float8" else "int8_channel")
    np.testing.assert_array_equal(values(got), numbers * scale.double().numpy().reshape(-1, 1))


def test_a_byte_a_weight_in_groups_or_with_zero_points() -> None:
    """Catches: groups of 8 bits, or an asymmetric matrix, that no scheme has, read as one that it has."""
    codes, numbers = _eight("int8")
    scale, zero = torch.rand(ROWS, 4) + 0.1, torch.randint(-20, 20, (ROWS, 1)).to(torch.int8)
    got = read({"weight": codes, "weight_scale": scale}, compressed(bits=8))
    np.testing.assert_allclose(values(got), numbers * scale.double().numpy().repeat(64, 1), rtol=2.0**-23)
    tensors = {"weight": codes, "weight_scale": scale[:, :1].contiguous(), "weight_zero_point": zero}
    got = read(tensors, compressed(bits=8, strategy="channel", symmetric=False))
    want = (numbers - zero.double().numpy()) * scale[:, :1].double().numpy()
    np.testing.assert_allclose(values(got), want, rtol=2.0**-23)
    flat = {**tensors, "weight_zero_point": zero * 0}
    assert read(flat, compressed(bits=8, strategy="channel")).scheme == "int8_channel"


def test_fp8_blocks_and_one_scale() -> None:
    """Catches: weight_scale_inv taken for a divisor, blocks transposed, a scale of one tensor that no block has."""
    codes, numbers = _eight("float8")
    blocks = torch.rand(1, 2) + 0.5
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    got = read({"weight": codes, "weight_scale_inv": blocks}, config)
    assert got.scheme == "fp8_block128"
    np.testing.assert_array_equal(values(got), numbers * blocks.double().numpy().repeat(128, 1))
    one = {"weight": codes, "weight_scale": torch.tensor(0.3), "input_scale": torch.tensor(2.0)}
    got = read(one, {"quant_method": "fp8", "activation_scheme": "static"})
    assert got.scheme == "fp8_channel"
    np.testing.assert_array_equal(values(got), numbers * float(torch.tensor(0.3)))


def test_bitsandbytes_of_8_bits() -> None:
    """Catches: SCB taken for the scale itself, which is 127 times as large; another layout read as rows."""
    codes, numbers = _eight("int8")
    tensors = {"weight": codes, "SCB": torch.rand(ROWS) + 0.1, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    got = read(tensors, config)
    assert got.scheme == "int8_channel"
    np.testing.assert_allclose(values(got), numbers * tensors["SCB"].double().numpy()[:, None] / 127, rtol=2.0**-23)
    tensors["weight_format"] += 1
    with pytest.raises(UnsupportedQuantizationError, match=r"model\.q_proj: weight_format is 1"):
        read(tensors, config)


def test_a_layer_that_is_not_quantised() -> None:
    """Catches: a head left dense that is read by the method of the others."""
    for method in METHODS:
        config = {"gptq": GPTQ, "awq": AWQ, "bitsandbytes": {"quant_method": method, "load_in_8bit": True}}
        found = reader(config.get(method, {"quant_method": method}), "m")
        assert found.parts(["lm_head.weight", "lm_head.bias"], "lm_head") == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'; supported: 'gptq', 'awq'"),
        ({}, "quant_method is None"),
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3; supported: 4, 8"),
        ({**GPTQ, "group_size": None}, "group_size is None, not a number"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic = {'-:lm_head': {}} is not understood"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: 'gemm'"),
        ({**AWQ, "zero_point": False}, "zero_point is False"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({**compressed(), "format": "marlin-24"}, "format is 'marlin-24'"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is"),
        (compressed(kind="float"), "config_groups.group_0.weights.num_bits is 4; supported: 8"),
        (compressed(strategy="tensor_group"), "weights.strategy is 'tensor_group'"),
        ({**compressed(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_4bit is True; supported: False"),
    ],
)
def test_what_is_not_read_is_named(config: dict[str, Any], message: str) -> None:
    """Catches: a setting that is ignored, and a model that computes something else; an error without field or value."""
    with pytest.raises(UnsupportedQuantizationError, match=f"^m: .*{message}"):
        reader(config, "m")


def test_fields_that_are_not_set_are_passed() -> None:
    """Catches: a checkpoint refused for a field that a newer library writes and leaves empty."""
    assert reader({**GPTQ, "new_field": None, "other": {}}, "m").method is METHODS["gptq"]


def test_tensors_that_do_not_belong_together() -> None:
    """Catches: scales of another layer, a missing tensor or words of another type turned into weights."""
    tensors = Made().gptq()
    for change, message in (
        ({"scales": tensors["scales"][:3]}, "3 groups of scales for 256 inputs in groups of 64"),
        ({"scales": tensors["scales"][:, :8]}, r"24 rows take scales and zero points of shape \(24, groups\)"),
        ({"qweight": tensors["qweight"].long()}, "'qweight' holds torch.int64"),
        ({"g_idx": tensors["g_idx"] + 7}, "g_idx holds 10; there are 4 groups"),
    ):
        with pytest.raises(TensorSetError, match=f"^m: layer: .*{message}"):
            reader(GPTQ, "m").read({**tensors, **change}, "layer")
    del tensors["qzeros"]
    with pytest.raises(TensorSetError, match="'qzeros' is missing beside g_idx, qweight, scales"):
        from_gptq(tensors, GPTQ)
    shape = {**Made().compressed(), "weight_shape": torch.tensor([ROWS, 100])}
    with pytest.raises(TensorSetError, match=r"weight_packed is \(24, 32\) int32, not \(24, 100\) codes"):
        from_compressed_tensors(shape, compressed())

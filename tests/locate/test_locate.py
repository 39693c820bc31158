"""Two configurations of a tiny model: agreement is not called guilt, and guilt is named to the row and the layer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rapid_llm.kernels import dispatch
from rapid_llm.locate import Configuration, locate
from rapid_llm.locate.calls import RowRaisedError
from rapid_llm.locate.locate import Located
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.verify import check_row
from tests.locate import planted

PROMPTS = [[(7 * i + i * i) % 200 + 3 for i in range(n)] for n in (90, 9, 3)]


def compare(path: Path, a: str, b: str) -> Located:
    file = GGUFFile(path)
    sides = [Configuration.parse(text) for text in (a, b)]
    return locate(file, ModelConfig.from_gguf(file), sides[0], sides[1], PROMPTS)


@pytest.mark.usefixtures("plugin")
def test_the_planted_rows_are_right_on_squares_and_verify_refuses_them() -> None:
    """Catches: a conformance suite without tails; the planted faults are invisible without one."""
    x, w = torch.randn(128, 128), torch.randn(128)
    norm, matmul = (
        dispatch(op, device="cpu", dtype="fp32", backend="acme", **more)
        for op, more in (("rmsnorm", {}), ("linear", {"scheme": "unquantized"}))
    )
    assert torch.equal(norm(x, w), dispatch("rmsnorm", x, w, backend="native")(x, w))
    assert torch.equal(matmul(x, x), dispatch("linear", x, x, backend="native")(x, x))
    assert not check_row("rmsnorm", "acme/rmsnorm", dtype="fp32", seeds=(0,)).ok
    assert not check_row("linear", "acme/linear", dtype="fp32", scheme="unquantized", seeds=(0,)).ok


@pytest.mark.usefixtures("plugin")
def test_a_planted_row_among_many_is_named_with_its_place(tiny_path: Path) -> None:
    """Catches: blame on a later layer for what it was handed, blame on rows that only round, more model runs than
    promised."""
    found = compare(tiny_path, "native", "linear=acme/linear").diagnosis
    assert [(g.side, g.row, g.layers, g.places) for g in found.guilty] == [
        ("b", "acme/linear", ("layer 0", "layer 1"), 2)
    ]
    assert {f.worst.split()[-1] for f in found.guilty} == {"down"}
    assert found.explains == ("acme/linear",)
    assert found.rows > 3, "the default rows differ from the floor too"
    assert found.runs <= math.log2(found.rows) + 5
    assert found.limit == math.ceil(math.log2(found.rows)) + 5
    assert not found.ok


@pytest.mark.usefixtures("plugin")
def test_the_faulty_side_may_be_a(tiny_path: Path) -> None:
    """Catches: a locator that takes its first side for the truth."""
    found = compare(tiny_path, "native linear=acme/linear", "native").diagnosis
    assert [(g.side, g.row) for g in found.guilty] == [("a", "acme/linear")]


@pytest.mark.usefixtures("plugin")
def test_a_row_that_writes_to_its_input_is_guilty(tiny_path: Path) -> None:
    """Catches: a comparison of results alone; this row's results are right."""
    (guilty,) = compare(tiny_path, "native", "native silu_and_mul=acme/silu_and_mul").diagnosis.guilty
    assert guilty.row == "acme/silu_and_mul"
    assert "only read" in guilty.problem
    assert guilty.ratio == math.inf


@pytest.mark.usefixtures("plugin")
def test_a_row_that_is_right_on_copies_alone_is_guilty(tiny_path: Path) -> None:
    """Catches: a locator that judges copies only; this row is wrong where the model really calls it."""
    found = compare(tiny_path, "native", "native silu_and_mul=acme/silu_and_mul.shy").diagnosis
    assert [(g.side, g.row) for g in found.guilty] == [("b", "acme/silu_and_mul.shy")]
    assert found.explains == ("acme/silu_and_mul.shy",)
    assert found.runs == 4 <= found.limit


@pytest.mark.usefixtures("plugin")
def test_a_row_that_raises_is_named_with_its_place(tiny_path: Path) -> None:
    """Catches: a traceback that tells a line of the row and not where in the model it was called."""
    with pytest.raises(
        RowRaisedError, match=r"acme/silu_and_mul\.raising raised at layer 0 activation: IndexError: tile"
    ):
        compare(tiny_path, "native", "native silu_and_mul=acme/silu_and_mul.raising")


def test_the_floor_and_the_default_rows_agree(tiny_path: Path) -> None:
    """Catches: rounding that is called a fault, and declared roundings that are left out of the bound."""
    found = compare(tiny_path, "native", "").diagnosis
    assert found.ok
    assert found.whole.difference > 0
    assert {e.row_a.partition("/")[0] for e in found.ops} == {"native"}
    assert 0 < max(e.ratio_b for e in found.ops) <= 1


@pytest.mark.parametrize("b", ["native dtype=bf16", "native dtype=fp16"])
def test_dtypes_agree_within_their_bounds(tiny_path: Path, b: str) -> None:
    """Catches: a result in one dtype held against the truth of inputs in another."""
    found = compare(tiny_path, "native dtype=fp32", b).diagnosis
    assert found.ok
    assert found.whole.difference > 1e-4
    ops = {e.op for e in found.ops}
    assert {"embedding", "linear", "attention.decode", "attention.prefill", "rope_kvcache_write"} <= ops


@pytest.mark.usefixtures("plugin")
def test_a_fault_across_dtypes_is_named(tiny_path: Path) -> None:
    """Catches: a fault that hides behind the rounding of a coarser dtype, and swaps that forget to convert."""
    found = compare(tiny_path, "native dtype=fp32", "native dtype=bf16 linear=acme").diagnosis
    assert [g.row for g in found.guilty] == ["acme/linear"]
    assert found.explains == ("acme/linear",)
    assert found.runs <= found.limit


def test_dequantised_weights_are_the_same_numbers(tiny_path: Path) -> None:
    """Catches: a dequantised side whose weights are others, or a comparison that skips it."""
    found = compare(tiny_path, "native", "native dequantised").diagnosis
    assert found.ok
    assert found.whole.difference < 1e-6
    assert ("native/linear.q4_1", "native/linear") in {(e.row_a, e.row_b) for e in found.ops}


def test_equal_sides_have_nothing_to_compare(tiny_path: Path) -> None:
    """Catches: a model run that depends on anything but its configuration."""
    found = compare(tiny_path, "native", "native").diagnosis
    assert found.ok
    assert found.whole.difference == 0
    assert not found.ops


def test_layers_gather_what_ops_add(tiny_path: Path) -> None:
    """Catches: contributions that are sums: in bf16 the drift grows, what a layer adds does not."""
    layers = compare(tiny_path, "native dtype=fp32", "native dtype=bf16").diagnosis.layers
    assert [e.layer for e in layers] == [0, 1]
    assert all(0 < e.own < 0.01 for e in layers)
    assert all(e.drift > 0 for e in layers)


def test_transformers_as_the_reference(tiny_path: Path) -> None:
    """Catches: steps, positions or layers that are matched wrongly; each would differ grossly."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = compare(tiny_path, "hf", "native").diagnosis
    assert found.ok
    assert found.whole.difference < 1e-4
    assert max(e.own for e in found.layers) < 1e-5
    assert found.runs <= found.limit


@pytest.mark.usefixtures("plugin")
def test_a_fault_against_transformers(tiny_path: Path) -> None:
    """Catches: a reference that only says that something differs."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = compare(tiny_path, "hf", "native linear=acme").diagnosis
    assert [g.row for g in found.guilty] == ["acme/linear"]
    assert min(e.own for e in found.layers) > 1e-3


def test_a_model_that_is_read_wrongly_is_no_rows_fault(tiny_path: Path) -> None:
    """Catches: right rows blamed for a wrong constant, and a wrong model that passes because its rows are right."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    file = GGUFFile(tiny_path)
    config = replace(ModelConfig.from_gguf(file), rms_norm_eps=10.0)
    found = locate(file, config, Configuration.parse("hf"), Configuration.parse("native"), PROMPTS).diagnosis
    assert not found.guilty
    assert found.odd_layers == (0, 1)
    assert not found.ok


@pytest.mark.gpu
@pytest.mark.parametrize("b", ["native dtype=fp32 device=cuda", "native dtype=bf16 device=cuda", "device=cuda"])
def test_cpu_and_gpu_agree(tiny_path: Path, b: str) -> None:
    """Catches: copies between devices that lose strides or dtypes, and a native row of the GPU out of its bound."""
    found = compare(tiny_path, "native dtype=fp32 device=cpu", b).diagnosis
    assert found.ok, found.guilty


@pytest.mark.gpu
@pytest.mark.usefixtures("plugin")
def test_a_fault_on_the_gpu_is_named(tiny_path: Path) -> None:
    """Catches: a swap between devices that computes on the wrong one, and a fault lost on the way."""
    found = compare(tiny_path, "native dtype=fp32 device=cpu", "native dtype=bf16 device=cuda linear=acme").diagnosis
    assert [g.row for g in found.guilty] == ["acme/linear"]
    assert found.explains == ("acme/linear",)
    assert found.runs <= found.limit


@pytest.mark.model
@pytest.mark.usefixtures("plugin")
def test_the_planted_row_in_smollm2(model_path: Path) -> None:
    """What the locator is for: forced into SmolLM2 by name, the row and its layer are named in few model runs."""
    found = compare(model_path, "", "rmsnorm=acme/rmsnorm").diagnosis
    assert [(g.row, g.layers, g.worst) for g in found.guilty] == [("acme/rmsnorm", ("layer 0",), "layer 0 attn_norm")]
    assert found.runs <= math.log2(found.rows) + 5
    assert planted.ROWS[0] in found.explains

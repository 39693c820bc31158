"""What inspection promises of a model is what loading it then does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Ggml

from rapid_llm.engine.explain import Binding, table
from rapid_llm.engine.inspection import planned_rows
from rapid_llm.engine.loading import open_model, read_config
from rapid_llm.engine.options import PAGE_SIZE, EngineOptions
from rapid_llm.kernels import use_backend
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.errors import TensorSetError
from rapid_llm.models.opening import open_source
from rapid_llm.models.weights import load_weights
from tests.models import tiny

pytest.importorskip("transformers")

from tests.models import hf_tiny, test_quantised_models

CPU = torch.device("cpu")


def really(source: object, config: object, options: EngineOptions) -> set[tuple[str, str, str]]:
    """(sizes, op with scheme and features, row) of a decoder whose weights are loaded."""
    dtype = torch.float32
    weights = load_weights(source, config, device=CPU, dtype=dtype, quantization=options.quantization)
    decoder = Decoder(config, weights, device=CPU, dtype=options.dtype, page_size=PAGE_SIZE)
    return {(b.where, b.what, b.row) for b in (Binding.of(*bound) for bound in decoder.bindings())}


def planned(source: object, config: object, options: EngineOptions) -> set[tuple[str, str, str]]:
    return {(b.where, b.what, b.row) for b in planned_rows(source, config, options, CPU)}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe", "phi3"])
def test_families(tmp_path: Path, family: str) -> None:
    """Catches an op, a window, experts or a kind of linear layer that the plan leaves out or adds."""
    made = hf_tiny.make(tmp_path, family)
    source = open_source(made.folder)
    config = read_config(source)
    options = EngineOptions(dtype="float32")
    with use_backend("native"):  # no kernel is compiled for a choice that is only compared
        assert planned(source, config, options) == really(source, config, options)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_on_load(tmp_path: Path, quantization: str) -> None:
    """Catches a plan for dense weights where the option makes others of them."""
    made = hf_tiny.make(tmp_path, "llama")
    options = EngineOptions(dtype="float32", quantization=quantization)
    source = open_source(made.folder)
    found = planned(source, read_config(source), options)
    assert found == really(source, read_config(source), options)
    assert any(quantization in what for _, what, _ in found)


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    """Catches a plan that cannot unpack a checkpoint of codes, or that takes them for plain numbers."""
    whole = tmp_path / "dense"
    whole.mkdir()
    folder = tmp_path / "gptq"
    made = hf_tiny.make(whole, "llama")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    test_quantised_models.rewrite(made, folder, test_quantised_models.gptq, config)
    loaded, _ = test_quantised_models.load(folder)
    source, options = open_source(folder), EngineOptions(dtype="float32")
    found = planned(source, loaded, options)
    assert found == really(source, loaded, options)
    assert any("int4_group32" in what for _, what, _ in found)


def test_a_gguf_file_of_mixed_types(tmp_path: Path) -> None:
    """Catches a plan by the first layer alone: the types of a GGUF file may differ from layer to layer."""
    types = {"blk.1.ffn_down.weight": Ggml.Q8_0, "blk.1.attn_v.weight": Ggml.Q8_0}
    model = tiny.make(tmp_path / "m.gguf", tiny.qwen3(), quant=Ggml.Q4_0, types=types)
    opened = open_source(model.path)
    config = read_config(opened)
    options = EngineOptions(dtype="float32")
    with use_backend("native"):
        found = planned(opened, config, options)
        assert found == really(opened, config, options)
    assert {what.split()[1] for _, what, _ in found if what.startswith("linear")} == {"q4_0", "q8_0", "unquantized"}


@pytest.mark.model
def test_the_default_model(model_path: Path) -> None:
    """Catches rows that depend on what the plan doesn't know of the weights."""
    opened = open_model(model_path)
    options = EngineOptions()
    bindings = planned_rows(opened.source, opened.config, options, CPU)
    found = {(b.where, b.what, b.row) for b in bindings}
    assert found == really(opened.source, opened.config, options)
    assert all(len(row) == 4 and all(row) for row in table(bindings))


def test_tensors_that_are_missing(tmp_path: Path) -> None:
    """Catches a plan for a model that cannot be loaded."""
    made = hf_tiny.make(tmp_path, "llama")
    source = open_source(made.folder)
    lost = "model.layers.1.mlp.down_proj.weight"
    del source._files[lost]
    with pytest.raises(TensorSetError, match=lost):
        planned(source, read_config(source), EngineOptions(dtype="float32"))

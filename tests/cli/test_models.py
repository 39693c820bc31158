"""`rapid-llm models`: what it lists, fetches and says of a model's files, in each format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from rapid_llm.models import hf, hub
from tests.cli.support import call
from tests.engine.text import trained

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
SHAPES = {
    "model.norm": (64,),
    "model.layers.0.input_layernorm": (64,),
    "model.layers.0.post_attention_layernorm": (64,),
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.k_proj": (32, 64),
    "model.layers.0.self_attn.v_proj": (32, 64),
    "model.layers.0.self_attn.o_proj": (64, 64),
    "model.layers.0.mlp.gate_proj": (96, 64),
    "model.layers.0.mlp.up_proj": (96, 64),
    "model.layers.0.mlp.down_proj": (64, 96),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("models") / "tiny")


def folder(path: Path) -> Path:
    """A model in the layout of Hugging Face."""
    tokenizer = trained.byte_level("smollm")
    vocab = tokenizer.get_vocab_size()
    trained.folder(path, tokenizer, {"config.json": {**CONFIG, "vocab_size": vocab}})
    shapes = {**SHAPES, "model.embed_tokens": (vocab, 64)}
    save_file(
        {f"{n}.weight": torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}, path / "model.safetensors"
    )
    return path


def test_inspect_a_folder(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches figures that are not the files', a tokenizer that is not read, and ops without their rows."""
    result = call("models", "inspect", str(made), "--device", "cpu", "--json", capsys=capsys)
    data = json.loads(result.out)
    assert (result.status, data["problems"], data["format"]) == (0, [], "safetensors")
    count = sum(torch.Size(s).numel() for s in SHAPES.values()) + data["config"]["vocab_size"] * 64
    assert (data["parameters"], data["bytes"]) == (count, 2 * count)
    assert data["tensor_types"] == {"bfloat16": len(SHAPES) + 1}
    assert data["config"]["chat_template"] == data["tokenizer"]["chat_template"] == trained.CHATML
    linears = {op["what"] for op in data["ops"] if op["op"] == "linear"}
    vocab = data["config"]["vocab_size"]
    assert linears == {
        f"linear unquantized {s}" for s in ("64 -> 128", "64 -> 64", "64 -> 192", "96 -> 64", f"64 -> {vocab}")
    }
    assert all(op["row"] and op["why"] for op in data["ops"])
    assert {"attention.decode", "attention.prefill", "embedding", "rmsnorm"} < {op["op"] for op in data["ops"]}
    text = call("models", "inspect", str(made), "--device", "cpu", capsys=capsys).out
    assert "model.layers.*.mlp.down_proj.weight" in text
    assert "native/attention.prefill" in text


def test_inspect_as_it_would_be_loaded(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches options of loading that inspection takes and doesn't heed."""
    result = call("models", "inspect", str(made), "--device", "cpu", "--quantization", "int8", "--json", capsys=capsys)
    schemes = {op["what"].split()[1] for op in json.loads(result.out)["ops"] if op["op"] == "linear"}
    assert schemes == {"int8_channel", "unquantized"}
    result = call("models", "inspect", str(made), "--quantization", "int3", capsys=capsys)
    assert (result.status, "quantization='int3' is not known" in result.err) == (2, True)


def test_inspect_says_why_a_model_cannot_run(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a model that inspection passes and loading refuses; what can be told of it is told all the same."""
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    (tmp_path / "tokenizer.json").unlink()
    result = call("models", "inspect", str(tmp_path), "--device", "cpu", "--json", capsys=capsys)
    data = json.loads(result.out)
    assert (result.status, data["config"], data["tokenizer"]) == (1, None, None)
    assert len(data["tensors"]) == len(SHAPES) + 1
    assert "'mamba' is not supported" in data["problems"][0]
    assert "holds no tokenizer.json" in data["problems"][1]
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    result = call("models", "inspect", str(tmp_path), "--device", "cpu", capsys=capsys)
    assert result.status == 1
    assert "cannot run" in result.out
    assert "has shape" in result.out


@pytest.mark.model
def test_inspect_the_default_model(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches figures that are not the file's."""
    result = call("models", "inspect", str(model_path), "--json", capsys=capsys)
    data = json.loads(result.out)
    assert result.status == 0
    assert data["problems"] == []
    assert data["tensor_types"] == {"Q4_1": 210, "float32": 61, "Q8_0": 1}
    assert (data["config"]["num_layers"], data["config"]["hidden_size"]) == (30, 576)
    assert (data["tokenizer"]["pre"], data["tokenizer"]["end_ids"]) == ("smollm", [2])
    assert len(data["tensors"]) == 272
    assert {"name": "blk.*.attn_q.weight", "count": 30, "type": "Q4_1", "shape": [576, 576], "bytes": 6220800} in data[
        "parts"
    ]
    text = call("models", "inspect", str(model_path), "--tensors", capsys=capsys).out
    assert "blk.29.attn_q.weight" in text
    assert "a chat template" in text


def test_models_of_the_hub_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a list that knows nothing of the hub's cache, and one that asks online."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    storage = tmp_path / "models--org--one"
    (storage / "refs").mkdir(parents=True)
    (storage / "refs" / "main").write_text("c" * 40)
    folder(storage / "snapshots" / ("c" * 40))
    listed = json.loads(call("models", "list", "--json", capsys=capsys).out)
    one = next(m for m in listed if m["name"] == "org/one")
    assert (one["here"], one["path"]) == (True, str(storage / "snapshots" / ("c" * 40)))
    assert one["bytes"] == sum(p.stat().st_size for p in Path(one["path"]).iterdir())
    assert "org/one" in call("models", "list", capsys=capsys).out
    result = call("models", "inspect", "org/one", "--device", "cpu", capsys=capsys)
    assert (result.status, "llama" in result.out) == (0, True)


def test_pull_an_id(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an id or a load format that doesn't reach the hub; a path that cannot be used as the model."""
    asked = []

    def fetch(model: hf.HubId, *, load_format: str) -> Path:
        asked.append((str(model), load_format))
        return tmp_path

    monkeypatch.setattr(hub, "fetch_from_hub", fetch)
    result = call("models", "pull", "org/one@v1", "--load-format", "pt", capsys=capsys)
    assert (result.status, result.out, asked) == (0, f"{tmp_path}\n", [("org/one@v1", "pt")])

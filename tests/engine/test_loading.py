"""From a folder, as `transformers` writes one, to generated text: configuration, tokenizer and weights fit together."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from rapid_llm.engine.llm import LLM
from rapid_llm.engine.loading import open_model
from rapid_llm.engine.options import QUANTIZATIONS, EngineOptions
from rapid_llm.engine.params import SamplingParams
from rapid_llm.engine.text.tokenizer import Tokenizer
from rapid_llm.models import quantize
from rapid_llm.models.errors import MetadataError, TensorSetError, UnsafeWeightsError
from tests.engine.text import trained

transformers = pytest.importorskip("transformers")

PROMPTS = ("The quick brown", "def add(a, b):\n", "敏捷 🙂")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random weights, in three shards, with a tokenizer and an end id of its own."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    tokenizer = trained.byte_level("llama-bpe")
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 11,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=tokenizer.token_to_id("<s>"),
        eos_token_id=tokenizer.token_to_id("</s>"),
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")]
    model.save_pretrained(path, max_shard_size="150KB")
    return trained.folder(path, tokenizer)


def test_a_folder_of_transformers_gives_its_tokens(folder: Path) -> None:
    """Catches shards, tied heads, BOS or end ids lost between the files; greedy ids are those of transformers."""
    assert len(list(folder.glob("*.safetensors"))) > 1
    llm = LLM(folder, dtype="float32", device="cpu", kv_cache_tokens=128)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert llm.tokenizer.end_ids == set(model.generation_config.eos_token_id)
    padding = list(range(llm.tokenizer.vocab_size, model.config.vocab_size))
    for prompt in PROMPTS:
        ids = llm.tokenizer.encode(prompt)
        found = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, suppress_tokens=padding)
        want = found[0, len(ids) :].tolist()
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=24))
        ended = [] if output.outputs[0].finish_reason == "length" else want[-1:]
        assert [*output.outputs[0].token_ids, *ended][: len(want)] == want, prompt


def test_what_the_files_say_is_in_the_configuration(folder: Path) -> None:
    """Catches a template, end id or number of tokens that stays behind in one of five files."""
    opened = open_model(folder)
    assert opened.config.chat_template == opened.tokenizer.chat_template == trained.CHATML
    assert opened.config.vocab_size == opened.config.num_tokens + 11 == opened.tokenizer.vocab_size + 11
    assert set(opened.config.eos_token_ids) == opened.tokenizer.end_ids
    assert opened.config.add_bos
    assert opened.config.name == folder.name


def test_pickled_weights_load_alike_where_asked(folder: Path, tmp_path: Path) -> None:
    """Catches `load_format` that doesn't reach the files: refused by default, equal logits' ids when asked for."""
    weights = {name: source.clone() for name, source in _tensors(folder).items()}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UnsafeWeightsError, match="load_format='pt'"):
        LLM(tmp_path, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    both = [
        LLM(path, dtype="float32", device="cpu", kv_cache_tokens=128, load_format="pt").generate(PROMPTS[0], params)
        for path in (folder, tmp_path)
    ]
    assert both[0][0].outputs[0].token_ids == both[1][0].outputs[0].token_ids


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    source = open_model(folder).source
    return {name: source.data(name) for name in source.names()}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantised_on_load(folder: Path, quantization: str) -> None:
    """Catches an option that doesn't reach the weights: their bytes shrink, and the report says so."""
    dense, small = (
        LLM(folder, dtype="float32", device="cpu", kv_cache_tokens=64, quantization=wanted).explain().memory
        for wanted in (None, quantization)
    )
    assert dense["weights_quantized"] == 0
    assert 0 < small["weights_quantized"] < (dense["weights_dense"] - small["weights_dense"]) / 2


def test_quantisations_are_those_of_the_weights() -> None:
    """Catches a quantisation that the options refuse or the loader doesn't know: the two tables are one list."""
    assert tuple(quantize.QUANTIZATIONS) == QUANTIZATIONS
    with pytest.raises(ValueError, match="quantization='int3' is not known; use one of int8, int4, fp8, or None"):
        EngineOptions(quantization="int3")
    with pytest.raises(ValueError, match="load_format='bin' is not known; use one of auto, pt"):
        EngineOptions(load_format="bin")


def test_a_folder_that_is_not_whole(tmp_path: Path, folder: Path) -> None:
    """Catches a bare FileNotFoundError; the message names what is missing."""
    with pytest.raises(TensorSetError, match="holds no weights"):
        open_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((next(iter(folder.glob("*.safetensors")))).read_bytes())
    with pytest.raises(MetadataError, match=r"holds weights and no config\.json"):
        open_model(tmp_path)


def test_tokens_without_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches an added token whose id would read past the embedding table, and a vocabulary of another model."""
    made = trained.byte_level("smollm")
    path = trained.folder(tmp_path, made)
    limit = made.get_vocab_size() - 1
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.from_folder(path, limit=limit)
    assert "no rows for them: <think>" in caplog.text
    assert tokenizer.vocab_size == limit
    assert max(tokenizer.encode("a<think>b")) < limit
    with pytest.raises(MetadataError, match="tokens and the model 300 rows: they are not of one model"):
        Tokenizer.from_folder(trained.folder(tmp_path, made, eos_token=None, bos_token=None), limit=300)


def test_a_repeated_key_of_a_configuration(folder: Path, tmp_path: Path) -> None:
    """Catches the second of two equal keys of config.json winning."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = json.dumps(json.loads((folder / "config.json").read_text()))
    (tmp_path / "config.json").write_text(text[:-1] + ', "hidden_size": 32}')
    with pytest.raises(MetadataError, match=r"config.json: the key 'hidden_size' appears twice"):
        open_model(tmp_path)

"""Loading Hugging Face's checkpoints: names, ties, parts of other models, a set of tensors that must fit exactly."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import TensorSetError, UnsupportedTensorError
from rapid_llm.models.weights import ModelWeights, load_weights

CPU = torch.device("cpu")
HIDDEN, WIDE, HEADS, KV, DIM, VOCAB, EXPERTS = 8, 12, 4, 2, 4, 10, 3


class Tensors:
    """A `TensorSource` over a dictionary."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held
        self.path = Path("checkpoint")

    def names(self) -> Collection[str]:
        return self.held.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.held[name].shape)

    def dtype(self, name: str) -> str:
        return str(self.held[name].dtype).removeprefix("torch.")

    def data(self, name: str) -> torch.Tensor:
        return self.held[name]


def config(model_type: str = "llama", **changes: Any) -> ModelConfig:
    stated = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
    }
    return ModelConfig.from_hf({**stated, **changes})


def numbers(*shape: int) -> torch.Tensor:
    """Different for every element and shape, and no two neighbours alike."""
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape).sin() + len(shape) + shape[0] / 8


def checkpoint(before: str = "model.") -> dict[str, torch.Tensor]:
    """A Llama of one layer without a head."""
    at = f"{before}layers.0."
    return {
        f"{before}embed_tokens.weight": numbers(VOCAB, HIDDEN),
        f"{before}norm.weight": numbers(HIDDEN),
        f"{at}input_layernorm.weight": numbers(HIDDEN) + 1,
        f"{at}post_attention_layernorm.weight": numbers(HIDDEN) + 2,
        f"{at}self_attn.q_proj.weight": numbers(HEADS * DIM, HIDDEN),
        f"{at}self_attn.k_proj.weight": numbers(KV * DIM, HIDDEN) + 1,
        f"{at}self_attn.v_proj.weight": numbers(KV * DIM, HIDDEN) + 2,
        f"{at}self_attn.o_proj.weight": numbers(HIDDEN, HEADS * DIM),
        f"{at}mlp.gate_proj.weight": numbers(WIDE, HIDDEN) + 1,
        f"{at}mlp.up_proj.weight": numbers(WIDE, HIDDEN) + 2,
        f"{at}mlp.down_proj.weight": numbers(HIDDEN, WIDE),
    }


def load(held: dict[str, torch.Tensor], of: ModelConfig, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(Tensors(held), of, device=CPU, dtype=dtype)


def test_rows_are_fused_and_never_reordered() -> None:
    """E27. Catches GGUF's un-permute applied to a checkpoint that was never permuted, and parts in another order."""
    held = checkpoint()
    (layer,) = load(held, config(tie_word_embeddings=True)).layers
    names = ("q_proj", "k_proj", "v_proj")
    assert torch.equal(layer.qkv.data, torch.cat([held[f"model.layers.0.self_attn.{n}.weight"] for n in names]))
    assert layer.gate_up is not None
    assert torch.equal(
        layer.gate_up.data, torch.cat([held[f"model.layers.0.mlp.{n}.weight"] for n in ("gate_proj", "up_proj")])
    )
    assert torch.equal(layer.attn_norm, held["model.layers.0.input_layernorm.weight"])
    assert torch.equal(layer.ffn_norm, held["model.layers.0.post_attention_layernorm.weight"])


@pytest.mark.parametrize("before", ["model.", "language_model.model.", "model.language_model."])
def test_a_language_model_is_found_within_another(before: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a text model that is missed below a model of images, or images' tensors that pass unsaid."""
    held = checkpoint(before)
    alone = before == "model."
    if not alone:
        held |= {"vision_tower.a.weight": numbers(2, 2), "model.multi_modal_projector.b": numbers(2)}
    with caplog.at_level(logging.WARNING):
        weights = load(held, config(tie_word_embeddings=True))
    assert torch.equal(weights.embedding.data, held[f"{before}embed_tokens.weight"])
    assert ("2 tensors of images" in caplog.text) == (not alone)


def test_images_tensors_beside_a_plain_language_model_are_refused() -> None:
    """Catches tensors passed over by name where no other model explains them."""
    with pytest.raises(TensorSetError, match=r"no part of a llama model takes vision_tower\.a\.weight"):
        load({**checkpoint(), "vision_tower.a.weight": numbers(2, 2)}, config(tie_word_embeddings=True))


def test_frequencies_that_can_be_computed_are_passed_over() -> None:
    """Catches an old Llama checkpoint refused for its buffers."""
    load({**checkpoint(), "model.layers.0.self_attn.rotary_emb.inv_freq": numbers(2)}, config(tie_word_embeddings=True))


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_without_a_head(tied: bool) -> None:
    """E22. Catches an untied model that runs with the embedding for its head, and a tied one that is refused."""
    if tied:
        weights = load(checkpoint(), config(tie_word_embeddings=True))
        assert weights.head is weights.embedding
    else:
        with pytest.raises(TensorSetError, match=r"'lm_head\.weight' is missing.*tie_word_embeddings = false"):
            load(checkpoint(), config(tie_word_embeddings=False))


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_with_a_head(tied: bool, equal: bool, caplog: pytest.LogCaptureFixture) -> None:
    """E21. Catches the head in the file passed over in silence: it is the model's; where the configuration ties it, one
    warning says which of the two is used, and equal tensors are held once."""
    head = numbers(VOCAB, HIDDEN) + (0 if equal else 1)
    with caplog.at_level(logging.WARNING):
        weights = load({**checkpoint(), "lm_head.weight": head}, config(tie_word_embeddings=tied))
    assert torch.equal(weights.head.data, head)
    assert (weights.head is weights.embedding) == (tied and equal)
    assert len(caplog.records) == int(tied)
    if tied:
        assert "tie_word_embeddings is true" in caplog.text
        assert ("it equals the embedding" in caplog.text) == equal


def test_transformers_has_the_same_rule_for_a_head_that_differs(tmp_path: Path) -> None:
    """Catches E21 resolved against what transformers runs for the same folder."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    from tests.models import hf_tiny

    made = hf_tiny.make(tmp_path, "llama")
    (folder := tmp_path / "with head").mkdir()
    held: dict[str, torch.Tensor] = {}
    for part in sorted(tmp_path.glob("*.safetensors")):
        held |= load_file(part)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((tmp_path / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = load(held, ModelConfig.from_hf(made.stated))
    assert torch.equal(ours.head.data, theirs.lm_head.weight)


def test_gemmas_norms_are_completed_and_only_those() -> None:
    """Catches norms that lack the one, have it twice, or a rounding before it is added."""
    at = "model.layers.0."
    held = checkpoint()
    extra = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    held |= {f"{at}{name}.weight": numbers(HIDDEN) + i for i, name in enumerate(extra)}
    held |= {f"{at}self_attn.{n}_norm.weight": numbers(DIM) for n in "qk"}
    held = {name: weight.bfloat16() for name, weight in held.items()}
    weights = load(held, config("gemma3_text"), torch.bfloat16)
    (layer,) = weights.layers
    assert set(layer.norms()) == {"attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm"}
    for found, name in (
        (weights.final_norm, "model.norm"),
        (layer.ffn_norm, f"{at}{extra[0]}"),
        (layer.post_ffn_norm, f"{at}{extra[1]}"),
        (layer.post_attn_norm, f"{at}post_attention_layernorm"),
        (layer.q_norm, f"{at}self_attn.q_norm"),
    ):
        assert found is not None
        assert torch.equal(found, 1 + held[f"{name}.weight"].float())


def experts(style: str) -> tuple[dict[str, torch.Tensor], ModelConfig]:
    """The same experts under each of the names that checkpoints give them."""
    held = {n: w for n, w in checkpoint().items() if ".mlp." not in n}
    gate, up = numbers(EXPERTS, WIDE, HIDDEN), numbers(EXPERTS, WIDE, HIDDEN) + 1
    down, at = numbers(EXPERTS, HIDDEN, WIDE), "model.layers.0."
    if style == "stacked":
        held |= {f"{at}mlp.experts.gate_up_proj": torch.cat((gate, up), 1), f"{at}mlp.experts.down_proj": down}
    else:
        where = "block_sparse_moe" if style == "mixtral" else "mlp"
        names = ("w1", "w3", "w2") if style == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for name, stack in zip(names, (gate, up, down), strict=True):
            held |= {f"{at}{where}.experts.{e}.{name}.weight": stack[e] for e in range(EXPERTS)}
    held[f"{at}{'block_sparse_moe' if style == 'mixtral' else 'mlp'}.gate.weight"] = numbers(EXPERTS, HIDDEN)
    return held, config("mixtral", tie_word_embeddings=True, num_local_experts=EXPERTS, num_experts_per_tok=2)


@pytest.mark.parametrize("style", ["mixtral", "each", "stacked"])
def test_experts_are_found_under_every_name(style: str) -> None:
    """Catches gate and up exchanged (Mixtral's w1 and w3), experts in another order, and a form that is not read."""
    (layer,) = load(*experts(style)).layers
    assert layer.experts is not None
    assert (layer.gate_up, layer.down) == (None, None)
    gate = numbers(EXPERTS, WIDE, HIDDEN)
    assert torch.equal(layer.experts.gate_up, torch.cat((gate, gate + 1), 1))
    assert torch.equal(layer.experts.down, numbers(EXPERTS, HIDDEN, WIDE))
    assert torch.equal(layer.experts.router.data, numbers(EXPERTS, HIDDEN))


def test_a_missing_expert_is_named() -> None:
    """Catches memory left unwritten for an expert that the file lacks."""
    held, of = experts("mixtral")
    del held["model.layers.0.block_sparse_moe.experts.1.w3.weight"]
    with pytest.raises(TensorSetError, match=r"experts\.1\.w3\.weight' is missing"):
        load(held, of)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model.layers.0.self_attn.k_proj.weight": None}, TensorSetError, "without .*k_proj.weight: the group"),
        ({"model.layers.0.self_attn.q_proj.bias": numbers(HEADS * DIM)}, TensorSetError, "takes .*q_proj.bias"),
        ({"model.layers.1.input_layernorm.weight": numbers(HIDDEN)}, TensorSetError, r"takes model\.layers\.1"),
        ({"model.layers.0.mlp.down_proj.weight": numbers(WIDE, HIDDEN)}, TensorSetError, r"\(12, 8\), not \(8, 12\)"),
        ({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, UnsupportedTensorError, "the type int32"),
        (
            {"model.layers.0.mlp.down_proj.weight": torch.zeros(HIDDEN, WIDE, dtype=torch.int8)},
            UnsupportedTensorError,
            "int8",
        ),
        ({"model.embed_tokens.weight": None}, TensorSetError, "no tensor is an embedding table"),
        ({"language_model.model.embed_tokens.weight": numbers(VOCAB, HIDDEN)}, TensorSetError, "and language_model"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, torch.Tensor | None], error: type[Exception], match: str) -> None:
    """Catches tensors lost, left over, of another shape or of a type that no op reads."""
    held = {name: weight for name, weight in {**checkpoint(), **change}.items() if weight is not None}
    with pytest.raises(error, match=match):
        load(held, config(tie_word_embeddings=True))


def test_progress_counts_every_tensor() -> None:
    """Catches a bar that stops short or runs past its end."""
    seen: list[tuple[int, int]] = []
    held = checkpoint()
    load_weights(
        Tensors(held),
        config(tie_word_embeddings=True),
        device=CPU,
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i + 1, len(held)) for i in range(len(held))]

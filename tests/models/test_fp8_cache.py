"""A decoder over a cache of fp8: what it keeps, and what it makes of what is kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.weights import load_weights
from rapid_llm.verify.ulp import E4M3, half_ulp
from tests.models import tiny
from tests.models.paged import PAGE, PagedRunner
from tests.models.reference_decoder import _norm, _rotate

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def build(model: tiny.TinyModel) -> Decoder:
    file = GGUFFile(model.path)
    config = ModelConfig.from_gguf(file)
    weights = load_weights(file, config, device=CPU, dtype=torch.float32)
    return Decoder(config, weights, device=CPU, dtype="float32", kv_dtype=E4M3)


def kept(runner: PagedRunner, layer: int, tokens: int) -> list[torch.Tensor]:
    """What the cache holds of the first sequence: keys and values (tokens, heads, dim), float64."""
    at = torch.arange(tokens)
    pages = torch.tensor(runner._pages[0])[at // PAGE]
    return [cache.double()[pages, at % PAGE] for cache in runner.kv[layer]]


def over_what_is_kept(model: tiny.TinyModel, runner: PagedRunner, ids: list[int]) -> torch.Tensor:
    """Logits in float64 where attention reads the runner's cache; raises unless that holds the rounded keys and
    values."""
    weights, shape = {name: w.double() for name, w in model.weights.items()}, model.shape
    d, group, n = shape.head_dim, shape.heads // shape.kv_heads, len(ids)
    x = weights["token_embd.weight"][ids]
    for i in range(len(runner.kv)):
        part = {name.removeprefix(f"blk.{i}."): w for name, w in weights.items() if name.startswith(f"blk.{i}.")}
        h = _norm(x, part["attn_norm.weight"], shape.eps)
        q, k, v = ((h @ part[f"attn_{c}.weight"].T).view(n, -1, d) for c in "qkv")
        q, k = (torch.stack([_rotate(t[:, head], shape.theta, None) for head in range(t.shape[1])], 1) for t in (q, k))
        keys, values = kept(runner, i, n)
        for want, held in ((k, keys), (v, values)):
            want = want.clamp(-448, 448)
            assert bool(
                ((held - want).abs() <= half_ulp(want.abs() * (1 + 1e-4), E4M3) + 1e-4 * want.abs() + 1e-5).all()
            )
        scores = torch.einsum("qhd,khd->hqk", q, keys.repeat_interleave(group, 1)) / math.sqrt(d)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        found = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values.repeat_interleave(group, 1))
        x = x + found.flatten(1) @ part["attn_output.weight"].T
        h = _norm(x, part["ffn_norm.weight"], shape.eps)
        gate, up = h @ part["ffn_gate.weight"].T, h @ part["ffn_up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ part["ffn_down.weight"].T
    head = weights.get("output.weight", weights["token_embd.weight"])
    return _norm(x, weights["output_norm.weight"], shape.eps) @ head.T


def test_prefill_and_decode_equal_float64_over_the_rounded_cache(tmp_path: Path) -> None:
    """Catches: prefill that attends to keys before they are rounded, decode that reads another number than was stored,
    a cache that was bound for another dtype; the bound is fp32's, as of a cache in fp32."""
    model = tiny.make(tmp_path / "m.gguf")
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    runner = PagedRunner(build(model), 1, 48)
    assert {cache.dtype for layer in runner.kv for cache in layer} == {E4M3}
    chunks = [ids[:17], ids[17:35], *([token] for token in ids[35:])]
    got = torch.cat([runner.logits([(0, chunk)]) for chunk in chunks]).double()
    want = over_what_is_kept(model, runner, ids)
    assert float((got - want).abs().max() / want.abs().max()) < 2e-5

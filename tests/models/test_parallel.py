"""Tensor parallelism: the parts of matrices, what is refused, and that ranks together compute what one does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Ggml

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8
from rapid_llm.models import decoder as decoder_module
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.errors import UnsupportedTensorError
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.parallel import Cut, ParallelError, Ranks, Shard, check, usable_counts
from rapid_llm.models.quant import dequantize
from rapid_llm.models.shapes import shape_config
from rapid_llm.models.weights import ModelWeights, load_weights
from rapid_llm.verify.formats import random_blocks
from tests import warm
from tests.models import parallel_worker, reference_decoder, tiny
from tests.models.parallel_worker import PROMPT, STEPS, Job

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TIMEOUT_S = 120
BIG = tiny.Shape(heads=6, kv_heads=6, wide=192, hidden=96, vocab=97)
"""Heads and features that two and three ranks divide, at borders of blocks of 32; an odd vocabulary."""

SHAPES: dict[str, tuple[tiny.Shape, Ggml]] = {
    "llama-tied": (BIG, Ggml.F32),
    "qwen2-bias": (replace(BIG, arch="qwen2", tied=False), Ggml.F32),
    "qwen3-norms": (replace(BIG, arch="qwen3", head_dim=32), Ggml.F32),
    "llama-q4_1": (replace(BIG, head_dim=32, tied=False), Ggml.Q4_1),
}
HF_SIZES = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 192}
HF: dict[str, tuple[str, dict[str, int], str | None]] = {
    "hf-bias": ("llama-bias", {"vocab_size": 97}, None),
    "hf-fused": ("phi3", {}, None),
    "hf-post-norms": ("gemma2", {}, None),
    "hf-experts": ("qwen3-moe", {"moe_intermediate_size": 48}, None),
    "hf-int8": ("llama", {}, "int8"),
    "hf-int4": ("llama", {"head_dim": 64, "intermediate_size": 384}, "int4"),
}
"""Families of `hf_tiny`, what is changed, and the quantisation at load."""

PROCESSES = {2: ("llama-tied", "qwen2-bias", "qwen3-norms", "llama-q4_1"), 3: ("llama-tied", "llama-q4_1")}
"""What is computed by how many processes; the rest by threads."""


@pytest.fixture(autouse=True)
def _no_build_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a decoder's start is the look for what to build side by side; here nothing is."""
    monkeypatch.setattr(decoder_module, "prepare", lambda keys: None)


class Threads(Ranks):
    """Ranks that are threads of one process, and exchange tensors through `posts`."""

    def __init__(self, index: int, posts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(index, len(posts))
        self.posts, self.barrier = posts, barrier

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.posts[self.index] = tensor.clone()
        self.barrier.wait(TIMEOUT_S)
        found = list(self.posts)
        self.barrier.wait(TIMEOUT_S)
        return found

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._all(tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(tensor), 1)


def by_threads(job: Job, count: int, ids: list[int]) -> dict[str, torch.Tensor]:
    posts, barrier = [torch.empty(0)] * count, threading.Barrier(count)
    decoders = [parallel_worker.build(job, Threads(index, posts, barrier)) for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda decoder: parallel_worker.run(decoder, ids), decoders))
    assert all(torch.equal(found[0]["logits"], other["logits"]) for other in found)
    return found[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Job, Any]]:
    """Every job, with the `TinyModel` of those that come from GGUF files."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, tuple[Job, Any]] = {}
    for name, (shape, quant) in SHAPES.items():
        model = tiny.make(folder / f"{name}.gguf", shape, quant=quant, seed=len(made))
        made[name] = (Job(name, str(model.path)), model)
    if importlib.util.find_spec("transformers") is not None:
        from tests.models import hf_tiny

        for name, (family, changes, quantization) in HF.items():
            path = folder / name
            hf_tiny.make(path, family, seed=len(made), **{**HF_SIZES, **changes})
            made[name] = (Job(name, str(path), quantization), None)
    return made


@pytest.fixture(scope="module")
def together(
    models: dict[str, tuple[Job, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    """What groups of processes compute: one start of each for all tests."""
    folder = tmp_path_factory.mktemp("groups")
    workers = {}
    for ranks, names in PROCESSES.items():
        manifest = folder / f"manifest-{ranks}"
        manifest.write_text(parallel_worker.manifest([models[name][0] for name in names]))
        for rank in range(ranks):
            workers[ranks, rank] = subprocess.Popen(
                [
                    *(warm.executable(), "-m", "tests.models.parallel_worker", str(rank), str(ranks)),
                    *(str(folder / f"group-{ranks}"), str(manifest), str(folder / f"out-{ranks}")),
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    try:
        texts = {place: worker.communicate(timeout=TIMEOUT_S)[0] for place, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    for (ranks, rank), text in texts.items():
        assert text.rstrip().endswith("good"), f"rank {rank} of {ranks}:\n{text}"
    return {ranks: torch.load(folder / f"out-{ranks}") for ranks in PROCESSES}


def bound(c: ModelConfig, logits: torch.Tensor) -> float:
    """How far two orders of summation may be apart, in the units of the logits.

    A sum of n products in fp32 is off by at most n * 2**-24 times the sum of their magnitudes (Higham 2002, 4.2), which
    is about sqrt(n) times the result where signs are random, as they are here. To first order the errors of the
    matrices in the longest path add up, in units of the largest logit; norms between them keep magnitudes. Both sides
    err, hence 2.
    """
    layer = [c.hidden_size, c.q_size, c.hidden_size, max(c.intermediate_size, c.expert_size)]
    terms = [*(layer * c.num_layers), c.hidden_size]
    return float(2 * 2.0**-24 * sum(n**1.5 for n in terms) * logits.abs().max())


def check_group(job: Job, model: Any, group: dict[str, torch.Tensor]) -> None:
    """Hold what a group computed against the whole model, and against the slow decoder where it has the weights."""
    decoder = parallel_worker.build(job)
    ids = parallel_worker.ids_of(job, decoder.config.vocab_size)
    alone = parallel_worker.run(decoder, ids)
    within = bound(decoder.config, alone["logits"])
    assert group["logits"].shape == (len(ids), decoder.config.vocab_size)
    assert (group["logits"] - alone["logits"]).abs().max() <= within
    assert group["greedy"].tolist() == alone["greedy"].tolist()
    if model is not None:
        oracle = reference_decoder.logits(model.weights, model.shape, ids)
        assert (group["logits"] - oracle).abs().max() <= within
        assert group["greedy"].tolist() == reference_decoder.greedy(model.weights, model.shape, ids[:PROMPT], STEPS)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in PROCESSES.items() for name in names])
def test_processes_compute_what_one_does(
    name: str, ranks: int, models: dict[str, tuple[Job, Any]], together: dict[int, dict[str, dict[str, torch.Tensor]]]
) -> None:
    """E91. Catches: rows or heads of another rank, a block cut in two, a sum that is not made or made twice, a padded
    row of the vocabulary that wins, ids of another rank's rows, ranks that differ."""
    job, model = models[name]
    check_group(job, model, together[ranks][name])


@pytest.mark.parametrize("name", ["hf-bias", "hf-fused", "hf-post-norms", "hf-experts"])
def test_every_kind_of_layer_is_cut(name: str, models: dict[str, tuple[Job, Any]]) -> None:
    """Catches: a bias that each rank adds, q, k and v of a fused tensor cut as one, a norm before the sum, experts
    that are whole on each rank."""
    if name not in models:
        pytest.skip("transformers, which makes this model, is not installed")
    job, _ = models[name]
    config, _ = parallel_worker.load(job, 0, 1)
    check_group(job, None, by_threads(job, 2, parallel_worker.ids_of(job, config.vocab_size)))


@pytest.mark.parametrize("name", [*SHAPES, *HF])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_part_that_is_read_is_the_part_of_the_whole(
    name: str, ranks: int, models: dict[str, tuple[Job, Any]]
) -> None:
    """Catches: rotary pairs undone for another number of heads, weights that are quantised by the range of a part."""
    if name not in models:
        pytest.skip("transformers, which makes this model, is not installed")
    job, _ = models[name]
    for rank in range(ranks):
        config, read = parallel_worker.load(job, rank, ranks)
        _, cut = parallel_worker.load(job, rank, ranks, from_whole=True)
        for (where, mine), (_, theirs) in zip(tensors(read), tensors(cut), strict=True):
            assert torch.equal(mine, theirs), where
        assert read.head.shape == (-(-config.vocab_size // ranks), config.hidden_size)


def tensors(weights: ModelWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Every matrix and every vector that is cut."""
    yield from (("embedding", weights.embedding.data), ("head", weights.head.data))
    for number, layer in enumerate(weights.layers):
        for name, (matrix, bias) in layer.linears().items():
            yield f"{name} of {number}", matrix.data
            if bias is not None:
                yield f"bias of {name} of {number}", bias
        if layer.experts is not None:
            yield from ((f"experts of {number}", part) for part in (layer.experts.gate_up, layer.experts.down))


def test_a_rank_reads_and_holds_its_part_alone(models: dict[str, tuple[Job, Any]]) -> None:
    """Catches: a rank that keeps the whole of a matrix, or shares the memory of the whole."""
    job, _ = models["llama-tied"]
    file = GGUFFile(Path(job.path))
    config = ModelConfig.from_gguf(file)

    def held(shard: Shard | None) -> int:
        weights = load_weights(file, config, device=CPU, dtype=torch.float32, shard=shard)
        matrices = [weights.embedding]
        matrices += [matrix for layer in weights.layers for matrix, _ in layer.linears().values()]
        return sum(matrix.data.untyped_storage().nbytes() for matrix in matrices)

    padding = 4 * config.hidden_size  # a row of zeros of the last rank
    assert held(Shard(config, 0, 2)) + held(Shard(config, 1, 2)) == held(None) + padding


@pytest.mark.parametrize("scheme", ["q8_0", "q4_1", "q6_k", "int8_channel", "fp8_channel", "int4_group32", FP8])
def test_pieces_of_blocks_are_the_pieces_of_what_they_mean(scheme: str) -> None:
    """Catches: scales of another rank's columns, a scale of the whole row that is left out."""
    columns, generator = 4 * FORMATS[scheme].weights, torch.Generator().manual_seed(3)
    rows = random_blocks(generator, 6, columns, scheme)
    dense = dequantize(rows, scheme)
    for start, end in ((0, columns // 4), (columns // 4, columns // 2), (columns // 2, columns)):
        piece = Cut(columns=(start, end))(rows, scheme)
        assert torch.equal(dequantize(piece.contiguous(), scheme), dense[:, start:end]), (start, end)


def test_cuts_within_a_block_are_refused(tmp_path: Path) -> None:
    """Catches: half a block read as a whole one; the message names tensor, format, block and place."""
    model = tiny.make(tmp_path / "m.gguf", tiny.Shape(wide=96), quant=Ggml.Q8_0)  # 96 / 2 = 48, 1.5 blocks
    file = GGUFFile(model.path)
    config = ModelConfig.from_gguf(file)
    with pytest.raises(UnsupportedTensorError, match=r"blk\.0\.ffn_down\.weight is q8_0, in blocks of 32 .* at 48"):
        load_weights(file, config, device=CPU, dtype=torch.float32, shard=Shard(config, 0, 2))
    with pytest.raises(UnsupportedTensorError, match="blocks of 128 rows"):
        Cut(rows=((0, 64),))(torch.zeros(128, 144, dtype=torch.uint8), FP8)


def test_heads_that_do_not_divide_are_refused() -> None:
    """SmolLM2 has 9 query and 3 key/value heads: 2 ranks are illegal, 3 legal. Catches: a head cut in two."""
    config = shape_config("smollm2-135m")
    assert usable_counts(config) == (1, 3)
    text = "tensor_parallel=2: the 9 query heads and 3 key/value heads of smollm2-135m .* for which 1, 3 work"
    with pytest.raises(ParallelError, match=text):
        check(config, 2)
    part = Shard(config, 2, 3).config
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (3, 1, 512)
    assert part.vocab_size == config.vocab_size
    with pytest.raises(ParallelError, match=r"the 1536 feed-forward features of .* for which 1, 2, 4 work"):
        check(replace(config, num_heads=40, num_kv_heads=20), 5)


def test_features_of_experts_must_divide() -> None:
    """Catches: experts left out of the check, or the dense size of a model that has only experts counted."""
    config = shape_config("qwen3-30b-a3b")
    assert usable_counts(config) == (1, 2, 4)
    assert usable_counts(replace(config, expert_size=90)) == (1, 2)
    assert usable_counts(replace(config, intermediate_size=7)) == (1, 2, 4)
    with pytest.raises(ParallelError, match="90 features of an expert"):
        check(replace(config, expert_size=90), 4)


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    """E91: 49,153 rows. Catches: a row that no rank has or two have, ranks of unequal shapes."""
    config = replace(shape_config("smollm2-1.7b"), vocab_size=49_153)
    for count in (2, 4, 32):
        table = torch.arange(49_153.0).unsqueeze(1)
        parts = [Shard(config, rank, count).cut("head")(table) for rank in range(count)]
        assert {len(part) for part in parts} == {-(-49_153 // count)}
        whole = torch.cat(parts)
        assert torch.equal(whole[:49_153], table)
        assert not whole[49_153:].any()
    few = replace(config, vocab_size=5)  # the last rank has nothing but padding
    assert [Shard(few, rank, 4).cut("head").pad for rank in range(4)] == [0, 0, 1, 2]


def test_a_place_outside_the_group_is_refused() -> None:
    """Catches: a rank beyond the last one, which would wait for ever."""
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ParallelError, match=f"rank {index} of {count}"):
            Ranks(index, count)

"""One rank of a group that computes tiny models together; run by tests, it prints `good` or fails.

python -m tests.models.parallel_worker RANK RANKS RENDEZVOUS MANIFEST OUT

MANIFEST is JSON: a list of `Job`s. Rank 0 saves to OUT, for each job by name, what `run` gives.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed

from rapid_llm.models import decoder as decoder_module
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.parallel import Ranks, Shard
from rapid_llm.models.safetensors import SafetensorsFolder
from rapid_llm.models.weights import ModelWeights, load_weights
from tests.models.paged import PagedRunner, greedy

CPU = torch.device("cpu")
PROMPT, NEXT, STEPS = 21, 3, 6
"""Tokens at once, tokens one by one behind them, and tokens of a greedy answer."""


@dataclass(frozen=True)
class Job:
    """A model's file or folder, and how it is loaded."""

    name: str
    path: str
    quantization: str | None = None


def load(job: Job, rank: int, ranks: int, *, from_whole: bool = False) -> tuple[ModelConfig, ModelWeights]:
    """The part of `rank`, by its own configuration; the whole model where there is one rank. from_whole: cut from the
    complete weights instead of read by itself."""
    path = Path(job.path)
    source = SafetensorsFolder(path) if path.is_dir() else GGUFFile(path)
    if isinstance(source, GGUFFile):
        config = ModelConfig.from_gguf(source)
    else:
        config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
    shard = None if ranks == 1 else Shard(config, rank, ranks)
    weights = load_weights(
        source,
        config,
        device=CPU,
        dtype=torch.float32,
        quantization=job.quantization,
        shard=None if from_whole else shard,
    )
    if shard is None:
        return config, weights
    return shard.config, shard.weights(weights) if from_whole else weights


def build(job: Job, ranks: Ranks | None = None) -> Decoder:
    """The decoder of one of `ranks`, or of the whole model."""
    config, weights = load(job, 0, 1) if ranks is None else load(job, ranks.index, ranks.count)
    return Decoder(config, weights, device=CPU, dtype="float32", ranks=ranks)


def ids_of(job: Job, vocab: int) -> list[int]:
    """Random ids, the first and the last of the vocabulary among them."""
    generator = torch.Generator().manual_seed(len(job.name))
    ids: list[int] = torch.randint(0, vocab, (PROMPT + NEXT,), generator=generator).tolist()
    return [0, vocab - 1, *ids[2:]]


def run(decoder: Decoder, ids: list[int]) -> dict[str, Tensor]:
    """logits: (len(ids), vocab), a prompt and then one by one. greedy: ids that continue the prompt."""
    runner = PagedRunner(decoder, 1, len(ids))
    parts = [runner.logits([(0, ids[:PROMPT])])]
    parts += [runner.logits([(0, [token])]) for token in ids[PROMPT:]]
    return {"logits": torch.cat(parts), "greedy": torch.tensor(greedy(decoder, ids[:PROMPT], STEPS)[0])}


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    decoder_module.prepare = lambda keys: None  # which only saves time where there is something to build
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
    found: dict[str, dict[str, Tensor]] = {}
    for fields in json.loads(Path(sys.argv[4]).read_text()):
        job = Job(**fields)
        decoder = build(job, Ranks(rank, ranks))
        found[job.name] = run(decoder, ids_of(job, decoder.config.vocab_size))
        every: list[Tensor] = [torch.empty_like(found[job.name]["logits"]) for _ in range(ranks)]
        distributed.all_gather(every, found[job.name]["logits"])
        assert all(torch.equal(every[0], other) for other in every), f"{job.name}: ranks disagree on the logits"
    if rank == 0:
        torch.save(found, sys.argv[5])
    distributed.barrier()
    distributed.destroy_process_group()
    print("good")


def manifest(jobs: list[Job]) -> str:
    return json.dumps([asdict(job) for job in jobs])


if __name__ == "__main__":
    main()

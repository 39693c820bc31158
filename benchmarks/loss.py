"""SmolLM2's mean loss on a text, beside transformers on the dequantised fp32 weights: `python -m benchmarks.loss`.

The loss is the mean of -log p(token | all before it) in nats over a text of this repository, through the whole engine:
as `prompt_logprobs` gives it. fp32 has to agree within 1e-4. For every other dtype, and for weights quantised on load,
the difference has a stated bound: twice what was measured when it was set, or more. Needs the `bench` extra.

`--write-reference` keeps what transformers finds, token by token, for the test that runs without it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from rapid_llm.bench import Figure

from . import common

MODULE = "benchmarks.loss"
ROOT = Path(__file__).resolve().parent.parent
TEXT: Final = ROOT / "tests/data/loss_text.txt"
REFERENCE: Final = ROOT / "tests/data/smollm2_loss.json"

BOUNDS: Final = {"float32": 1e-4, "auto": 0.002, "bfloat16": 0.006, "float16": 1e-4}
"""dtype -> nats by which the mean loss may differ from transformers in fp32, the file's own Q4_1 weights throughout."""

QUANTIZED_BOUNDS: Final = {"int8": 0.01, "fp8": 0.05, "int4": 0.3}
"""Quantisation on load -> the same, of the dense weights in fp32."""


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(MODULE, "SmolLM2's mean loss against transformers.")
    made.add_argument("--model", default="smollm2-135m-instruct", help="a name or a GGUF file")
    made.add_argument("--tokens", type=int, default=0, help="of the text, so many first tokens (default: all)")
    made.add_argument("--write-reference", action="store_true", help=f"write {REFERENCE.relative_to(ROOT)}")
    options = made.parse_args(arguments)
    run = common.start("loss", MODULE, options)

    from rapid_llm import LLM
    from rapid_llm.models.hub import resolve_model

    from .smollm2_arms import Peer

    path = resolve_model(options.model)
    count = options.tokens or (128 if options.quick else None)
    peer = Peer.load(path)[0].model
    ids = LLM(path, device="cpu", kv_cache_tokens=64).tokenizer.encode(TEXT.read_text())[:count]
    theirs = losses_of_transformers(peer, ids)
    reference = mean(theirs)
    run.extra["text"] = {"file": str(TEXT.relative_to(ROOT)), "tokens": len(ids)}
    run.add(Figure("transformers float32", reference, "nats"))
    for dtype, bound in BOUNDS.items():
        add(run, f"rapid_llm {dtype}", losses(path, ids, dtype=dtype), reference, bound)
    with tempfile.TemporaryDirectory() as folder:
        write_dense(peer, path, Path(folder))
        for quantization, bound in QUANTIZED_BOUNDS.items():
            found = losses(folder, ids, dtype="float32", quantization=quantization)
            add(run, f"rapid_llm float32, quantization {quantization}", found, reference, bound)
    if options.write_reference:
        write_reference(ids, theirs)
    return common.finish(run, f"Mean loss of SmolLM2-135M-Instruct over {len(ids)} tokens", options)


def losses(model: Path | str, ids: list[int], **options: Any) -> list[float]:
    """-log p of every token but the first, in nats, by this package."""
    from rapid_llm import LLM, SamplingParams

    llm = LLM(model, device="cpu", max_model_len=len(ids) + 16, kv_cache_tokens=len(ids) + 64, **options)
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return [-row[token].logprob for token, row in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if row]


def losses_of_transformers(model: Any, ids: list[int]) -> list[float]:
    """The same by transformers; log-softmax in float64."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    return [-value for value in chosen.squeeze(1).tolist()]


def mean(values: list[float]) -> float:
    """The mean loss."""
    return sum(values) / len(values)


def add(run: Any, name: str, found: list[float], reference: float, bound: float) -> None:
    """The mean loss of an arm, and how far it is from the reference."""
    run.add(Figure(name, mean(found), "nats"))
    run.add(Figure(f"{name}, off by", abs(mean(found) - reference), "nats", at_most=bound))


def write_dense(model: Any, path: Path, folder: Path) -> None:
    """The dequantised weights and the file's own tokenizer, as a folder that loads like any checkpoint."""
    from rapid_llm.models.gguf import GGUFFile

    # The weights are dense by now, but transformers goes on to call the model quantised, and refuses to write such.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    write_tokenizer(GGUFFile(path), folder)


def write_tokenizer(file: Any, folder: Path) -> None:
    """A `tokenizer.json` of a GGUF file's vocabulary, for text that is given as ids anyway."""
    tokens = file["tokenizer.ggml.tokens"]
    special = [i for i, kind in enumerate(file["tokenizer.ggml.token_type"]) if kind == 3]
    merges = [pair.split(" ", 1) for pair in file["tokenizer.ggml.merges"]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens)}, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))


def write_reference(ids: list[int], theirs: list[float]) -> None:
    """What the test compares with."""
    import torch
    import transformers

    note = (
        "-log p in nats of each token but the first: transformers in float32 on the weights dequantised from the file, "
        "log-softmax in float64. Written by: python -m benchmarks.loss --write-reference"
    )
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    data = {"note": note, "versions": versions, "token_ids": ids, "losses": [round(value, 7) for value in theirs]}
    REFERENCE.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    sys.exit(main())

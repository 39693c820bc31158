"""`rapid-llm models`: what is known by name, fetching it, and what is in a file."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from .support import BAD, fail, print_json, print_pairs, print_table, size


def list_models(*, json: bool) -> None:
    """Print the table of known models."""
    from rapid_llm.models import hub

    listed: list[dict[str, Any]] = []
    for model in hub.MODELS.values():
        path = hub.model_path(model)
        here = path.is_file()
        listed.append(
            {
                "name": model.name,
                "summary": model.summary,
                "license": model.license,
                "bytes": model.nbytes,
                "default": model.name == hub.DEFAULT_MODEL,
                "here": here,
                "path": str(path) if here else None,
            }
        )
    if json:
        print_json(listed)
        return
    print_table(
        ("name", "what", "license", "size", "here"),
        (
            (
                m["name"] + (" (default)" if m["default"] else ""),
                m["summary"],
                m["license"],
                size(m["bytes"]),
                m["path"] or "no",
            )
            for m in listed
        ),
    )


def pull(name: str) -> None:
    """Fetch `name`; its path goes to standard output, progress to standard error."""
    from rapid_llm.models import hub

    print(hub.pull(name))


def inspect(model: str, *, tensors: bool, json: bool) -> None:
    """Print configuration, tokenizer and tensors of a file; status 1 if this program cannot run it."""
    from rapid_llm.models.config import ModelConfig
    from rapid_llm.models.errors import ModelError
    from rapid_llm.models.gguf import GGUFFile

    path = _local(model)
    file = GGUFFile(path)
    problems: list[str] = []
    config = None
    try:
        config = ModelConfig.from_gguf(file)
    except ModelError as error:
        problems.append(str(error))
    tokenizer = _tokenizer(file, problems)
    problems += _unsupported_tensors(file)
    listed: list[dict[str, Any]] = [
        {"name": t.name, "type": t.type, "shape": list(t.shape), "bytes": t.nbytes} for t in file.tensors.values()
    ]
    if json:
        print_json(
            {
                "path": str(path),
                "bytes": file.size,
                "gguf_version": file.version,
                "config": None if config is None else asdict(config),
                "tokenizer": tokenizer,
                "tensor_types": dict(Counter(t.type for t in file.tensors.values())),
                "tensors": listed,
                "problems": problems,
            }
        )
    else:
        _show(path, file, config, tokenizer)
        if tensors:
            print_table(
                ("tensor", "type", "shape", "size"),
                ((t["name"], t["type"], " x ".join(map(str, t["shape"])), size(t["bytes"])) for t in listed),
            )
        for problem in problems:
            print(f"cannot run: {problem}")
    if problems:
        raise typer.Exit(BAD)


def _local(model: str) -> Path:
    """The file of a model, without fetching one."""
    from rapid_llm.models import hub

    if model in hub.MODELS:
        path = hub.model_path(hub.MODELS[model])
        if not path.is_file():
            fail(f"{model} is not on this machine; fetch it with: rapid-llm models pull {model}")
    return hub.resolve_model(model)


def _tokenizer(file: Any, problems: list[str]) -> dict[str, Any] | None:
    from rapid_llm.engine.text.tokenizer import Tokenizer
    from rapid_llm.models.errors import ModelError

    try:
        tokenizer = Tokenizer.from_gguf(file)
    except ModelError as error:
        problems.append(str(error))
        return None
    return {
        "model": file["tokenizer.ggml.model"],
        "pre": file["tokenizer.ggml.pre"],
        "vocab_size": tokenizer.vocab_size,
        "control_tokens": len(tokenizer.control),
        "bos_id": tokenizer.bos_id,
        "end_ids": sorted(tokenizer.end_ids),
        "add_bos": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }


def _unsupported_tensors(file: Any) -> list[str]:
    """One line for each tensor type that no op computes with."""
    from rapid_llm.models.quant import SCHEMES

    types = Counter(t.type for t in file.tensors.values() if t.type not in SCHEMES)
    return [
        f"{count} tensors have the type {name}, which no op computes with; quantise the model to {' or '.join(SCHEMES)}"
        for name, count in types.items()
    ]


def _show(path: Path, file: Any, config: Any, tokenizer: dict[str, Any] | None) -> None:
    pairs: list[tuple[str, object]] = [("file", path), ("size", f"{size(file.size)}, GGUF version {file.version}")]
    if config is not None:
        pairs += [
            ("name", config.name),
            ("architecture", config.architecture),
            ("layers", config.num_layers),
            ("hidden size", f"{config.hidden_size}, feed-forward {config.intermediate_size}"),
            ("heads", f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}"),
            ("vocabulary", f"{config.num_tokens} tokens, {config.vocab_size} rows"),
            ("context", f"{config.max_model_len} tokens"),
            ("rotary base", f"{config.rope_theta:g}"),
            ("output head", "tied to the embedding" if config.tie_word_embeddings else "its own"),
        ]
    if tokenizer is not None:
        ends = ", ".join(map(str, tokenizer["end_ids"]))
        template = "a chat template" if tokenizer["chat_template"] else "no chat template"
        pairs.append(("tokenizer", f"{tokenizer['model']}/{tokenizer['pre']}, ends at {ends or 'nothing'}, {template}"))
    types = Counter(t.type for t in file.tensors.values())
    pairs.append(("tensors", ", ".join(f"{count} {name}" for name, count in types.most_common())))
    print_pairs(pairs)

"""`rapid-llm models`: what is known by name or in the hub's cache, fetching it, and what is in a model's files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import typer

from .support import BAD, print_json, print_pairs, print_table, size, usage


def list_models(*, json: bool) -> None:
    """Print the table of known models, and those of the hub that are in its cache."""
    from rapid_llm.models import hf, hub

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
    for repo, snapshot in hf.cached_models():
        nbytes = sum(p.stat().st_size for p in snapshot.rglob("*") if p.is_file())
        summary = f"from the Hugging Face hub, {snapshot.name[:8]}"
        listed.append({"name": repo, "summary": summary, "license": None, "bytes": nbytes, "default": False})
        listed[-1] |= {"here": True, "path": str(snapshot)}
    if json:
        print_json(listed)
        return
    print_table(
        ("name", "what", "license", "size", "here"),
        (
            (
                m["name"] + (" (default)" if m["default"] else ""),
                m["summary"],
                m["license"] or "see its card",
                size(m["bytes"]),
                m["path"] or "no",
            )
            for m in listed
        ),
    )


def pull(name: str, *, load_format: str) -> None:
    """Fetch `name`; its path goes to standard output, progress to standard error."""
    from rapid_llm.models import hub

    print(hub.pull(name, load_format=load_format))


def inspect(model: str, *, options: Mapping[str, Any], tensors: bool, json: bool) -> None:
    """Print configuration, tokenizer, tensors and planned rows of a model; status 1 if this program cannot run it."""
    from rapid_llm.engine.options import EngineOptions
    from rapid_llm.models import hub
    from rapid_llm.models.opening import open_source

    with usage():
        checked = EngineOptions(**{name: value for name, value in options.items() if value is not None})
    path = hub.resolve_model(model, fetch=False, load_format=checked.load_format)
    source = open_source(path, load_format=checked.load_format)
    config, tokenizer, rows, problems = _read(source, checked)
    listed: list[dict[str, Any]] = [
        {"name": n, "type": source.dtype(n), "shape": list(source.shape(n)), "bytes": source.nbytes(n)}
        for n in source.names()
    ]
    found = {
        "path": str(path),
        "format": type(source).__name__.removesuffix("Source").removesuffix("Folder").lower(),
        "bytes": sum(t["bytes"] for t in listed),
        "parameters": sum(prod(t["shape"]) for t in listed),
        "config": None if config is None else asdict(config),
        "tokenizer": None if tokenizer is None else _told(source, tokenizer),
        "tensor_types": dict(Counter(t["type"] for t in listed)),
        "parts": _parts(listed),
        "tensors": listed,
        "ops": [row.json() for row in rows],
        "problems": problems + [f"{b.what} at {b.where}: {b.why}" for b in rows if not b.row],
    }
    if json:
        print_json(found)
    else:
        _show(found, rows, tensors=tensors)
    if found["problems"]:
        raise typer.Exit(BAD)


def _read(source: Any, options: Any) -> tuple[Any, Any, list[Any], list[str]]:
    """(configuration, tokenizer, planned rows, problems): what can be read of a model, and why the rest cannot."""
    from rapid_llm.engine import loading
    from rapid_llm.engine.inspection import planned_rows
    from rapid_llm.models.errors import ModelError

    with usage():
        device = loading.resolve_device(options.device)
    config = tokenizer = None
    rows: list[Any] = []
    problems: list[str] = []
    try:
        config = loading.read_config(source)
    except ModelError as error:
        problems.append(str(error))
    try:
        tokenizer = loading.read_tokenizer(source, config)
    except ModelError as error:
        problems.append(str(error))
    if config is not None and tokenizer is not None:
        config = loading.complete(config, tokenizer)
    try:
        rows = [] if config is None else planned_rows(source, config, options, device)
    except ModelError as error:
        problems.append(str(error))
    return config, tokenizer, rows, problems


def _told(source: Any, tokenizer: Any) -> dict[str, Any]:
    """What there is to say of a tokenizer; `model` and `pre` are a GGUF file's own names."""
    file = getattr(source, "file", {})
    return {
        "model": file.get("tokenizer.ggml.model", "bpe"),
        "pre": file.get("tokenizer.ggml.pre"),
        "vocab_size": tokenizer.vocab_size,
        "control_tokens": len(tokenizer.control),
        "bos_id": tokenizer.bos_id,
        "end_ids": sorted(tokenizer.end_ids),
        "add_bos": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }


def _parts(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tensors of all layers, experts too, as one line for each part, type and shape: how many, and their bytes."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for tensor in listed:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor["name"])
        part = found.setdefault(
            (name, tensor["type"], *tensor["shape"]),
            {"name": name, "count": 0, "type": tensor["type"], "shape": tensor["shape"], "bytes": 0},
        )
        part["count"] += 1
        part["bytes"] += tensor["bytes"]
    return list(found.values())


def _show(found: Mapping[str, Any], rows: list[Any], *, tensors: bool) -> None:
    from rapid_llm.engine.explain import table

    _show_summary(found)
    columns = ("tensors", "count", "type", "shape", "size")
    print()
    print_table(columns, ((p["name"], p["count"], p["type"], _shape(p), size(p["bytes"])) for p in found["parts"]))
    if tensors:
        print()
        print_table(
            ("tensor", "type", "shape", "size"),
            ((t["name"], t["type"], _shape(t), size(t["bytes"])) for t in found["tensors"]),
        )
    if rows:
        print()
        print_table(("op", "for", "row", "why"), table(rows))
    for problem in found["problems"]:
        print(f"cannot run: {problem}")


def _shape(tensor: Mapping[str, Any]) -> str:
    return " x ".join(map(str, tensor["shape"]))


def _show_summary(found: Mapping[str, Any]) -> None:
    config, tokenizer = found["config"], found["tokenizer"]
    pairs: list[tuple[str, object]] = [
        ("path", found["path"]),
        ("size", f"{size(found['bytes'])}, {found['parameters'] / 1e6:,.1f} M parameters, {found['format']}"),
    ]
    if config is not None:
        pairs += [
            ("name", config["name"]),
            ("architecture", config["architecture"]),
            ("layers", config["num_layers"]),
            ("hidden size", f"{config['hidden_size']}, feed-forward {config['intermediate_size']}"),
            ("heads", f"{config['num_heads']} query, {config['num_kv_heads']} key/value, of {config['head_dim']}"),
            ("vocabulary", f"{config['num_tokens']} tokens, {config['vocab_size']} rows"),
            ("context", f"{config['max_model_len']} tokens"),
            ("rotary base", f"{config['rope_theta']:g}"),
            ("output head", "tied to the embedding" if config["tie_word_embeddings"] else "its own"),
        ]
        if config["num_experts"]:
            chosen, wide = config["experts_per_token"], config["expert_size"]
            pairs.append(("experts", f"{config['num_experts']} of {wide} features, {chosen} for each token"))
    if tokenizer is not None:
        ends = ", ".join(map(str, tokenizer["end_ids"]))
        template = "a chat template" if tokenizer["chat_template"] else "no chat template"
        kind = "/".join(filter(None, (tokenizer["model"], tokenizer["pre"])))
        pairs.append(("tokenizer", f"{kind}, ends at {ends or 'nothing'}, {template}"))
    types = sorted(found["tensor_types"].items(), key=lambda item: -item[1])
    pairs.append(("tensors", ", ".join(f"{count} {name}" for name, count in types)))
    print_pairs(pairs)

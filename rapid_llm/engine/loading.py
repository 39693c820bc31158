"""From a model's name to a decoder on its device and a tokenizer."""

from __future__ import annotations

import os

import torch

from rapid_llm.models import hub
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.weights import load_weights

from .options import PAGE_SIZE
from .text.tokenizer import Tokenizer


def resolve_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda`, `cuda:1`; raises `ValueError` for any other."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device; use auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; use auto, cpu, cuda or cuda:<number>")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = 0 if device.index is None else device.index
    if index >= count:
        seen = "torch sees no CUDA device" if count == 0 else f"torch sees CUDA devices 0 to {count - 1}"
        raise ValueError(f"device={name!r}: {seen}; use device='cpu', or a number that is there")
    return torch.device("cuda", index)


def load(model: str | os.PathLike[str], dtype: str, device: torch.device) -> tuple[Decoder, Tokenizer]:
    """Read a model (a known name, fetched if need be, or the path of a GGUF file) on to `device`.

    Raises `rapid_llm.models.errors.ModelError`s that name the file, the value and the fix.
    """
    file = GGUFFile(hub.resolve_model(model))
    config = ModelConfig.from_gguf(file)
    tokenizer = Tokenizer.from_gguf(file)
    weights = load_weights(file, config, device=device, dtype=activation_dtype(dtype, device))
    return Decoder(config, weights, device=device, dtype=dtype, page_size=PAGE_SIZE), tokenizer

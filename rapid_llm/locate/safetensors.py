"""Tensors and one JSON document in a file of the safetensors format (https://github.com/huggingface/safetensors).

The format is a length, a JSON header and the tensors' bytes; the document is text in the header's metadata. So little
of it is needed that no package is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LABELS: Final = {dtype: label for label, dtype in DTYPES.items()}
_KEY: Final = "rapid_llm"


class BadCaseError(ValueError):
    """A file that is no case, or is damaged; the message names it."""


def save(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """Write contiguous CPU tensors; `document` is kept as JSON beside them."""
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(document)}}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _LABELS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote. Raises `BadCaseError` for anything else, and `OSError` for a file that cannot be read."""
    raw = path.read_bytes()
    try:
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        document = json.loads(header.pop("__metadata__")[_KEY])
        tensors = {name: _tensor(raw[8 + size :], entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise BadCaseError(f"{path} is no case of `rapid-llm diff`: {type(error).__name__}: {error}") from error
    return tensors, document


def _tensor(data: bytes, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype = DTYPES[entry["dtype"]]
    if end > len(data):
        raise ValueError(f"the file ends {end - len(data)} bytes too early")
    flat = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
    return flat.view(entry["shape"])

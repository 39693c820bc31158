"""From a path to a `TensorSource`: which format it is, and a clear refusal where it could be two."""

from __future__ import annotations

from pathlib import Path

from .errors import TensorSetError, UnknownModelError, UnsafeWeightsError
from .gguf_source import GGUFSource
from .gguf_split import open_gguf
from .pickled import SUFFIXES, PickledFolder, pickled_files
from .safetensors import SafetensorsFolder
from .shards import numbered_set
from .source import LOAD_FORMATS

Source = GGUFSource | SafetensorsFolder | PickledFolder


def open_source(path: Path, *, load_format: str = "auto") -> Source:
    """The weights at `path`: a GGUF file or any part of a split one, or a folder of one model in any format.

    load_format: one of `LOAD_FORMATS`. Raises `UnsafeWeightsError` for a folder that holds pickles alone unless `pt`
    asks for them, `TensorSetError` where a folder's weights are missing or ambiguous, and each format's own errors.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: use one of {', '.join(LOAD_FORMATS)}")
    if path.is_dir():
        return _open_folder(path, load_format)
    if path.suffix == ".safetensors" or path.suffix in SUFFIXES:
        raise UnknownModelError(
            f"{path} holds weights alone; give its folder, which has the configuration and the tokenizer: {path.parent}"
        )
    return GGUFSource(open_gguf(path))


def _open_folder(folder: Path, load_format: str) -> Source:
    gguf = {numbered_set(p) or (p,) for p in folder.glob("*.gguf")}
    safetensors = any(folder.glob("*.safetensors"))
    pickled = [p.name for p in pickled_files(folder)]
    if len(gguf) > 1 or (gguf and safetensors):
        shown = ", ".join(sorted(parts[0].name for parts in gguf))
        beside = " beside safetensors" if safetensors else ""
        raise TensorSetError(f"{folder} holds {shown}{beside}; give the path of the one that is meant")
    if gguf:
        return GGUFSource(open_gguf(gguf.pop()[0]))
    if safetensors:
        return SafetensorsFolder(folder)
    if not pickled:
        raise TensorSetError(f"{folder} holds no weights: no .safetensors and no .gguf file")
    if load_format != "pt":
        raise UnsafeWeightsError(
            f"{folder} holds its weights as pickles ({pickled[0]}), which can be programs; convert them "
            "to safetensors, or give load_format='pt' to read them with torch's weights_only unpickler"
        )
    return PickledFolder(folder)

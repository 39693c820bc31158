"""Every error that finding, reading and loading a model raises. Each message names the file, the value and the fix."""

from __future__ import annotations


class ModelError(ValueError):
    """Base of all errors about a model's file or its contents."""


class BadMagicError(ModelError):
    """The file is not GGUF, or a version or byte order of it that is not read."""


class TruncatedFileError(ModelError):
    """The file ends before something that it declares."""


class MetadataError(ModelError):
    """A metadata entry is malformed, missing, of the wrong type, or contradicts another."""


class UnknownTypeError(ModelError):
    """A metadata value type or a ggml tensor type that is not known at all."""


class UnsupportedTensorError(ModelError):
    """A tensor whose type or role is known but cannot be computed with."""


class UnsupportedArchitectureError(ModelError):
    """`general.architecture`, or a variation of it, that no row of the architecture table describes."""


class TensorSetError(ModelError):
    """Tensors are missing, duplicate, left over, of the wrong shape, or a fused group is incomplete."""


class UnsafeWeightsError(ModelError):
    """Weights that are a pickle: not asked for, or more than tensors."""


class UnknownModelError(ModelError):
    """Neither a known model name, nor an existing file or folder, nor an id that a hub knows."""


class DownloadError(ModelError):
    """Fetching a model failed; the message holds the tool's output and the manual way."""


class ChecksumError(ModelError):
    """A model's file is not the published one: its size or SHA-256 differs."""


class UnsupportedQuantizationError(ModelError):
    """A checkpoint's `quantization_config` asks for what no reader of quantised weights does."""

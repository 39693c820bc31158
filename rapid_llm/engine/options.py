"""Every default of the engine, in one table that `LLM`, the command line and the server read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from rapid_llm.models.source import LOAD_FORMATS

from .speculation import Speculation

MODES: Final = ("auto", "off", "padded")
"""Of `cuda_graphs`."""

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")

QUANTIZATIONS: Final = ("int8", "int4", "fp8")
"""What dense weights may become on load; `models.quantize` has the formats."""

KV_CACHE_DTYPES: Final = ("auto", "fp8")

PAGE_SIZE: Final = 16
"""Tokens per page of the key/value cache."""

KV_MEMORY_SHARE: Final = 0.5
"""Of the memory that is free once the weights are loaded, the most that a cache of default size takes."""

KV_CONTEXTS: Final = 4
"""A cache of default size holds at most this many contexts of full length."""

BATCH_TOKENS: Final = {"cpu": 512, "cuda": 8192}
"""Tokens of one step by device type: long enough for the prefill GEMM, short enough for the requests that decode."""

DETERMINISTIC_CHUNK: Final = {"cpu": 128, "cuda": 512}
"""Most tokens of a prompt in one step of deterministic mode, by device type; prefixes are reused in such pieces."""

_DTYPE_LABELS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine runs; the defaults are the product's.

    dtype: `auto` (on CPU the fastest verified mix, on CUDA the checkpoint's), or a label in either spelling.
    device: `auto` (cuda where there is one), `cpu`, `cuda`, `cuda:1`. max_model_len: longest prompt plus answer in
    tokens; None is the model's own context. kv_cache_tokens: tokens that the cache holds; None sizes it by the free
    memory. deterministic: one request at a time, prompts in pieces of fixed places, so that a result depends, bit for
    bit, on its request alone and not on what else runs or ran; costs throughput. seed: for requests without their own;
    the same calls in the same order give the same tokens. threads: compute threads on CPU (process-wide, as torch has
    them); None is `platform.default_threads()`. max_batch_tokens: most tokens of one step; a longer prompt is prefilled
    in chunks. None is `BATCH_TOKENS` of the device. max_running: most requests in a step. enable_prefix_caching: a
    prompt that begins like an earlier one (of the same cache_salt) takes over its keys and values while they are there.
    speculative: None, or how to guess tokens from a request's own history, as the fields of `Speculation`:
    `{"method": "ngram", "num_tokens": 4}`; what is generated does not change. Held as a `Speculation`. load_format:
    `auto`, or `pt` to read weights that are pickles (`pytorch_model.bin`), with torch's unpickler that runs no code.
    quantization: `int8`, `int4` or `fp8` quantises dense matrices as they are loaded; None keeps what the file has.
    kv_cache_dtype: `auto` keeps keys and values in the activations' dtype; `fp8` (e4m3) takes one byte of each, so that
    two to four times as many tokens fit, at a loss of precision: three bits of fraction, no value above 448.
    cuda_graphs: `auto` replays decode steps as CUDA graphs on a GPU, `off` never does; `padded` runs them at the same
    sizes, with the same padding, but call by call, on any device. tensor_parallel: processes that compute the model
    together, each with its part of the weights and of the cache; rank r on cuda:r, or all on the CPU.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    deterministic: bool = False
    seed: int = 0
    threads: int | None = None
    max_batch_tokens: int | None = None
    max_running: int = 64
    enable_prefix_caching: bool = True
    speculative: Mapping[str, Any] | Speculation | None = None
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    cuda_graphs: str = "auto"
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):  # torch.float32 and the like
            object.__setattr__(self, "dtype", str(self.dtype))
        name = self.dtype.removeprefix("torch.")
        object.__setattr__(self, "dtype", _DTYPE_LABELS.get(name, name))
        if self.dtype not in DTYPES:
            known = ", ".join((*DTYPES, *_DTYPE_LABELS))
            raise ValueError(f"dtype={name!r} is not known; use one of {known}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            known = ", ".join(QUANTIZATIONS)
            raise ValueError(f"quantization={self.quantization!r} is not known; use one of {known}, or None")
        if self.cuda_graphs not in MODES:
            raise ValueError(f"cuda_graphs={self.cuda_graphs!r} is not known; use one of {', '.join(MODES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not known; use one of {known}")
        if not isinstance(self.device, str):  # a torch.device
            object.__setattr__(self, "device", str(self.device))
        for name in ("deterministic", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.speculative is not None and not isinstance(self.speculative, Speculation):
            object.__setattr__(self, "speculative", Speculation.of(self.speculative))
        _check_int("seed", self.seed, None)
        for name in ("max_model_len", "kv_cache_tokens", "threads", "max_batch_tokens"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.threads is not None and self.threads > (os.cpu_count() or 1):
            raise ValueError(f"threads={self.threads}: this machine has {os.cpu_count()} CPUs; use at most as many")
        _check_int("max_running", self.max_running, 1)
        _check_int("tensor_parallel", self.tensor_parallel, 1)
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is below max_running={self.max_running}: a step could not "
                "give each running request its token; raise the first or lower the second"
            )

    @property
    def speculation(self) -> Speculation | None:
        """`speculative` as it is held after the check."""
        return cast("Speculation | None", self.speculative)

    @classmethod
    def of(cls, options: dict[str, Any]) -> EngineOptions:
        """Options from keywords; an unknown one is a `TypeError` that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"unknown option {name!r}; known: {', '.join(known)}")
        return cls(**options)


def _check_int(name: str, value: object, least: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: use an integer")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: use {least} or more")


DEFAULTS: Final = EngineOptions()

"""A tiny model for engines of several ranks, whose ranks can be made to fail.

A rank looks into `folder` before each forward pass: what a test writes to `at_step-RANK` happens there. It leaves its
process id in `pid-RANK`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rapid_llm.engine.loading import bind
from rapid_llm.engine.options import EngineOptions
from rapid_llm.engine.text.tokenizer import Tokenizer
from rapid_llm.kernels import use_backend
from rapid_llm.kernels.ops.layernorm.rmsnorm import rmsnorm as native_rmsnorm
from rapid_llm.kernels.registry import KernelSpec, get_row, register
from rapid_llm.models import decoder as decoder_module
from rapid_llm.models.config import ModelConfig
from rapid_llm.models.decoder import Decoder, activation_dtype
from rapid_llm.models.gguf import GGUFFile
from rapid_llm.models.parallel import Ranks, Shard, check
from rapid_llm.models.weights import load_weights

from .mocks import byte_tokenizer


def always() -> bool:
    """The probe of a planted row."""
    return True


def rmsnorm(
    input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A planted row's function."""
    return native_rmsnorm(input, weight, eps, out)


def _planted() -> KernelSpec:
    own = {"target": f"{__name__}:rmsnorm", "available": f"{__name__}:always"}
    return replace(get_row("native/rmsnorm"), name="planted/rmsnorm", backend="planted", **own)


@dataclass(frozen=True)
class TinyRecipe:
    """model: a GGUF file whose vocabulary holds the bytes. planted: a rank that has a row for rmsnorm of its own, where
    the others take the native one. broken: a rank that cannot load."""

    model: str
    folder: str
    planted: int | None = None
    broken: int | None = None

    def check(self, options: EngineOptions) -> None:
        check(ModelConfig.from_gguf(GGUFFile(Path(self.model))), options.tensor_parallel)

    def __call__(self, options: EngineOptions, device: torch.device, ranks: Ranks | None) -> tuple[Decoder, Tokenizer]:
        rank = 0 if ranks is None else ranks.index
        (Path(self.folder) / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == self.broken:
            raise ValueError("this rank cannot load")
        file = GGUFFile(Path(self.model))
        config = ModelConfig.from_gguf(file)
        shard = None if ranks is None else Shard(config, ranks.index, ranks.count)
        dtype = activation_dtype(options.dtype, device)
        weights = load_weights(file, config, device=device, dtype=dtype, shard=shard)
        decoder_module.prepare = lambda keys: None  # nothing to build
        with contextlib.ExitStack() as stack:
            if self.planted is not None:
                if rank == self.planted:
                    register(_planted())
                stack.enter_context(use_backend("planted" if rank == self.planted else "native", "rmsnorm"))
            decoder = bind(config if shard is None else shard.config, weights, options, device, ranks)
        decoder.forward = self._watched(decoder.forward, rank)  # type: ignore[method-assign]
        return decoder, byte_tokenizer()

    def _watched(self, forward: Any, rank: int) -> Any:
        order = Path(self.folder) / f"at_step-{rank}"

        def both(*args: Any) -> Any:
            if order.exists():
                if order.read_text() == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError("no room for the step")
            return forward(*args)

        return both

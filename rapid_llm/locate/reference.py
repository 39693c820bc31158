"""Hugging Face transformers as side a: the same file's weights, another implementation of the whole model.

It has layers but no rows. So side b's layers are compared with its layers, each fed what the reference had there, and
side b's rows with the oracle, each on its own inputs: a wrong row shows in both, a wrong model (a constant misread, a
tensor misplaced) in the first alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rapid_llm.kernels import dispatch
from rapid_llm.models.gguf import GGUFFile

from .calls import Call, Place, Watch, matrices, moved, slots
from .check import Check, Truth, difference, worst_columns
from .configuration import Side
from .steps import Plan
from .watches import Exhibit, Finding, Suspect, layer_ended


class NoReferenceError(RuntimeError):
    """transformers, or what it needs to read a GGUF file, is not installed."""


class Reference:
    """One float32 forward pass a sequence, on the CPU."""

    def __init__(self, file: GGUFFile) -> None:
        self.model = _load(file)

    def run(self, plan: Plan) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
        """Logits of every step as `Plan.run` gives them, and the stream after each layer by (step, layer). What the
        last layer gives comes normalised."""
        whole = [self._sequence(ids[:-1]) for ids in plan.ids]
        done = [0] * len(plan.ids)
        logits: list[Tensor] = []
        streams: dict[tuple[int, int], Tensor] = {}
        for number, step in enumerate(plan.steps):
            spans = [(s, slice(done[s], done[s] + size)) for s, size in step.chunks]
            logits.append(torch.stack([whole[s][0][at.stop - 1] for s, at in spans]))
            for layer in range(len(whole[0][1])):
                streams[number, layer] = torch.cat([whole[s][1][layer][at] for s, at in spans])
            for s, size in step.chunks:
                done[s] += size
        return logits, streams

    def _sequence(self, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        out = self.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        return out.logits[0].float(), [state[0].float() for state in out.hidden_states[1:]]


def _load(file: GGUFFile) -> Any:
    os.environ.setdefault("TQDM_DISABLE", "1")  # read once, when it is imported
    try:
        import accelerate
        import gguf
        import transformers
    except ImportError as error:
        raise NoReferenceError(f"{error}: the hf reference needs 'pip install rapid-llm[bench]'") from error
    del accelerate, gguf  # transformers needs both to read GGUF, and says so only in a long traceback
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(file.path.parent), gguf_file=file.path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


class OwnErrors(Watch):
    """Checks every call of a side against the truth of its own inputs."""

    def __init__(self, side: Side, progress: Callable[[str], None]) -> None:
        super().__init__(slots(side.decoder.config))
        self._side, self._progress = side, progress
        self._weights = matrices(side.weights)
        self.findings: list[Finding] = []
        self.exhibits: dict[tuple[str, Suspect], Exhibit] = {}

    def see(self, place: Place, call: Call) -> Any:
        self._progress(f"checking {place.slot}")
        before = call.with_moving(moved(call.values, self._side.dtype, self._side.device))
        results = call.results(returned := call.run())
        weight = self._weights.get(place.slot)
        columns = None
        if call.op == "linear" and weight is not None:
            given = (before.values["input"], weight.data, before.values["bias"])
            plain = dispatch("linear", *given, scheme=weight.scheme, backend="native")(*given, scheme=weight.scheme)
            columns = worst_columns(call.op, [plain], results)
        truth = Truth(before.op, before.values, weight, columns)
        check: Check = truth.check(call.row, results)
        self.findings.append(Finding(place, call.op, "", call.row, 0.0, None, check))
        key = ("b", Suspect(call.op, call.row))
        if not check.ok and (key not in self.exhibits or check.ratio > self.exhibits[key].check.ratio):
            self.exhibits[key] = Exhibit("b", place, call, truth.values, check)
        return returned


class FedLayers(Watch):
    """Feeds each layer what the reference had before it; `own` is what each layer adds to the difference."""

    def __init__(self, side: Side, streams: dict[tuple[int, int], Tensor]) -> None:
        super().__init__(slots(side.decoder.config))
        self._streams = streams
        self._layers = side.decoder.config.num_layers
        self.own: dict[int, float] = {}

    def see(self, place: Place, call: Call) -> Any:
        result = call.run()
        layer = layer_ended(place.slot, self._layers)
        if layer is None:
            return result
        values = call.values
        last = layer == self._layers - 1
        want = self._streams[place.step, layer]
        got = values["input"] if last else values["residual"]
        self.own[layer] = max(self.own.get(layer, 0.0), difference([want], [got]))
        if last:
            values["input"].copy_(want)
        else:
            values["residual"].copy_(want)
            norm = dispatch("rmsnorm", values["residual"], values["weight"], backend="native")
            values["input"].copy_(norm(values["residual"], values["weight"], values["eps"]))
        return result

"""One wrong call as a file: replayed by `rapid-llm diff --replay`, or by a test that it is committed with.

A case holds the call's arguments with their strides, the weight as the model's file has it, and the row's name. A
replay runs the row as it is now and judges it by the oracle as it is now, so the case passes once the row is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.kernels.registry import get_op, get_row, load_target, plugins, probes
from rapid_llm.models.weights import Weight
from rapid_llm.verify.guard import span
from rapid_llm.verify.standing import Standing, standing

from .calls import MOVING, Call, RowFailure, Values
from .check import Check, Truth, attempt
from .safetensors import BadCaseError, load, save
from .watches import Exhibit

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Replay:
    """recorded: the error when the case was written, as a share of its bound. check: the error now."""

    row: str
    op: str
    device: str
    place: str
    recorded: float
    check: Check

    @property
    def ok(self) -> bool:
        return self.check.ok


def write(path: Path, exhibit: Exhibit, *, device: torch.device, origin: Mapping[str, Any]) -> None:
    """Write the call of `exhibit` as a case. origin: where it comes from, for whoever reads it."""
    tensors, layout, scalars = {}, {}, {}
    for name, value in exhibit.values.items():
        if isinstance(value, Tensor):
            tensors[name] = _flat(value)
            layout[name] = {"shape": list(value.shape), "stride": list(value.stride())}
        else:
            scalars[name] = {"torch": str(value)} if isinstance(value, torch.dtype) else value
    floats = [v.dtype for k, v in exhibit.values.items() if k in MOVING and _is_float(v)]
    document = {
        "format": FORMAT,
        "op": exhibit.call.op,
        "row": exhibit.call.row,
        "device": device.type,
        "dtype": str(floats[0] if floats else exhibit.values.get("dtype", torch.float32)),
        "place": str(exhibit.place.slot),
        "ratio": str(exhibit.check.ratio),
        "problem": exhibit.check.problem,
        "layout": layout,
        "scalars": scalars,
        "origin": dict(origin),
    }
    save(path, tensors, document)


def replay(path: str | os.PathLike[str]) -> Replay:
    """Run the row of a case on its arguments, and judge it.

    Raises `BadCaseError` for a file that is no case or that the row no longer takes, `UnknownRowError` where the row is
    not registered, and `OSError` for a file that cannot be read.
    """
    where = Path(path)
    tensors, document = load(where)
    if document.get("format") != FORMAT:
        raise BadCaseError(f"{where} has format {document.get('format')!r}; this version reads {FORMAT}")
    plugins.scan()
    op, row = get_op(document["op"]), get_row(document["row"])
    device = torch.device(document["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadCaseError(f"{where} is a case of a GPU, and torch sees none here")
    values = _values(tensors, document)
    if standing(op, row, values) is not Standing.TAKEN:
        raise BadCaseError(f"{where}: {row.name} no longer declares that it takes this call; delete the case")
    held = {k: _to(v, device) for k, v in values.items() if k not in MOVING}
    if row.prepack is not None:
        held["weight"] = probes.load(row.prepack)(held["weight"], values.get("scheme"))
    weight = Weight(values["weight"], values.get("scheme", ""), (0, 0)) if "weight" in values else None
    moving = {k: v for k, v in values.items() if k in MOVING}
    call = Call(op.id, row.name, load_target(row.name), {**held, **moving})
    with torch.inference_mode():
        truth = Truth(op.id, values, weight)
        try:
            trial = attempt(call, getattr(torch, document["dtype"].removeprefix("torch.")), device)
        except RowFailure as failure:
            check = Check(math.inf, 0.0, f"raised {failure.text}")
        else:
            check = trial.judged(truth.check(row.name, trial.results))
    return Replay(row.name, op.id, str(device), document["place"], float(document["ratio"]), check)


def _values(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> Values:
    values: Values = {}
    for name, laid in document["layout"].items():
        values[name] = tensors[name].as_strided(laid["shape"], laid["stride"])
    for name, value in document["scalars"].items():
        values[name] = getattr(torch, value["torch"].removeprefix("torch.")) if isinstance(value, dict) else value
    return values


def _flat(value: Tensor) -> Tensor:
    """All memory from the first element to the last, zeros in the gaps."""
    flat = torch.zeros(span(value), dtype=value.dtype)
    flat.as_strided(value.shape, value.stride()).copy_(value)
    return flat


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value

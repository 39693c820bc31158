"""A scratch op and scratch modules, so that dispatch can be tested without touching the real rows."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rapid_llm.kernels.registry import KernelSpec, OpSpec, Out, register, registry, unregister
from rapid_llm.kernels.registry import evidence as evidence_module

OP = "scratch"

MODULE = """
CALLS = []

def native(input, weight, factor=1.0, out=None):
    CALLS.append("native")
    return "native"

def fast(input, weight, factor=1.0, out=None):
    CALLS.append("fast")
    return "fast"

def narrow(input, factor=1.0):
    return "narrow"

def yes_scale(input, factor, out=None):
    return "scaled"

def yes():
    return True

def no():
    return False

def why():
    return "the gadget is unplugged"
"""


def make_module(folder: Path, name: str, text: str) -> str:
    """Write module `name` into `folder`, which must be on sys.path; forgets an older one of that name."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    sys.modules.pop(name, None)
    return name


def op_spec(**changes: Any) -> OpSpec:
    """The scratch op: two tensors and a factor, one result, dimensions `tokens` and `hidden`."""
    fields: dict[str, Any] = {
        "id": OP,
        "schema": "(Tensor input, Tensor weight, float factor=1.0) -> Tensor",
        "group": "scratch",
        "dims": {"tokens": "input.shape[0]", "hidden": "input.shape[-1]"},
        "out": Out(shape="input.shape", dtype="input.dtype"),
        "dtypes": ("fp32", "fp16", "bf16"),
        "oracle": "nowhere:oracle",
        "cases": "nowhere:cases",
        "bound": "nowhere:bound",
        "work": "nowhere:work",
        "doc": "A scratch op.",
    }
    return OpSpec(**{**fields, **changes})


def row(name: str, target: str, **changes: Any) -> KernelSpec:
    """A row of the scratch op."""
    backend = name.split("/")[0]
    fields: dict[str, Any] = {"name": name, "op": OP, "backend": backend, "target": target}
    if backend != "native":
        fields["available"] = f"{target.split(':')[0]}:yes"
    return KernelSpec(**{**fields, **changes})


@contextmanager
def registered(*specs: Any) -> Iterator[None]:
    """Register specs and take them out again, with whatever rows came to their ops meanwhile."""
    register(*specs)
    try:
        yield
    finally:
        for spec in specs:
            if isinstance(spec, OpSpec) and spec.id in {op.id for op in registry.ops()}:
                unregister(spec.id)


def prove(name: str, device: str = "cpu", dtype: str = "fp32") -> None:
    """Give a row the evidence that a conformance run would make."""
    evidence_module.record(name, device, dtype, cases=1, worst_ulp=0.0, worst_ratio=0.0)


def counted_module(monkeypatch: Any, folder: Path, name: str = "scratch_rows") -> str:
    """The module above, importable for one test."""
    monkeypatch.syspath_prepend(str(folder))
    return make_module(folder, name, MODULE)


Factory = Callable[..., Any]

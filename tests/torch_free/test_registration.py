"""A malformed op or row is an error that names the row and the field, and leaves the table as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rapid_llm.kernels import UNMEASURED, Dim, GoldenRecord, KernelSpec, Shape, register
from rapid_llm.kernels.registry import RegistrationError, registry
from rapid_llm.kernels.registry.signature import check_static
from rapid_llm.kernels.registry.spec import TAKEN
from tests import scratch


def test_the_specs_example_rows_are_accepted_as_written() -> None:
    row = KernelSpec(
        name="jit/scale",
        op="scale",
        backend="jit",
        target="rapid_llm.kernels.ops.elementwise.scale_jit:scale",
        available="rapid_llm.kernels.jit:available",
        dtypes=("bf16", "fp16", "fp32"),
        golden=GoldenRecord(verified=True, max_abs_diff=0.0, baseline="native/scale"),
        priority=UNMEASURED,
        graph_safe=True,
    )
    row.check_against(registry.get_op("scale"))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("name", {"name": "scratch"}),
        ("backend", {"backend": "other"}),
        ("op", {"op": "other"}),
        ("target", {"target": "no colon"}),
        ("available", {"available": None}),
        ("available", {"available": "nonsense"}),
        ("prepack", {"prepack": "nonsense"}),
        ("dtypes", {"dtypes": ("fp33",)}),
        ("dtypes", {"dtypes": "fp32"}),
        ("devices", {"devices": ("tpu",)}),
        ("capability", {"capability": (90,)}),
        ("capability", {"capability": ((90, 80),)}),
        ("layout", {"layout": ("dense",)}),
        ("priority", {"priority": -7}),
        ("priority", {"priority": True}),
        ("golden", {"golden": {"verified": True}}),
        ("op", {"op": None}),
        ("shape", {"shape": 5}),
        ("graph_safe", {"graph_safe": "no"}),
        ("devices", {"devices": "cpu"}),
    ],
)
def test_a_bad_field_is_named_with_its_row(field: str, changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "name": "fast/scratch",
        "op": "scratch",
        "backend": "fast",
        "target": "m:f",
        "available": "m:g",
    }
    with pytest.raises(RegistrationError) as caught:
        KernelSpec(**{**fields, **changes})
    assert caught.value.field == field
    assert f"field '{field}'" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("shape", {"shape": Shape(require=(Dim("hiden", min=1),))}),
        ("layout", {"layout": ("gate:contiguous",)}),
        ("dtypes", {"dtypes": ("int8",)}),
        ("schemes", {"schemes": ("q8_0",)}),
        ("roundings", {"roundings": ("weight:bf16",)}),
        ("target", {"target": "no_such_module_anywhere:f"}),
        ("target", {"target": "{module}:absent"}),
        ("target", {"target": "{module}:narrow"}),
        ("op", {"op": "scrath", "name": "fast/scrath"}),
    ],
)
def test_a_row_that_does_not_fit_its_op_is_refused(op: str, field: str, changes: dict[str, Any]) -> None:
    if "target" in changes:
        changes = {"target": changes["target"].format(module=op)}
    before = registry.rows("scratch")
    with pytest.raises(RegistrationError) as caught:
        register(scratch.row(changes.pop("name", "fast/scratch"), changes.pop("target", f"{op}:fast"), **changes))
    assert caught.value.field == field
    assert registry.rows("scratch") == before


def test_names_are_unique(op: str) -> None:
    with pytest.raises(RegistrationError, match="registered already"):
        register(scratch.row("native/scratch", f"{op}:native"))
    with pytest.raises(RegistrationError, match="registered already"):
        register(scratch.op_spec())


def test_a_second_floor_is_refused(op: str) -> None:
    with pytest.raises(RegistrationError, match="floor 'native/scratch' already"):
        register(scratch.row("native/scratch.other", f"{op}:native"))


def test_an_op_needs_its_floor_and_registration_is_all_or_nothing(module: str) -> None:
    fast = scratch.row("fast/scratch", f"{module}:fast")
    with pytest.raises(RegistrationError, match="no 'native' row"):
        register(scratch.op_spec(), fast)
    assert "scratch" not in {op.id for op in registry.ops()}


def test_every_scheme_needs_a_floor(module: str, tmp_path: Path) -> None:
    op = scratch.op_spec(
        schema="(Tensor input, Tensor weight, float factor=1.0, *, str scheme='a') -> Tensor", schemes=("a", "b")
    )
    two = scratch.make_module(
        tmp_path, "two_schemes", "def native(input, weight, factor=1.0, out=None, *, scheme='a'): ..."
    )
    with pytest.raises(RegistrationError, match="scheme 'b' has no 'native' row"):
        register(op, KernelSpec("native/scratch", "scratch", "native", f"{two}:native", schemes=("a",)))


def test_a_row_may_not_be_the_floor_under_another_name(op: str) -> None:
    """P55: a sham row would show as a second implementation and never be one."""
    with pytest.raises(RegistrationError, match="not the floor renamed"):
        register(scratch.row("fast/scratch", f"{op}:native"))


def test_a_floor_may_not_have_a_probe() -> None:
    with pytest.raises(RegistrationError, match="always there"):
        KernelSpec("native/scratch", "scratch", "native", "m:f", available="m:g")


def test_rows_of_this_package_fit_their_ops() -> None:
    """The check that import time cannot afford: every shipped target exists, with its op's signature."""
    for op in registry.ops():
        for row in registry.rows(op.id):
            check_static(row, op)


def test_registering_runs_no_code_of_the_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "raise RuntimeError('imported')\ndef f(input, weight, factor=1.0, out=None): ...\ndef yes(): ..."
    scratch.make_module(tmp_path, "explodes", text)
    register(scratch.row("fast/scratch", "explodes:f"))
    assert "fast/scratch" in {row.name for row in registry.rows("scratch")}


def test_an_op_has_no_name_of_the_interface() -> None:
    """Catches: an op that registers and cannot be called, because `kernels.prepare` is something else, or that is a
    module one moment and a function the next, as `kernels.jit` would be."""
    import pkgutil

    import rapid_llm.kernels as kernels

    own = {name for name in vars(kernels) if name.islower() and not name.startswith("_")}
    own |= {*kernels._LAZY, *(m.name for m in pkgutil.iter_modules(kernels.__path__)), "csrc", "records"}
    own = {name for name in own if name.islower()} - set(kernels._EXPORTS)
    assert own <= TAKEN
    base = registry.get_op("scale")
    for name in ("dispatch", "jit", "torch.ops", "use.backend", "class"):
        with pytest.raises(RegistrationError, match=r"field 'id'.*cannot be called"):
            dataclasses.replace(base, id=name)

"""Rows from other packages: a good plugin's rows are dispatched, a broken one is a dead row with its traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rapid_llm import kernels
from rapid_llm.cli.kernels import list_rows
from rapid_llm.kernels import KernelSpec, dispatch, explain
from rapid_llm.kernels.registry import RegistrationError, listing, plugins, probes, registry
from rapid_llm.kernels.registry.signature import check_static
from tests import scratch


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Install a distribution whose entry point `name` is `value`, and scan for it as a first dispatch would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_plugins", [])

    def _install(text: str, value: str = "acme_kernels:rows") -> plugins.Plugin:
        scratch.make_module(tmp_path, "acme_kernels", text)
        info = tmp_path / "acme_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rapid_llm.kernels]\nacme = {value}\n")
        monkeypatch.setitem(plugins._state, "scanned", False)
        (found,) = plugins.plugins()
        return found

    yield _install
    if "acme/scale" in {r.name for r in registry.rows("scale")}:
        registry.unregister("acme/scale")


GOOD = """
from rapid_llm.kernels import KernelSpec
def scale(input, factor, out=None): return "acme"
def yes(): return True
ROW = KernelSpec("acme/scale", "scale", "acme", "acme_kernels:scale", available="acme_kernels:yes")
def rows(): return [ROW]
def rows_by_api(version): return ROW if version == 1 else None
def registering():
    from rapid_llm.kernels import register
    register(ROW)
"""


@pytest.mark.parametrize("attr", ["rows", "rows_by_api", "registering", "ROW"])
def test_a_plugins_rows_are_found_at_the_first_dispatch(install, attr: str) -> None:  # type: ignore[no-untyped-def]
    found = install(GOOD, f"acme_kernels:{attr}")
    assert (found.rows, found.failure) == (("acme/scale",), None)
    assert dispatch("scale", device="cpu", dtype="fp32", backend="acme")(1, 2) == "acme"


def test_a_plugin_that_is_linked_by_a_finder_is_found(install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Catches: "not installed" of what `pip install -e .` installed: setuptools may link it by a finder, on no path."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    scratch.make_module(hidden, "linked_kernels", GOOD.replace("acme_kernels", "linked_kernels"))

    class Linked:
        """As setuptools' own: knows one name, and raises at another as a foreign finder may."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            del path, target
            if name == "broken_finder":
                raise RuntimeError("not mine")
            file = hidden / "linked_kernels.py"
            return importlib.util.spec_from_file_location(name, file) if name == "linked_kernels" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Linked])
    assert probes.installed("linked_kernels")
    assert not probes.installed("broken_finder")
    row = KernelSpec("acme/scale", "scale", "acme", "linked_kernels:scale", available="linked_kernels:yes")
    monkeypatch.setattr(probes, "_in_child", lambda *_: probes.Probe(True))
    check_static(row, registry.get_op("scale"))
    with pytest.raises(RegistrationError, match="nothing"):
        check_static(replace(row, target="linked_kernels:nothing"), registry.get_op("scale"))


def test_a_damaged_foreign_package_hides_no_plugin(install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Catches an error of somebody else's broken dist-info out of our first dispatch, or taking all plugins along."""
    first = tmp_path / "first"
    for name in ("a_damaged", "z_damaged"):
        info = first / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_bytes(b"[rapid_llm.kernels]\nx = caf\xe9:y\n")
    (first / "m_unreadable-1.0.dist-info" / "entry_points.txt").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(first))
    monkeypatch.setattr("sys.path", [3, b"bytes", *sys.path])
    assert install(GOOD).rows == ("acme/scale",)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "importlib.metadata")
        assert plugins._any_installed()


def test_one_plugin_installed_twice_is_loaded_once(install, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Catches a stale dist-info beside the new one: the second load is a duplicate, reported as a failure."""
    info = tmp_path / "acme_kernels-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Kernels\nVersion: 0.9\n")
    (info / "entry_points.txt").write_text("[rapid_llm.kernels]\nacme = acme_kernels:rows [fast]\n")
    found = install(GOOD, "acme_kernels:rows [fast]")
    assert (found.rows, found.failure) == (("acme/scale",), None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise AssertionError('licence expired')", "licence expired"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "status 7"),
        ("RAPID_LLM_API = 99\ndef rows(): return []", "plugin API 99"),
        ("def rows(): raise KeyError('inner')", "KeyError: 'inner'"),
        ("def other(): ...", "has no attribute 'rows'"),
        (
            "from rapid_llm.kernels import KernelSpec\ndef rows(): return [KernelSpec('a', 'b', 'c', 'd')]",
            "field 'name'",
        ),
    ],
)
def test_a_broken_plugin_is_a_dead_row_with_its_traceback(install, text: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    found = install(text)
    assert found.failure is not None
    assert expected in found.failure
    dead = next(r for r in listing("cpu") if r["name"] == "plugin/acme")
    assert dead["admitted"] is False
    assert expected in dead["reasons"][0]["text"]  # type: ignore[index]
    assert explain("scale", device="cpu", dtype="fp32").selected == "native/scale"


def test_an_op_of_a_plugin_is_there_before_any_dispatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: `kernels.their_op` and `kernels list --op their_op` unknown, until something else has dispatched."""
    pytest.importorskip("torch", reason="asks torch whether a graph is being captured, or makes a public function")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = scratch.make_module(
        tmp_path, "scratch_rows", "def native(input, weight, factor=1.0, out=None): return 1\n"
    )
    specs = (scratch.op_spec(), scratch.row("native/scratch", f"{module}:native", priority=0))
    for ask in (lambda: kernels.scratch, lambda: list_rows(op="scratch", device="cpu", json=True)):
        with contextlib.ExitStack() as stack:
            load = [lambda s=stack: s.enter_context(scratch.registered(*specs))]
            monkeypatch.setattr(plugins, "scan", lambda todo=load: todo.pop()() if todo else None)
            ask()
        monkeypatch.setattr(plugins, "scan", lambda: None)
    assert "native/scratch" in capsys.readouterr().out
    with pytest.raises(AttributeError, match="scratch"):
        _ = kernels.scratch

"""`kernels check` on schemas and functions that no longer fit each other, and on packages that do not load at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (declares the ops)
from rapid_llm.authoring import row_rules
from rapid_llm.authoring.findings import Finding
from rapid_llm.authoring.project import Project
from rapid_llm.kernels import registry
from rapid_llm.kernels.registry import KernelSpec, OpSpec, plugins
from rapid_llm.kernels.registry.signature import check_static

from .support import ROOT

ELEMENTWISE = ROOT / "rapid_llm" / "kernels" / "ops" / "elementwise"
HERE = Project(ROOT, True, True)


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> OpSpec:
    """scale with one parameter more, declared for its rows as they are."""
    op = dataclasses.replace(registry.get_op("scale"), schema="(Tensor input, float factor, float bias) -> Tensor")
    rows: list[KernelSpec] = [registry.get_row(name) for name in ("native/scale", "jit/scale")]
    monkeypatch.setattr(Project, "declared", lambda _: [(op, rows)])
    return op


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_every_row_whose_function_lacks_a_parameter_is_found_with_both_places(edited: OpSpec) -> None:
    """Catches: a schema that was edited and rows that were not, which nothing says before the first call."""
    findings = list(row_rules.signatures(HERE))
    assert [(f.path.name, f.line, f.rule) for f in findings] == [
        (name, line_of(ELEMENTWISE / name, "def scale("), "signature") for name in ("scale.py", "scale_jit.py")
    ]
    schema = ELEMENTWISE / "__init__.py"
    for finding in findings:
        assert "(input, factor, out=None) differs from (input, factor, bias, out=None)" in finding.text
        assert f"{schema}:{line_of(schema, 'id=') - 1}" in finding.fix


def test_of_parts_only_what_they_hold_is_compared(edited: OpSpec) -> None:
    """Catches: a finding about a file that nobody asked about; none about the one that somebody did."""

    def found(*names: str) -> list[Finding]:
        return list(row_rules.signatures(HERE, {ELEMENTWISE / name for name in names}))

    assert [f.path.name for f in found("scale_jit.py")] == ["scale_jit.py"]
    assert len(found("__init__.py")) == 2  # the schema is there
    assert found("scale_nvrtc.py") == []


def test_a_source_that_is_not_imported_is_compared_as_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a place that is that of the module, or of a decorator, in sources that are only read."""
    (tmp_path / "unread_rows.py").write_text("import torch\n\n\ndef scale(input, out=None):\n    return input\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    row = dataclasses.replace(registry.get_row("native/scale"), target="unread_rows:scale")
    with pytest.raises(registry.RegistrationError) as caught:
        check_static(row, registry.get_op("scale"))
    assert caught.value.place == (str(tmp_path / "unread_rows.py"), 4)


PACKAGE = """from rapid_llm.kernels.registry import KernelSpec, register


def scale({parameters}):
    return input


register(KernelSpec(name="mine/scale.wrong", op="scale", backend="mine", target="{module}:scale",
    available="{module}:scale", dtypes=("fp32",)))
"""


@pytest.mark.parametrize(
    ("module", "text", "line", "says"),
    [
        ("rows_of_another_signature", PACKAGE.replace("{parameters}", "input, by, out=None"), 4, "differs from"),
        (
            "rows_of_no_known_op",
            PACKAGE.replace("scale.wrong", "sclae").replace('op="scale"', 'op="sclae"'),
            8,
            "sclae",
        ),
        ("rows_that_do_not_parse", "import torch\ndef f(:\n", 2, "SyntaxError"),
    ],
)
def test_a_package_that_does_not_load_is_found(
    module: str, text: str, line: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a package of which `check` says that it has no rows, because it failed to load."""
    file = tmp_path / f"{module}.py"
    file.write_text(text.replace("{parameters}", "input, factor, out=None").replace("{module}", module))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_plugins", [plugins._load("mine", module)])
    (finding,) = row_rules.plugins_out(Project(tmp_path, False, True))
    assert (finding.path, finding.line, finding.rule) == (file, line, "plugin")
    assert says in finding.text
    assert list(row_rules.plugins_out(Project(tmp_path / "elsewhere", False, True))) == []

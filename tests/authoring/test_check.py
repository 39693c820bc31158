"""`kernels check`: this repository passes, and every rule catches the fault that it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rapid_llm.kernels.ops  # noqa: F401  (declares the ops)
from rapid_llm.authoring import cuda_rules, python_rules, row_rules
from rapid_llm.authoring.check import check
from rapid_llm.authoring.findings import Finding, settle
from rapid_llm.authoring.project import Project
from rapid_llm.kernels import registry

from .support import ROOT, new, python

DOOR = "// Not Triton: a test.\n%s\nRAPID_LLM_MODULE(RAPID_LLM_FUNCTION(f))\n"
GOOD = DOOR % (
    "inline void f(Tensor& out, const Tensor& input, double factor) {\n"
    "  const int64_t count = input.numel();\n"
    "  kernel<float><<<launch.blocks(count, 256), 256, 0, launch.stream()>>>(out.as<float>());\n"
    '  check_launch("f");\n}'
)
CUDA = {
    "ascii": GOOD.replace("a test", "a t\u00e9st"),
    "int64": GOOD.replace("const int64_t count", "const int count"),
    "stream": GOOD.replace(", launch.stream()", ""),
    "sync": GOOD.replace("check_launch", "cudaDeviceSynchronize(); check_launch"),
    "launch-check": GOOD.replace('check_launch("f");', '// check_launch("f");'),
    "launcher": GOOD.replace("double factor", "float factor"),
    "why-not-triton": GOOD.replace("Not Triton: a test.", "f."),
}


def found(findings: list[Finding], rule: str) -> list[Finding]:
    return [finding for finding in findings if finding.rule == rule]


def test_this_repository_passes() -> None:
    """Catches: a kernel that breaks a convention, and a convention that its own repository breaks."""
    done = check([ROOT])
    listed = [f"{f.path.relative_to(ROOT)}:{f.line}: {f.rule}: {f.text}. Fix: {f.fix}" for f in done.findings]
    assert not listed, "\n".join(listed)
    assert done.files > 100
    assert done.rows == sum(len(registry.rows(op.id)) for op in registry.ops())


@pytest.mark.parametrize("rule", cuda_rules.RULES)
def test_each_rule_of_cuda_catches_its_fault(rule: str) -> None:
    """Catches: a rule that no longer fires, and one that fires on good code."""
    assert list(cuda_rules.check(Path("f.cu"), GOOD)) == []
    findings = list(cuda_rules.check(Path("f.cu"), CUDA[rule]))
    assert {f.rule for f in findings} == {rule}
    assert all(f.fix and f.line for f in findings)


def test_out_comes_first() -> None:
    """Catches: a launcher whose result stands among its inputs."""
    text = GOOD.replace("Tensor& out, const Tensor& input", "const Tensor& input, Tensor& out")
    assert [f.rule for f in cuda_rules.check(Path("f.cu"), text)] == ["launcher"]


KERNEL = """
@triton.jit
def _kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK


def f(input, out=None):
    grid = (tokens, 4)
    launch(_kernel, grid, input)
    return out
"""
PYTHON = {
    "contiguous": KERNEL.replace("launch(_kernel, grid, input)", "launch(_kernel, grid, input.contiguous())"),
    "autotune": KERNEL.replace("@triton.jit", "@triton.autotune(configs=[], key=[])\n@triton.jit"),
    "grid": KERNEL.replace("(tokens, 4)", "(4, tokens // 2)"),
    "int64-pid": KERNEL.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)"),
    "sm-version": KERNEL.replace("return out", "return torch.cuda.get_device_capability(0)"),
}


@pytest.mark.parametrize("rule", PYTHON)
def test_each_rule_of_python_catches_its_fault(rule: str) -> None:
    """Catches: a rule that no longer fires, and one that fires on good code."""
    assert list(python_rules.check(Path("f.py"), KERNEL)) == []
    assert [f.rule for f in python_rules.check(Path("f.py"), PYTHON[rule])] == [rule]


THIN = """
def f(input, factor, out=None):
    if out is None:
        out = torch.empty_like(input)
    _kernel[input.get_device()](out, input, factor)
    return out
"""


@pytest.mark.parametrize(
    ("old", "new_text"),
    [
        ("_kernel[input.get_device()](out, input, factor)", "_kernel(out, input.contiguous())"),
        ("_kernel[input.get_device()](out, input, factor)", "_kernel(out, factor.item())"),
        ("_kernel[input.get_device()](out, input, factor)", "check(input)\n    _kernel(out)"),
        ("_kernel[input.get_device()](out, input, factor)", "for x in input:\n        _kernel(x)"),
        ("    _kernel[", "    out = _floor(input, factor, out)\n    _kernel["),
    ],
)
def test_a_thin_wrapper_does_one_call(old: str, new_text: str) -> None:
    """Catches: copies, syncs, loops and checks that a wrapper makes on every call."""
    assert list(python_rules.thin(Path("f.py"), THIN, "f")) == []
    findings = list(python_rules.thin(Path("f.py"), THIN.replace(old, new_text), "f"))
    assert {f.rule for f in findings} == {"thin-wrapper"}


def waived(text: str, rule: str = "sync") -> list[Finding]:
    """What is left of one finding on line 3 of `text`."""
    path = Path("f.cu")
    return settle([Finding(path, 3, rule, "x", "y")], {path: text}, row_rules.ALL)


def test_a_waiver_needs_a_reason_and_something_to_allow() -> None:
    """Catches: findings hushed in silence, and waivers that outlive what they allowed."""
    assert waived("//\n// check: allow sync: it measures\ncuda();\n") == []
    assert waived("//\n\ncuda(); // check: allow sync: it measures\n") == []
    assert [f.rule for f in waived("//\n// check: allow sync\ncuda();\n")] == ["waiver"]
    assert [f.rule for f in waived("//\n// check: allow stream: wrong rule\ncuda();\n")] == ["waiver", "sync"]
    assert [f.rule for f in waived("// check: allow sync: too far\n\ncuda();\n")] == ["waiver", "sync"]
    assert "no rule" in waived("//\n// check: allow everything: please\ncuda();\n")[0].text


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose kernel was just made."""
    folder = tmp_path_factory.mktemp("package")
    made = new(*("swap", "--group", "g", "--path", "jit", "--why", "a test", "--into", "my_rows"), cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder / "my_rows"


def checked(package: Path) -> dict[str, set[str]]:
    """rule -> files with a finding, of the package with its rows registered."""
    code = (
        "import json, pathlib, my_rows\n"
        "from rapid_llm.kernels.registry import plugins\n"
        "plugins.scan(); my_rows.register()\n"
        "from rapid_llm.authoring.check import check\n"
        "done = check([pathlib.Path('.')])\n"
        "print(json.dumps([done.rows, [f.json(done.root) for f in done.findings]]))"
    )
    done = python("-c", code, cwd=package)
    assert done.returncode == 0, done.stderr
    rows, findings = json.loads(done.stdout)
    assert rows == 2
    result: dict[str, set[str]] = {}
    for finding in findings:
        assert finding["fix"]
        assert finding["line"] >= 1
        result.setdefault(finding["rule"], set()).add(finding["file"])
    return result


def test_a_scaffold_passes_and_what_is_taken_from_it_is_missed(package: Path) -> None:
    """Catches: rules about rows that see nothing: tests, benchmark, hooks, gating, preparation."""
    assert checked(package) == {}
    (package / "tests" / "test_swap_jit.py").unlink()
    (package / "benchmarks" / "swap.py").unlink()
    declared = package / "my_rows" / "__init__.py"
    text = declared.read_text()
    for line in ("capability=((80, None),),", 'prepare="my_rows.swap_jit:prepare",'):
        assert line in text
        text = text.replace(line, "")
    declared.write_text(text.replace("my_rows.verify:swap_bound", "my_rows.verify:swap_limit"))
    cuda = package / "my_rows" / "csrc" / "swap_launch.h"
    cuda.write_text(cuda.read_text().replace('check_launch("swap");', ""))
    assert checked(package) == {
        "row-tests": {"my_rows/__init__.py"},
        "benchmark": {"my_rows/__init__.py"},
        "sm-gate": {"my_rows/__init__.py"},
        "prepare": {"my_rows/__init__.py"},
        "op-spec": {"my_rows/__init__.py"},
        "launch-check": {"my_rows/csrc/swap_launch.h"},
    }


def test_lists_stay_sorted(tmp_path: Path) -> None:
    """Catches: an op added at the end of the extension's list, sources in the order of the disk."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "common_extension.cc").write_text('m.def("b() -> ()");\nm.def("a() -> ()");\n')
    (tmp_path / "setup.py").write_text('sources = glob("csrc/*.cu")\n')
    findings = list(row_rules._sorted(Project(tmp_path, True, True)))
    assert [(f.path.name, f.line, f.rule) for f in findings] == [
        ("common_extension.cc", 2, "sorted"),
        ("setup.py", 1, "sorted"),
    ]


def test_the_command_says_where_and_why_and_exits_with_1(tmp_path: Path) -> None:
    """Catches: a finding without its place, a status that a script cannot use."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "k.cu").write_text(CUDA["sync"])
    done = python("-m", "rapid_llm.cli", "kernels", "check", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "k.cu:5: sync: cudaDeviceSynchronize" in done.stdout
    assert "Fix: " in done.stdout
    (tmp_path / "k.cu").write_text(GOOD)
    assert python("-m", "rapid_llm.cli", "kernels", "check", ".", cwd=tmp_path).returncode == 0
    missing = python("-m", "rapid_llm.cli", "kernels", "check", "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert "nowhere does not exist" in missing.stderr

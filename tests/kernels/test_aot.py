"""The extension's probe: absent, damaged, and built for something else, each a reason of its own with its fix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import aot, registry
from rapid_llm.kernels.registry import filters, probes
from rapid_llm.kernels.registry.facts import Facts
from tests.kernels.extension import GOOD, ROOT, builder, stand_in

ROWS = [row for op in registry.ops() for row in registry.rows(op.id) if row.backend == "aot"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Path:
    """Where the extension is looked for: empty, on a machine with a driver of CUDA 13.0 and one GPU of SM 90."""
    monkeypatch.setattr(aot, "PACKAGE", tmp_path)
    monkeypatch.setattr(aot, "_loaded", [])
    monkeypatch.setattr(aot, "driver_cuda", lambda: (13, 0))
    monkeypatch.setattr(aot, "_sm_versions", lambda: (90,))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("RAPID_LLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def refused(text: str, fix: str) -> None:
    """The probe and `load` agree where the fault is the file's; both name it."""
    found = aot.why_not()
    assert not found.ok
    assert not aot.available()
    assert text in found.text, found.text
    assert fix in found.fix, found.fix


def test_absent(folder: Path) -> None:
    """Catches: a missing extension that is an exception, or a reason without the command that mends it."""
    refused("rapid_llm._C is not built", aot.BUILD)
    assert not aot.why_not().installed
    assert aot.build_info() is None
    with pytest.raises(aot.ExtensionError, match="is not built"):
        aot.load()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
def test_without_it_every_row_is_out_and_says_why(
    row: registry.KernelSpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: [A5] a row that is admitted, or breaks dispatch, on an install without the extension."""
    monkeypatch.setattr(probes, "_results", {})
    facts = Facts(
        *(row.op, "cuda", 0, 90, row.dtypes[0], next(iter(row.schemes), None)),
        dims={"tokens": 1, "in_features": 64, "kv_bits": 16},
        layout=frozenset(row.layout),
        prepack=row.prepack is not None,
    )
    (reason,) = filters.judge(row, facts, forced=True, broken=None).reasons
    assert reason.code == "unavailable"
    assert "is not built" in reason.text
    assert "RAPID_LLM_BUILD_EXT=1" in reason.fix


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"", "is no shared library (0 bytes)"), (b"Not Found" * 20, "is no shared library (180 bytes)")],
)
def test_not_a_library(folder: Path, content: bytes, text: str) -> None:
    """Catches: a failed download, kept under the library's name, taken for another kind of fault."""
    (folder / aot.FILE).write_bytes(content)
    refused("broken file: ", aot.BUILD)
    assert text in aot.why_not().text


@pytest.mark.parametrize("part", [0.3, 0.99])
def test_cut_short(folder: Path, part: float) -> None:
    """Catches: a file cut by a full disk that is mapped, which ends the process with SIGBUS."""
    path = stand_in(folder)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    refused("is cut short", aot.BUILD)


@pytest.mark.parametrize(("old", "new"), [("torch=2.11", "torch=main"), ("cuda=13.0", "cuda=x"), ("sm_80", "gfx90a")])
def test_a_statement_that_means_nothing(folder: Path, old: str, new: str) -> None:
    """Catches: a ValueError out of `doctor`, for a file whose statement is damaged or of another product."""
    stand_in(folder, GOOD.replace(old, new))
    refused("does not say what it was built for", aot.BUILD)
    assert aot.build_info() is None


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a PermissionError out of `doctor`."""

    def denied(path: Path) -> str:
        raise PermissionError(13, "Permission denied")

    (folder / aot.FILE).write_bytes(b"")
    monkeypatch.setattr(aot, "_damage", denied)
    refused("cannot be read", "let this user read it")
    assert aot.build_info() is None


def test_of_another_processor(folder: Path) -> None:
    """Catches: a wheel for another machine reported as damage."""
    path = stand_in(folder)
    content = bytearray(path.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")  # RISC-V
    path.write_bytes(content)
    refused("is for another processor (ELF machine 243", "install it again")


def test_for_a_later_torch(folder: Path) -> None:
    """Catches: [P35] an older torch met as a missing symbol, or not at all."""
    stand_in(folder, GOOD.replace("torch=2.11", "torch=9.3"))
    refused(f"other torch: built for torch 9.3 and later, found {torch.__version__}", "install torch>=9.3")


def test_for_a_later_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: [P26] a driver too old for the library, found at the first launch."""
    stand_in(folder)
    monkeypatch.setattr(aot, "driver_cuda", lambda: (12, 8))
    refused("other CUDA: built with CUDA 13.0, the driver runs CUDA 12.8 at most", "driver for CUDA 13")


def test_for_other_architectures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: [P21] "no kernel image" at the first launch; both architectures are named."""
    stand_in(folder)
    monkeypatch.setattr(aot, "_sm_versions", lambda: (75,))
    refused("other architecture: built for sm_80 sm_90 compute_120, this machine's GPUs are sm_75", '"7.5"')


@pytest.mark.parametrize(
    ("sm", "runs"),
    [(75, False), (80, True), (86, True), (89, True), (90, True), (100, False), (120, True), (130, True)],
)
def test_which_devices_it_runs_on(folder: Path, sm: int, runs: bool) -> None:
    """Catches: machine code taken for portable to the next major version, PTX for portable to an older one."""
    info = aot.read_info(stand_in(folder))
    assert info is not None
    assert info.runs_on(sm) is runs


def test_missing_symbol(folder: Path) -> None:
    """Catches: [P35] a loader's message without the versions that it is about."""
    stand_in(folder, body="int torch_gone(void); void* PyInit__C(void) { return (void*)(long)torch_gone(); }")
    refused("missing symbol torch_gone", "build it for this one")
    text = aot.why_not().text
    assert "for torch 2.11 and later (headers of 2.13.0), CUDA 13.0" in text
    assert f"found torch {torch.__version__}" in text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("__attribute__((constructor)) void f(void) { __builtin_trap(); } void* PyInit__C(void) { return 0; }", "SIG"),
        ("void* PyInit__C(void) { return *(void**)8; }", "was killed by SIGSEGV"),
        ("void _exit(int); void* PyInit__C(void) { _exit(3); return 0; }", "ended its process with status 3"),
        ("int no_module;", "PyInit__C"),
    ],
)
def test_one_that_ends_its_process_ends_the_childs(folder: Path, body: str, text: str) -> None:
    """Catches: [P34] a library opened here before it was opened in a child."""
    stand_in(folder, body=body)
    refused("does not load", "install it again")
    assert text in aot.why_not().text


def test_of_other_sources(folder: Path) -> None:
    """Catches: a kernel that was edited, and its old binary run in silence."""
    path = stand_in(folder)
    package, source = folder / "rapid_llm", folder / "csrc" / "common_extension.cc"
    source.parent.mkdir()
    package.mkdir()
    path.rename(package / aot.FILE)
    source.write_text("// new\n")
    aot.PACKAGE = package
    refused("stale: ", aot.BUILD)


def test_the_digest_follows_the_headers(tmp_path: Path) -> None:
    """Catches: a digest of the sources alone, which a change two headers deep leaves as it was."""
    csrc, kernels = tmp_path / "csrc", tmp_path / "kernels"
    (csrc / "include").mkdir(parents=True)
    kernels.mkdir()
    (csrc / "a.cu").write_text('#include "one.h"\n')
    (csrc / "include" / "one.h").write_text('# include "deep.cuh"\n')
    (kernels / "deep.cuh").write_text("1\n")
    (kernels / "unused.h").write_text("1\n")
    before = aot.source_digest(csrc, kernels)
    (kernels / "unused.h").write_text("2\n")
    assert aot.source_digest(csrc, kernels) == before
    (kernels / "deep.cuh").write_text("2\n")
    assert aot.source_digest(csrc, kernels) != before


def test_a_good_verdict_is_remembered_and_a_bad_one_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a child and its import of torch at every start; a fault that was mended and is still reported."""
    asked = []
    answers = [probes.Probe(False, "no disk"), probes.Probe(True)]
    monkeypatch.setattr(probes, "_ask_child", lambda *a: asked.append(a) or answers[len(asked) - 1])
    path = folder / aot.FILE
    path.write_bytes(b"x")
    oks = []
    for _ in range(3):
        monkeypatch.setattr(probes, "_results", {})
        oks.append(probes.extension(aot.NAME, path).ok)
    assert oks == [False, True, True]
    assert len(asked) == 2


def test_the_lower_bound_of_torch_is_what_is_built_for() -> None:
    """Catches: [P74] a requirement that lets a resolver pick a torch which cannot load the library."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = ".".join(map(str, builder().TORCH_TARGET))
    assert f"torch>={wanted}" in project["project"]["dependencies"]
    assert not any("torch" in name for name in project["build-system"]["requires"])


def test_the_sources_are_ascii_and_each_op_has_both_doors() -> None:
    """Catches: an op that is declared and not registered, or has one door only; a character that a compiler refuses."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cu", ".cc", ".h")]
    assert all(path.read_bytes().isascii() for path in sources)
    registration = (ROOT / "csrc" / "common_extension.cc").read_text()
    declared = (ROOT / "csrc" / "include" / "rapid_llm_ext.h").read_text()
    ops = sorted(path.stem for path in sources if path.suffix == ".cu")
    assert ops == sorted({row.target.rpartition(":")[2].removesuffix("_settled") for row in ROWS})
    for op in ops:
        for text in (f'm.def("{op}(', f'm.impl("{op}", TORCH_BOX(&rapid_llm::ext::{op}))', f"RAPID_LLM_THIN({op})"):
            assert text in registration.replace("m.def(\n        ", "m.def("), f"common_extension.cc lacks {text}"
        assert declared.count(f"void {op}(") == 2


def test_architectures_are_asked_for_by_torchs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: [P19] a list that is not honoured, or not exactly."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert builder().architectures() == ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "compute_120")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 8.0+PTX")
    assert builder().architectures() == ("sm_90a", "sm_80", "compute_80")


def test_nothing_imports_it_unasked() -> None:
    """Catches: [A3] `rapid_llm._C`, or torch for its sake, imported by the package or by its probe's module."""
    code = (
        "import sys, rapid_llm, rapid_llm.kernels.aot as a; print([m for m in ('torch', a.NAME) if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[]", done.stderr

"""`rapid-llm kernels doctor` on the variables that builds heed: found before a build stumbles over them."""

from __future__ import annotations

import dataclasses

import pytest

from rapid_llm.authoring import diagnosis
from rapid_llm.kernels.build import Part, Toolchain


@pytest.fixture(autouse=True)
def a_whole_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc for two architectures, on a machine without a GPU."""
    tools = dataclasses.replace(Toolchain((Part("nvcc", True, "13.0"),)), archs=("sm_80", "sm_90"), nvcc_text="nvcc 13")
    monkeypatch.setattr(diagnosis.build, "toolchain", lambda: tools)
    monkeypatch.setattr(diagnosis.builds, "device_sms", lambda: ())
    for name in ("TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)


def findings() -> list[tuple[str, str]]:
    found = diagnosis.Diagnosis()
    diagnosis._toolchain(found)
    return found.findings


@pytest.mark.parametrize("value", ["9.0", "8.0;9.0+PTX", "Hopper", "native", " ", "9.0a"])
def test_what_builds_take_is_no_finding(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a list that torch understands refused by the doctor alone."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    monkeypatch.setenv("MAX_JOBS", "2")
    assert findings() == []


@pytest.mark.parametrize(
    ("value", "sms", "says", "fix"),
    [
        ("9.0;hopper", (), "'hopper' is no architecture", 'export TORCH_CUDA_ARCH_LIST="9.0"'),
        ("sm_90", (), "'sm_90' is no architecture", 'export TORCH_CUDA_ARCH_LIST="9.0"'),
        ("7.0 9.0", (), "nvcc 13 does not compile for sm_70, only for sm_80 sm_90", "unset TORCH_CUDA_ARCH_LIST"),
        ("9.0", (80, 90), "no entry that the device's sm_80 runs", 'export TORCH_CUDA_ARCH_LIST="8.0 9.0"'),
    ],
)
def test_a_bad_list_of_architectures(
    value: str, sms: tuple[int, ...], says: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a doctor that sees nothing where every build fails; a fix that names no value."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    monkeypatch.setattr(diagnosis.builds, "device_sms", lambda: sms)
    ((what, cure),) = findings()
    assert f"TORCH_CUDA_ARCH_LIST={value}" in what
    assert says in what
    assert fix in cure


@pytest.mark.parametrize("value", ["0", "-3", "many", "1.5"])
def test_a_bad_number_of_jobs(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: MAX_JOBS that stops every build, and the doctor alike instead of being told."""
    monkeypatch.setenv("MAX_JOBS", value)
    ((what, cure),) = findings()
    assert f"MAX_JOBS={value!r}" in what
    assert cure == "unset MAX_JOBS"

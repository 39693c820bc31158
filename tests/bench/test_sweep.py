"""Declared sweeps: their cases, their arms, their tables, pictures and files, and runs held against earlier ones."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.kernels import driver
from rapid_llm.bench import Load, Work
from rapid_llm.bench.cpu_device import CpuDevice
from rapid_llm.bench.device import Calibration
from rapid_llm.bench.op_arms import op_arms
from rapid_llm.bench.plots import bar, plot_sweep, print_roofline
from rapid_llm.bench.previous import compared, load
from rapid_llm.bench.sweep import Benchmark, CaseResult, arms_of, benchmark, parametrize
from rapid_llm.bench.tables import print_case, print_missing, print_sweep
from rapid_llm.kernels.registry import ops
from tests.bench.cheats import honest
from tests.bench.fake_device import FakeDevice
from tests.bench.test_rows import run as run_rows

FOLDER = Path(driver.__file__).parent


def declared() -> dict[str, Benchmark]:
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        module = importlib.import_module(f"benchmarks.kernels.{path.stem}")
        sweep = getattr(module, path.stem, None)
        if isinstance(sweep, Benchmark):
            found[path.stem] = sweep
    return found


def case(parameters: dict[str, Any], device: FakeDevice, seconds: dict[str, float]) -> CaseResult:
    rows = {name: honest(device, took) for name, took in seconds.items()}
    return CaseResult(parameters, run_rows(device, rows), next(iter(rows)), {"nvrtc/scale": "x:\n  no GPU here"})


def shown(*printers: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for printer in printers:
        printer(console)
    return console.export_text()


def test_every_op_has_a_benchmark() -> None:
    """Catches: an op that lands without its benchmark, or a file that measures another op."""
    sweeps = declared()
    assert {op.function for op in ops() if op.group != "bench"} == set(sweeps)
    for name, sweep in sweeps.items():
        assert sweep.op.replace(".", "_") == sweep.name == name


@pytest.mark.parametrize("name", sorted(declared()))
def test_every_benchmark_makes_calls_that_its_op_takes(name: str) -> None:
    """Catches: a quick list outside the full one, arguments that the op refuses, inputs that a check would refuse."""
    sweep = declared()[name]
    for parameter in sweep.parameters:
        if name != "linear":
            assert set(map(str, parameter.quick)) <= set(map(str, parameter.full)), parameter
    assert 0 < len(sweep.cases(quick=True)) <= 4
    small = {"tokens": 3, "length": 32, "sequences": 2, "rows": 2, "vocabulary": 1000, "heads": 4, "width": 64}
    small |= {"hidden": 96, "size": 1000, "model": "smollm2-135m", "experts": "toy"}
    shapes = [shape for parameter in sweep.parameters if parameter.name == "shape" for shape in parameter.full]
    small["shape"] = next((shape for shape in shapes if str(shape).startswith("smollm2-135m")), "toy")
    chosen = {key: small.get(key, value) for key, value in sweep.cases(quick=True)[0].items()}
    chosen |= {"dtype": "fp32"} if "dtype" in chosen else {}
    peers = {key: make for key, make in sweep.arms.peers.items() if key != "torch.compile"}  # imports take seconds
    found = op_arms(sweep.op, sweep.values(chosen, "cpu"), peers, sweep.arms.roundings)
    assert found.arms[0].name == found.chosen
    assert found.work.bytes > 0
    assert sweep.arms.op == found.op.id


def test_arms_name_the_rows_that_run() -> None:
    """Catches: a table whose lines are functions of unknown origin; a row that is missing without a reason."""
    values = {"input": torch.randn(100), "factor": 0.3}

    def absent() -> Any:
        raise ImportError("liger is not installed")

    found = op_arms("scale", values, {"torch": lambda: torch_scale, "liger": absent})
    names = [arm.name for arm in found.arms]
    assert names[0] == "native/scale"
    assert found.arms[0].forced
    assert found.missing["liger"] == "liger is not installed"
    assert "cuda" in found.missing["jit/scale"]
    assert found.work == Work(800, 100, 400)
    assert found.arms[-1].out is not None  # the peer takes `out`, as the rows do


def torch_scale(input: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mul(input, factor, out=out)


def test_declarations() -> None:
    """Catches: parameters lost or out of order, and mistakes that only show when the sweep runs."""

    @parametrize("a", full=(1, 2), quick=(1,))
    @parametrize("b", full=("x", "y"), quick=("x", "y"))
    @benchmark("row", arms=arms_of("scale"))
    def made(g: torch.Generator, a: int, b: str) -> dict[str, Any]:
        return {"input": torch.randn(a, generator=g), "factor": 2.0}

    assert made.cases() == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    assert len(made.cases(quick=True)) == 2
    assert torch.equal(made.values({"a": 2, "b": "x"}, "cpu")["input"], made.values({"a": 2, "b": "y"}, "cpu")["input"])
    with pytest.raises(ValueError, match="declared twice"):
        parametrize("a", full=(1,), quick=(1,))(made)
    with pytest.raises(ValueError, match="at least one value"):
        parametrize("c", full=(), quick=(1,))
    with pytest.raises(TypeError, match="stands above"):
        parametrize("c", full=(1,), quick=(1,))(lambda g: {})  # type: ignore[arg-type]


def test_combinations_that_do_not_exist_are_skipped() -> None:
    """Catches: a sweep that ends at the first combination which its op does not have."""
    found = declared()["linear"].run_case(
        {"tokens": 1, "shape": "smollm2-135m qkv", "scheme": "fp8_block128", "dtype": "bf16"}, "cpu"
    )
    assert found.code == "skipped"
    assert "576" in found.json()["failure"]["reason"]


def test_tables_name_rows_verdicts_and_reasons() -> None:
    """Catches B30: a table that hides a refusal, the floor or the label."""
    device = FakeDevice()
    one = case({"size": 4096}, device, {"one/scale": 10e-6, "two/scale": 8e-6, "torch": 1e-12})
    failed = CaseResult({"size": 1}, None, "one/scale", {}, "cannot be varied", "degenerate_input")
    text = shown(
        lambda c: print_case(one, "row", c), lambda c: print_case(failed, "row", c), lambda c: print_missing([one], c)
    )
    for words in ("one/scale *", "FAST", "cold", "GB/s", "too_fast", "the baseline over itself", "no GPU here"):
        assert words in text, words
    assert "a call that does nothing: 1 us" in text
    assert "refused (degenerate_input): cannot be varied" in text
    assert "8 us" in shown(lambda c: print_sweep([one, one, failed], c))
    assert shown(lambda c: print_sweep([one, failed], c)) == ""


def test_pictures(tmp_path: Path) -> None:
    """Catches: a roofline whose full bar is not the ceiling; PNG files that are claimed and not written."""
    assert bar(0.5).startswith("█" * 20 + "·" * 20)
    assert bar(None).startswith("(warm")
    assert bar(1.7).count("█") == 40
    device = FakeDevice()
    facts = {"device": device.describe(), "calibration": device.calibration.json() if device.calibration else {}}
    cases = [case({"size": n, "dtype": "fp32"}, device, {"one/scale": n * 2e-9}) for n in (4096, 8192)]
    assert "one/scale" in shown(lambda c: print_roofline(cases, facts, c))
    made = plot_sweep(declared()["scale"], cases, facts, tmp_path / "scale.json")
    expected = 2 if importlib.util.find_spec("matplotlib") else 0
    assert [path.exists() for path in made] == [True] * expected


def test_a_slower_row_is_found_by_ratios(tmp_path: Path) -> None:
    """Catches: times of two runs compared as such; a machine that is slower as a whole called a regression."""
    device = FakeDevice()
    before = case({"size": 4096}, device, {"one/scale": 10e-6, "two/scale": 8e-6, "torch": 10e-6})
    after = case({"size": 4096}, device, {"one/scale": 20e-6, "two/scale": 19e-6, "torch": 20e-6})
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"kernel_schema": 1, "cases": [before.json()]}))
    words = {change.arm: change.verdict for change in compared([after], load(path))}
    assert words == {"one/scale": "SAME", "two/scale": "SLOW"}
    assert "SLOW" in str(compared([after], load(path))[1])
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a kernel benchmark"):
        load(path)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a run that writes no file, one without environment or digest, and a SLOW that exits with 0."""
    device = CpuDevice(itertools.count(0, 10_000).__next__, budget=1 << 22)
    device.cache_bytes, device.max_copies, device.block_seconds = 1 << 16, 4, 1e-5
    device.calibration = Calibration(2.0, 1.0, 1e12, "scripted")
    monkeypatch.setattr("rapid_llm.bench.results.require_normal_threads", lambda: None)
    monkeypatch.setattr("rapid_llm.bench.results.require_idle", lambda **kwargs: Load(0.0, 0.0, 0, None))
    monkeypatch.setattr("rapid_llm.bench.sweep.device_for", lambda name: device)

    @parametrize("size", full=(4096,), quick=(2048,))
    @benchmark("row", arms=arms_of("scale", torch=lambda: torch_scale))
    def scale(g: torch.Generator, size: int) -> dict[str, Any]:
        return {"input": torch.randn(size, generator=g), "factor": 0.3}

    common = ["--quick", "--out", str(tmp_path), "--device", "cpu", "--force-busy", "--rounds", "2", "--seconds", "0"]
    assert driver.main(scale, common) == 0
    (path,) = tmp_path.glob("scale-*-quick.json")
    record = json.loads(path.read_text())
    assert record["environment"]["device"]["kind"] == "cpu"
    assert record["machine"]["versions"]["torch"]
    assert record["digests"]["native/scale"]
    (only,) = record["cases"]
    assert only["chosen"] == "native/scale"
    assert set(only["arms"]) | set(only.get("refused", {})) == {"native/scale", "torch"}

    old = record
    for arm, factor in (("native/scale", 1e-6), ("torch", 1.0)):
        old["cases"][0]["arms"][arm]["samples"] = [factor] * 14
    path.write_text(json.dumps(old))
    assert driver.main(scale, [*common, "--compare", str(path)]) == 1
    with pytest.raises(SystemExit, match="nothing"):
        driver.main(scale, [*common, "--compare", "nothing"])

"""The page of measured ranks says what the records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import rapid_llm.kernels  # noqa: F401 - declares the ops
from rapid_llm.kernels.registry import get_row, timing_records
from rapid_llm.kernels.registry.timings import Point, Timing

GENERATOR = Path(__file__).parents[2] / "docs" / "generate.py"
FLOOR, FAST = "native/rmsnorm", "cpp/rmsnorm"


def test_the_page_shows_choices_and_regret(tmp_path: Path) -> None:
    """Catches: a table that leaves out the calls in which the chosen row is not the fastest."""
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert "No times ship yet" in generate.ranks_page(tmp_path)

    def point(tokens: int, ratio: float, *flags: str) -> Point:
        times = {FLOOR: Timing(10, 9, 11), FAST: Timing(10 * ratio, 9, 11, ratio, ratio, ratio, flags)}
        floor = Timing(10, 9, 11, flags=flags)
        rows = {**times, FLOOR: floor}
        dims = {"tokens": tokens, "hidden": 64}
        return Point("rmsnorm", "fp32", None, dims, rows, (FLOOR, FAST), date="2026-12-01", torch="2.11.0")

    sources = {name: timing_records.source_of(get_row(name)) for name in (FLOOR, FAST)}
    points = [point(1, 0.5), point(2, 0.99), point(4, 0.5, "floor-limited")]
    timing_records.write(tmp_path / "x.json", "cpu test", points, sources)  # type: ignore[arg-type]
    text = generate.ranks_page(tmp_path)
    assert "2 calls, 2026-12-01, with torch 2.11.0; 1 more take as long as a launch" in text
    assert "The largest regret is 1.0%." in text
    cells = "| rmsnorm | fp32 | hidden=64, tokens={} | `{}` | {} | `cpp/rmsnorm` | {} | {} | 2 |"
    assert cells.format(1, FAST, 5, 5, "0.0%") in text
    assert cells.format(2, FLOOR, 10, "9.9", "1.0%") in text

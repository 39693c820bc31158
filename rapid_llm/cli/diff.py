"""`rapid-llm diff`: which row makes two configurations of a model differ, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from .support import BAD, print_json, print_pairs, print_table, usage

if TYPE_CHECKING:
    from rapid_llm.locate.diagnosis import Diagnosis, Guilty
    from rapid_llm.locate.locate import Located

PROMPTS: Final = (
    "The lighthouse keeper wrote in the log every evening, whether the sea was calm or not: the time, the wind, the "
    "height of the waves, and the names of the ships that had passed. On the third of March 1911 the entry is longer "
    "than usual. A steamer had come in from the north with her lamps out, and nobody on board answered the signals. "
    "He counted 17 lifeboats. The next morning",
    "def fibonacci(n):\n    a, b = 0, 1\n",
    "The capital of France is",
)
"""What both sides read unless prompts are given: enough tokens for the rows of a long prefill, and two short ones."""

SHOWN: Final = 12
"""Lines of the table of ops; --json has them all."""


def run(
    *,
    a: str,
    b: str,
    model: str | None,
    prompts: Sequence[str],
    threads: int | None,
    case: str,
    plot: str | None,
    replay: str | None,
    json: bool,
) -> None:
    """Compare and print, or replay a case. Exits with 1 if a row is out of its bound."""
    if replay is not None:
        _replay(replay, json=json)
        return
    from rapid_llm.locate.plot import check_png, png

    with usage():
        if plot is not None:
            check_png(plot)
        located = _locate(a, b, model, prompts, threads)
    diagnosis = located.diagnosis
    written = _write_case(located, Path(case), model) if located.exhibits else None
    if plot is not None:
        png(Path(plot), diagnosis.layers, f"{diagnosis.a} against {diagnosis.b}")
    if json:
        print_json({**diagnosis.json(), "case": None if written is None else str(written), "plot": plot})
    else:
        _print(diagnosis, written, plot)
    if not diagnosis.ok:
        raise typer.Exit(BAD)


def _locate(a: str, b: str, model: str | None, prompts: Sequence[str], threads: int | None) -> Located:
    import torch

    from rapid_llm.engine.text.tokenizer import Tokenizer
    from rapid_llm.locate import Configuration, locate
    from rapid_llm.models import hub
    from rapid_llm.models.config import ModelConfig
    from rapid_llm.models.gguf import GGUFFile
    from rapid_llm.platform import default_threads

    torch.set_num_threads(default_threads() if threads is None else threads)
    sides = [Configuration.parse(text) for text in (a, b)]
    file = GGUFFile(hub.resolve_model(hub.DEFAULT_MODEL if model is None else model))
    tokenizer = Tokenizer.from_gguf(file)
    ids = [tokenizer.encode(text) for text in (prompts or PROMPTS)]
    if not all(ids):
        raise ValueError("a prompt is empty; give at least one token")
    return locate(file, ModelConfig.from_gguf(file), sides[0], sides[1], ids, progress=_progress())


def _progress() -> Callable[[str], None]:
    """One line on a terminal, written over; nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None

    def show(text: str) -> None:
        print(f"\r\x1b[K{text[: os.get_terminal_size(sys.stderr.fileno()).columns - 1]}", end="", file=sys.stderr)

    return show


def _write_case(located: Located, path: Path, model: str | None) -> Path:
    from rapid_llm.locate.case import write

    from .version import version

    exhibit = located.exhibits[0]
    origin = {
        "rapid_llm": version(),
        "model": model or "default",
        "a": located.diagnosis.a,
        "b": located.diagnosis.b,
        "step": located.diagnosis.steps[exhibit.place.step],
    }
    write(path, exhibit, device=located.devices[exhibit.side == "b"], origin=origin)
    return path


def _print(d: Diagnosis, case: Path | None, plot: str | None) -> None:
    from rapid_llm.locate.plot import bars

    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    whole = f"logits differ by {d.whole.difference:.2e}, best token agrees in {d.whole.agreeing} of {d.whole.rows}, "
    pairs: list[tuple[str, object]] = [
        ("a", d.a),
        ("b", d.b),
        ("steps", ", ".join(d.steps)),
        ("whole model", f"{whole}its log-probability differs by at most {d.whole.logprob:.2e}"),
    ]
    print_pairs(pairs)
    print()
    for line in [f"error by layer: {plot}"] if plot is not None else bars(d.layers):
        print(line)
    print()
    columns = ("op", "row of a", "row of b", "calls", "equal", "difference", "a / bound", "b / bound", "worst at")
    cells = [
        (e.op, e.row_a, e.row_b, e.calls, e.equal, _figure(e.difference), _share(e.ratio_a), _share(e.ratio_b), e.worst)
        for e in d.ops[:SHOWN]
    ]
    print_table(columns, cells)
    if len(d.ops) > SHOWN:
        print(f"and {len(d.ops) - SHOWN} more, all of them better: --json lists them")
    print()
    for text in _verdict(d, case):
        print(text)


def _verdict(d: Diagnosis, case: Path | None) -> list[str]:
    lines = [_sentence(g) for g in d.guilty]
    if d.explains:
        lines.append(f"swapped into a alone, {' and '.join(d.explains)} brings the difference about")
    if d.odd_layers:
        listed = ", ".join(map(str, d.odd_layers))
        lines.append(f"layers {listed} differ from the reference though every row is right: the model is read wrongly")
    if d.ok:
        lines.append("every row is within its bound" if d.ops else "the two run the same rows on the same numbers")
    if d.unreached:
        lines.append(f"never called, so nothing is known of: {', '.join(d.unreached)} (give other --prompt texts)")
    lines.append(f"{d.runs} model runs for {d.rows} rows (limit {d.limit})")
    if case is not None:
        lines.append(f"the worst call is in {case}: rapid-llm diff --replay {case}")
    return lines


def _sentence(g: Guilty) -> str:
    size = "out of its bound" if g.ratio == float("inf") else f"{g.ratio:.3g} times its bound off"
    return f"GUILTY {g.row} ({g.op}, side {g.side}) in {_where(g.layers)}: {size} at {g.worst}, {g.step}: {g.problem}"


def _where(places: Sequence[str]) -> str:
    """`layers 0-3, 7, head` of `layer 0`, `layer 1`, ..., `head`."""
    numbers = [int(place.removeprefix("layer ")) for place in places if place.startswith("layer ")]
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    layers = [f"layer{'s'[: len(numbers) > 1]} {listed}"] if numbers else []
    return ", ".join([*layers, *(place for place in places if not place.startswith("layer "))])


def _figure(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.1e}"


def _share(ratio: float) -> str:
    return "" if ratio == 0.0 else f"{ratio:.3g}"


def _replay(path: str, *, json: bool) -> None:
    from rapid_llm.locate import replay

    with usage():
        found = replay(path)
    if json:
        data: dict[str, Any] = {
            "ok": found.ok,
            "row": found.row,
            "op": found.op,
            "device": found.device,
            "place": found.place,
            "recorded_ratio": str(found.recorded),
            "ratio": str(found.check.ratio),
            "problem": found.check.problem,
        }
        print_json(data)
    else:
        state = "within its bound" if found.ok else "out of its bound"
        print(f"{found.row} at {found.place} on {found.device}: {state}, {found.check.ratio:.3g} of it")
        print(f"when the case was written: {found.recorded:.3g}")
        if found.check.problem is not None:
            print(found.check.problem)
    if not found.ok:
        raise typer.Exit(BAD)

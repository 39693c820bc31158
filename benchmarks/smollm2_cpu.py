"""SmolLM2 on this CPU against transformers, interleaved in one run: `python -m benchmarks.smollm2_cpu`.

Decode and prefill speeds of this package with dtype float32 (which promises the reference's ids) and auto (the fastest
verified mix), beside transformers in float32 and bfloat16, with the same number of threads. Needs the `bench` extra.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rapid_llm.bench import Comparison, Figure, Run, compare_arms, read_bandwidth
from rapid_llm.platform import default_threads

from . import common

MODULE = "benchmarks.smollm2_cpu"
ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "tests/data/smollm2_reference.json"
TEXT = ROOT / "LICENSE"
CONTEXTS = (32, 512)
DECODED = 32
PREFILLED = 512
PEERS = ("transformers float32", "transformers bfloat16")
DECODE_TARGETS = {"rapid_llm float32": 2.0, "rapid_llm auto": 3.0}
PREFILL_RIVALS = {"rapid_llm float32": PEERS[0], "rapid_llm auto": PEERS[1]}


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(MODULE, "SmolLM2 on the CPU, against transformers.")
    made.add_argument("--model", default="smollm2-135m-instruct", help="a name or a GGUF file")
    made.add_argument("--threads", type=int, default=default_threads(), help="for every arm (default: %(default)s)")
    options = made.parse_args(arguments)
    run = common.start("smollm2_cpu", MODULE, options)

    import torch

    from rapid_llm.models.hub import resolve_model

    from .smollm2_arms import Ours, Peer, Prompts

    torch.set_num_threads(options.threads)
    path = resolve_model(options.model)
    bandwidth = read_bandwidth()
    run.extra["read_bandwidth"] = bandwidth.json()
    ours = [Ours(path, dtype, options.threads) for dtype in ("float32", "auto")]
    arms = [*Peer.load(path), *ours]
    run.extra["rows"] = {arm.name: rows_of(arm.llm) for arm in ours}
    check_ids(run, ours)

    rounds = 3 if options.quick else 8
    ids = ours[0].llm.tokenizer.encode(TEXT.read_text())
    for context in CONTEXTS:
        prompts = Prompts(ids, context)
        found = compare_arms(
            [arm.decode(prompts, DECODED) for arm in arms],
            baseline=PEERS[0],
            rounds=rounds,
            progress=progress(f"decode after {context} tokens"),
        )
        decode_figures(run, found, context, bandwidth.bytes_per_second / path.stat().st_size)
    prompts = Prompts(ids, PREFILLED)
    found = compare_arms(
        [arm.prefill(prompts) for arm in arms], baseline=PEERS[0], rounds=rounds, progress=progress("prefill")
    )
    prefill_figures(run, found)
    return common.finish(run, f"SmolLM2-135M-Instruct Q4_1, {options.threads} threads", options)


def check_ids(run: Run, arms: list[Any]) -> None:
    """float32 must give the reference's ids; what auto gives is recorded, not promised."""
    cases = json.loads(REFERENCE.read_text())["cases"]
    for arm in arms:
        same = 0
        for case in cases.values():
            wanted = case["greedy_token_ids"]
            same += arm.ids(case["prompt_token_ids"], len(wanted)) == wanted
        target = len(cases) if arm.name == "rapid_llm float32" else None
        run.add(Figure(f"prompts with the reference's ids, {arm.name}", same, f"of {len(cases)}", at_least=target))


def decode_figures(run: Run, found: Comparison, context: int, limit: float) -> None:
    """Rates of every arm, the gain over the faster peer, and the share of what memory permits."""
    where = f"after {context} tokens"
    for name, units in found.units.items():
        rate = found.rate(name)
        detail = {**rate.json(), "seconds": found.seconds[name], "units": units}
        run.add(Figure(f"decode {where}, {name}", rate.median, "tok/s", detail=detail))
    for name, target in DECODE_TARGETS.items():
        gain = found.speedup(name, over=PEERS)
        label = f"decode {where}, {name} over the faster transformers"
        run.add(Figure(label, gain.median, "x", at_least=target, detail=gain.json()))
    share = found.rate("rapid_llm auto").median / limit
    detail = {"limit_tokens_per_second": limit}
    run.add(Figure(f"decode {where}, auto, of the limit by bandwidth", share, "of 1", detail=detail))


def prefill_figures(run: Run, found: Comparison) -> None:
    """Rates of every arm, and each of ours against the peer of the like dtype: at most 5 % behind."""
    for name, units in found.units.items():
        rate = found.rate(name)
        detail = {**rate.json(), "seconds": found.seconds[name], "units": units}
        run.add(Figure(f"prefill of {PREFILLED}, {name}", rate.median, "tok/s", detail=detail))
    for name, rival in PREFILL_RIVALS.items():
        gain = found.speedup(name, over=(rival,))
        label = f"prefill of {PREFILLED}, {name} over {rival}"
        run.add(Figure(label, gain.median, "x", at_least=0.95, detail=gain.json()))


def rows_of(llm: Any) -> list[str]:
    """`<where> <op>: <row>` for every choice of the engine."""
    return [f"{b.where} {b.what}: {b.row}" for b in llm.explain().bindings]


def progress(what: str) -> Any:
    """A line drawn over on a terminal, else one line at the end."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{what}: round {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total:
            print(f"{what}: {total} rounds", file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())

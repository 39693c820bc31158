"""What dispatch costs over the kernel it chooses: `python -m benchmarks.dispatch`.

Every call goes to a row that does nothing; its cost, called directly in the same run, is the control. Figures are the
best of many blocks: between real kernels, with cold caches, the same code costs 1.5 to 2.6 times as much.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rapid_llm.bench import Figure, HostResult, Run, bench_host, bench_process, import_time, summarise

from . import common

MODULE = "benchmarks.dispatch"

# Run in a fresh process: nanoseconds of its first decision, torch being loaded.
FIRST_DECISION = """
import torch
from benchmarks import noop_rows
from rapid_llm.bench import first_call
from rapid_llm.kernels import dispatch
noop_rows.register_all()
x, w = torch.ones(4, 64), torch.ones(64)
print(first_call(lambda: dispatch(noop_rows.TWO, x, w)))
"""


def main(arguments: list[str] | None = None) -> int:
    options = common.parser(MODULE, "The cost of dispatch in host time.").parse_args(arguments)
    run = common.start("dispatch", MODULE, options)
    blocks = 10 if options.quick else 60
    calls(run, blocks)
    processes(run, 3 if options.quick else 15)
    return common.finish(run, "Dispatch over a row that does nothing", options)


def calls(run: Run, blocks: int) -> None:
    """Look-up, bound call and public call, in this process."""
    import torch

    from rapid_llm.kernels import registry

    from . import noop_rows

    noop_rows.register_all()
    x, w = torch.ones(4, 64), torch.ones(64)
    q, cache, ids = torch.ones(1, 9, 64), torch.ones(4, 16, 3, 64), torch.zeros(4, dtype=torch.int32)
    six = (q, cache, cache, ids, ids, ids)
    bound = registry.dispatch(noop_rows.TWO, x, w)
    key = bound.decision.facts.key()

    def measure(
        name: str, limit: float, fn: object, args: tuple[object, ...], control: object, **kwargs: object
    ) -> None:
        result = bench_host(fn, args=args, kwargs=kwargs, control=control, blocks=blocks)  # type: ignore[arg-type]
        add(run, name, result, limit)

    measure("look-up with a ready key", 0.3, registry.dispatcher.lookup, (key,), None)
    measure("bound call", 0.2, bound, (x, w), noop_rows.two)
    measure("bound call with out=", 0.2, bound, (x, w), noop_rows.two, out=x)
    measure("public call, two tensors", 1.0, public(noop_rows.TWO), (x, w), noop_rows.two)
    measure(
        "public call, two tensors, a row that constrains shape and layout",
        1.0,
        public(noop_rows.BUSY),
        (x, w),
        noop_rows.two,
    )
    measure("public call, six tensors", 1.6, public(noop_rows.SIX), six, noop_rows.six)


def public(op_id: str) -> object:
    """The generated public function of an op."""
    from rapid_llm import kernels

    return getattr(kernels, op_id)


def add(run: Run, name: str, result: HostResult, limit_us: float) -> None:
    run.add(Figure(name, result.net_ns / 1e3, "us", at_most=limit_us, detail=result.json()))


def processes(run: Run, runs: int) -> None:
    """The first decision, the import, and the help text, each in processes of their own."""
    first = summarise(decision_ms() for _ in range(runs))
    run.add(Figure("first decision, torch loaded", first.min, "ms", at_most=5.0, detail=first.json()))
    imported = import_time("rapid_llm.kernels", runs=runs)
    run.add(Figure("import rapid_llm.kernels", imported.min, "ms", at_most=60.0, detail=imported.json()))
    bare = bench_process([sys.executable, "-c", "pass"], runs=runs)
    run.add(Figure("python -c pass", bare.min, "ms", detail=bare.json()))
    shown = bench_process([*rapid_llm_command(), "--help"], runs=runs)
    run.add(Figure("rapid-llm --help", shown.min, "ms", at_most=150.0, detail=shown.json()))


def decision_ms() -> float:
    done = subprocess.run([sys.executable, "-c", FIRST_DECISION], check=True, capture_output=True, text=True)
    return int(done.stdout) / 1e6


def rapid_llm_command() -> list[str]:
    """The installed command beside this interpreter, else the module."""
    script = Path(sys.executable).parent / "rapid-llm"
    return [str(script)] if script.exists() else [sys.executable, "-m", "rapid_llm.cli"]


if __name__ == "__main__":
    sys.exit(main())

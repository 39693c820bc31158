"""What `scale` costs on each compiled path: to build from nothing, to load when built, and to call.

`python -m benchmarks.compiled_paths`, on a machine with an NVIDIA GPU. From nothing is the row's decision and its first
call, result and all, in a fresh process with an empty cache directory: torch has been loaded, CUDA initialised, the
extension, if there is one, tried in its process, and one other decision made, which includes the look at the toolchain;
these two are figures of their own. When built is what such a process takes to give a handle whose code is loaded. Calls
are host time, `out` given, of a bound handle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from rapid_llm.bench import Figure, HostResult, Run, bench_host, summarise
from rapid_llm.bench.errors import BenchError

from . import common

MODULE = "benchmarks.compiled_paths"
SIZE = 4096

# Run in a fresh process: nanoseconds of the extension's probe, of the first decision, until there is a handle, and of
# its first call with the result.
FIRST = """
import sys, torch
from rapid_llm.bench import first_call
from rapid_llm.kernels import dispatch, registry
from rapid_llm.kernels.registry import probes
x = torch.ones(4096, dtype=torch.float16, device="cuda")
out = torch.empty_like(x)
expected = x * 0.5
torch.cuda.synchronize()
handles = []
def call():
    handles[0](x, 0.5, out)
    torch.cuda.synchronize()
aot = registry.get_row("aot/scale")
probed = first_call(lambda: probes.check(aot.available, aot.target))
decided = first_call(lambda: dispatch("scale", x, 0.5, backend="native/scale"))
bound = first_call(lambda: handles.append(dispatch("scale", x, 0.5, backend=sys.argv[1])))
called = first_call(call)
assert torch.equal(out, expected)
print(probed, decided, bound, called)
"""

LIMITS = {"jit/scale": (6.0, 0.05), "nvrtc/scale": (0.3, 0.05), "aot/scale": (None, 0.05)}
"""Seconds from nothing and when built, at most; None for what is built beforehand."""

CALLS = {"jit/scale": 5.0, "aot/scale": 5.0, "nvrtc/scale": None}
"""Microseconds of a bound call, at most."""

CONTROL = "torch.mul with out="


def main(arguments: list[str] | None = None) -> int:
    options = common.parser(MODULE, "Compiled paths: build, load and call.").parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        sys.exit("compiled_paths: needs an NVIDIA GPU, and torch sees none")
    run = common.start("compiled_paths", MODULE, options)
    for row, (cold, warm) in LIMITS.items():
        first_calls(run, row, cold, warm, 1 if options.quick else 3)
    calls(run, 2 if options.quick else 6)
    return common.finish(run, "scale on each compiled path", options)


def first_calls(run: Run, row: str, cold: float | None, warm: float, runs: int) -> None:
    """From nothing, each time with a cache of its own, and built, with that cache."""
    fresh, built, probed, decided = [], [], [], []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            probe, _, *rest = first_s(row, cache)
            probed.append(probe)
            fresh.append(sum(rest))
            _, decision, handle, _ = first_s(row, cache)
            decided.append(decision)
            built.append(handle)
    if cold is not None:
        _add(run, f"{row}, first call from nothing", fresh, cold)
    _add(run, f"{row}, a loaded handle when built", built, warm)
    if row == "aot/scale":
        _add(run, "the extension's probe, nothing known of it", probed)
        _add(run, "first decision of a process", decided)


def _add(run: Run, name: str, seconds: list[float], at_most: float | None = None) -> None:
    spent = summarise(seconds)
    run.add(Figure(name, spent.median, "s", at_most=at_most, detail=spent.json()))


def first_s(row: str, cache: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", FIRST, row],
        env={**os.environ, "RAPID_LLM_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BenchError(f"{row}: {done.stderr.strip()[-2000:]}")
    return [int(ns) / 1e9 for ns in done.stdout.split()]


def calls(run: Run, rounds: int) -> None:
    """Bound handles beside torch's own product, in turns; each block is short enough for the GPU to keep up."""
    import torch

    from rapid_llm.kernels import dispatch

    x = torch.ones(SIZE, dtype=torch.float16, device="cuda")
    out = torch.empty_like(x)
    timed: dict[str, list[HostResult]] = {}
    for _ in range(rounds):
        for row in CALLS:
            bound = dispatch("scale", x, 0.5, backend=row)
            timed.setdefault(f"{row}, bound call", []).append(_host(bound, x, 0.5, out))
        timed.setdefault(CONTROL, []).append(_host(torch.mul, x, 0.5, out=out))
    limits = {f"{row}, bound call": limit for row, limit in CALLS.items()}
    for name, found in timed.items():
        best = min(found, key=lambda result: result.ns)
        detail = {**best.json(), "rounds_ns": [result.ns for result in found]}
        run.add(Figure(name, best.ns / 1e3, "us", at_most=limits.get(name), detail=detail))


def _host(fn: Callable[..., object], *args: object, **kwargs: object) -> HostResult:
    """The first call, which may load a kernel, is not timed."""
    import torch

    fn(*args, **kwargs)
    torch.cuda.synchronize()
    found = bench_host(fn, args=args, kwargs=kwargs, blocks=40, block_seconds=0.002)
    torch.cuda.synchronize()
    return found


if __name__ == "__main__":
    sys.exit(main())

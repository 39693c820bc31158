"""Runs one row over every case of its op, and believes nothing that the row says. `runner` says what is looked at."""

from __future__ import annotations

import time
from typing import Final

import torch

from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.rehearsal import rehearse
from rapid_llm.kernels.registry import KernelSpec, OpSpec, evidence, plugins, probes
from rapid_llm.kernels.registry.dispatcher import broken_text, with_sm
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.kernels.registry.filters import machine_reasons
from rapid_llm.verify import habits
from rapid_llm.verify.cases.build import check_budget, torch_dtype
from rapid_llm.verify.report import Failure, Report
from rapid_llm.verify.runner import Fn, Run
from rapid_llm.verify.truths import Truths

__all__ = ["SEEDS", "Failure", "Report", "check_callable", "check_row", "unavailable", "variants"]

SEEDS: Final = {"full": (0, 1), "interpret": (0,)}


def check_row(
    op_id: str,
    row_name: str,
    *,
    device: str = "cpu",
    dtype: str,
    scheme: str | None = None,
    budget: str = "full",
    seeds: tuple[int, ...] | None = None,
    record: bool = False,
    compile_threads: int | None = None,
    truths: Truths | None = None,
) -> Report:
    """Run all cases of `op_id` over the registered row `row_name`.

    Rows with `prepack` get their packed weight, rows with `roundings` the bounds that include them. With `record`, a
    good full run becomes evidence for dispatch in this process. Raises `UnknownOpError` or `UnknownRowError` on wrong
    names and `ValueError` for a dtype, scheme or device that the row does not take.
    compile_threads: that compile Triton kernels ahead of the calls. truths: see `check_callable`.
    """
    plugins.scan()
    op, row = registry.get_op(op_id), registry.get_row(row_name)
    if row.op != op_id:
        raise ValueError(f"{row_name} is a row of {row.op}, not of {op_id}")
    for what, value, known in (("dtype", dtype, row.dtypes), ("scheme", scheme, row.schemes)):
        if value is not None and known and value not in known:
            raise ValueError(f"{row_name} does not take {what} {value!r}, only {', '.join(known)}")
    if row.devices and torch.device(device).type not in row.devices:
        raise ValueError(f"{row_name} runs on {', '.join(row.devices)}, not on {device}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        why = unavailable(row, device)
        raise ValueError(f"{row_name} is run to be checked, and no CUDA device is visible here: {why}")
    fn = registry.load_target(row_name)
    report = check_callable(
        op,
        fn,
        device=device,
        dtype=dtype,
        scheme=scheme,
        budget=budget,
        seeds=seeds,
        row=row,
        compile_threads=compile_threads,
        truths=truths,
    )
    if record and report.ok and budget == "full" and report.device == device:
        kind = torch.device(device).type
        evidence.record(
            row_name, kind, dtype, cases=report.cases, worst_ulp=report.worst_ulp, worst_ratio=report.worst_ratio
        )
    return report


def check_callable(
    op: OpSpec,
    fn: Fn,
    *,
    device: str = "cpu",
    dtype: str,
    scheme: str | None = None,
    budget: str = "full",
    seeds: tuple[int, ...] | None = None,
    row: KernelSpec | None = None,
    name: str | None = None,
    first_failure: bool = False,
    compile_threads: int | None = None,
    truths: Truths | None = None,
) -> Report:
    """Run all cases of `op` over any callable with the op's signature; `row` adds declared limits, roundings,
    prepack. truths: answers of the oracle that runs over the same cases share; without, each finds its own."""
    check_budget(budget)
    torch_dtype(dtype)
    if op.schemes and scheme is None:
        scheme = op.schemes[0]
    chosen = SEEDS[budget] if seeds is None else tuple(seeds)
    label = row.name if row is not None else str(name or getattr(fn, "__name__", "<callable>"))
    report = Report(op.id, label, _device_label(device), dtype, scheme, budget, chosen)
    started = time.perf_counter()
    run = Run(op, fn, row, torch.device(device), scheme, report, truths)
    cases = probes.load(op.cases)(dtype, device, scheme, budget=budget)
    if torch.device(device).type == "cuda" and (row is None or row.is_native):
        rehearse(lambda: run.rehearse(cases), threads=compile_threads)
    for case in cases:
        run.case(case, chosen)
        if first_failure and report.failures:
            break
    if budget == "full" and not report.failures and report.elements:
        habits.check(run, cases)
    report.seconds = time.perf_counter() - started
    return report


def variants(op: OpSpec, row: KernelSpec) -> list[tuple[str, str | None]]:
    """The (dtype, scheme) pairs that `row` takes and that the op combines: each is one run of `check_row`."""
    load = probes.load(op.cases)
    return [
        (dtype, scheme)
        for scheme in (row.schemes or op.schemes or (None,))
        for dtype in (row.dtypes or op.dtypes)
        if load(dtype, "meta", scheme, budget="interpret")
    ]


def unavailable(row: KernelSpec, device: str) -> str:
    """Why `row` cannot run on `device` here, in the words of `explain()`; empty if it can."""
    kind, _, index = device.partition(":")
    facts = with_sm(Facts(row.op, kind, int(index) if index else None))
    reasons = machine_reasons(row, facts, broken_text(row.name))
    known = [r.text for r in reasons if r.code not in evidence.UNPROVEN]
    if reasons and not known:  # the probe of a row without evidence has not been asked
        probe = probes.check(row.available, row.target)
        known = [] if probe.ok else [probe.text]
    return "; ".join(known)


def _device_label(device: str) -> str:
    """The device, marked where Triton's interpreter stands in for it: such a run proves nothing about a GPU."""
    from rapid_llm.kernels.ops.triton_support import INTERPRETED

    return f"{device} (Triton interpreter)" if INTERPRETED and torch.device(device).type == "cpu" else device

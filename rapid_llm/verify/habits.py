"""What a row must do beside being right once: the same again, whoever its neighbours are, on any stream, in a graph.

One or two cases of the row are called many times more. Twenty equal calls give equal bits; the first row of a batch
keeps its bits whatever is in the other rows; on a GPU a call follows what its own stream did before it, and a captured
call gives the answer for the values that its inputs hold at each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rapid_llm.graphs import capture
from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.guard import Guarded, bits, unique_view
from rapid_llm.verify.runner import Run, Truth
from rapid_llm.verify.standing import Standing, standing

REPEATS: Final = 20
SLEEP_CYCLES: Final = 20_000_000
"""Some 10 ms on a GPU: long enough that a launch on another stream comes first."""

BATCHED: Final = {
    "scale": ("input",),
    "silu_and_mul": ("input",),
    "gelu_and_mul": ("input",),
    "rmsnorm": ("input",),
    "fused_add_rmsnorm": ("input", "residual"),
    "qk_norm": ("query", "key"),
    "rope": ("query", "key"),
    "rope_kvcache_write": ("query", "key"),
    "linear": ("input",),
    "linear_add": ("input", "residual"),
    "rmsnorm_linear": ("input",),
    "rmsnorm_linear_silu_and_mul": ("input",),
    "attention.prefill": ("query",),
    "attention.decode": ("query",),
    "attention.mla_decode": ("query",),
    "sample": ("logits",),
    "moe.topk": ("logits",),
    "fused_moe": ("input",),
}
"""Arguments whose first dimension is a batch of rows that must not see each other, by op."""

_ALONG: Final = {
    "rope": ("positions",),
    "rope_kvcache_write": ("value", "positions", "slot_mapping"),
    "attention.decode": ("seq_lens", "block_table"),
    "attention.mla_decode": ("seq_lens", "block_table"),
    "sample": ("temperature", "top_k", "top_p", "min_p", "uniform"),
    "fused_moe": ("topk_weights", "topk_ids"),
}
"""Further arguments that have an entry for each row of the batch, by op."""

_ENTRIES: Final = {"embedding": ("input",), "attention.prefill": ()}
"""Where the batch is not what `BATCHED` says: ids have no rows, and a prompt's tokens belong together."""

_MOST: Final = 1 << 20
"""Elements of an argument above which a case is too slow to be called so often."""


def check(run: Run, cases: list[Case]) -> None:
    """Fill the report of `run` with what the row does wrong in the long run; stops at the first fault."""
    for case, values in _chosen(run, cases):
        truth = run.truth(values)
        for test in (_repeats, _neighbours, _batch_sizes, _other_stream, _replays):
            run.where(case.id, 0, test.__name__.strip("_").replace("_", " "))
            test(run, case, truth)
            if run.report.failures:
                return


def _chosen(run: Run, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The first case of several rows that the row takes, and the largest."""
    first: tuple[Case, dict[str, Any]] | None = None
    largest: tuple[int, Case, dict[str, Any]] | None = None
    for case in cases:
        if case.raises or case.vast:
            continue
        values = case.make(run.generator(0))
        if standing(run.op, run.row, values) is not Standing.TAKEN:
            continue
        size = max(v.numel() for v in values.values() if isinstance(v, Tensor))
        lead = [values[name].shape[0] for name in BATCHED.get(run.op.id, ()) if values[name].dim()]
        if first is None and size > 1 and all(n > 1 for n in lead):
            first = (case, values)
        if size <= _MOST and (largest is None or size > largest[0]):
            largest = (size, case, values)
    if first is not None:
        yield first
    if largest is not None and (first is None or largest[1].id != first[0].id):
        yield largest[1:]


def _repeats(run: Run, case: Case, truth: Truth) -> None:
    """Twenty calls with equal arguments, into memory that holds NaN and numbers in turn."""
    before: list[Tensor] | None = None
    for count in range(REPEATS):
        results = run.answers(truth.values, finite=bool(count % 2))
        if results is None:
            return
        results = [t.detach().clone() for t in results]
        if before is not None and not _equal(before, results):
            run.fail("not repeatable", f"call {count + 1} of {REPEATS} with equal arguments gave other bits")
            return
        before = results


def _neighbours(run: Run, case: Case, truth: Truth) -> None:
    """The first row's bits with other numbers in all the others."""
    names = BATCHED.get(run.op.id, ())
    dense = all(truth.values[n].is_contiguous() and truth.values[n].dim() > 1 for n in names)
    if not names or not dense or min(truth.values[n].shape[0] for n in names) < 2:
        return
    alone = run.answers(truth.values)
    kept = None if alone is None else [t[:1].clone() for t in _batched(run, alone)]
    others = dict(truth.values)
    for name in names:
        others[name] = truth.values[name].clone()
        others[name][1:] = others[name][1:].flip(-1) * -1.25
    results = run.answers(others)
    if results is None or kept is None:
        return
    if not _equal(kept, [t[:1] for t in _batched(run, results)]):
        run.fail("neighbours", "the first row's bits depend on the values of the others")


def _batch_sizes(run: Run, case: Case, truth: Truth) -> None:
    """Of a row that declares it, the first rows' bits in batches of other sizes: one alone, two, all but the last."""
    names = _ENTRIES.get(run.op.id, BATCHED.get(run.op.id, ()))
    if run.row is None or not run.row.batch_invariant:
        return
    if not names:
        run.fail("batch invariance", f"{run.op.id} has no batch to try it on, so {run.row.name} cannot declare it")
        return
    along = (*names, *_ALONG.get(run.op.id, ()))
    if truth.values[names[0]].dim() < (1 if run.op.id in _ENTRIES else 2):
        return
    tokens = truth.values[names[0]].shape[0]
    whole = run.answers(truth.values)
    kept = None if whole is None else [t.clone() for t in _batched(run, whole)]
    for count in sorted({1, 2, tokens - 1} & set(range(1, tokens))):
        part = {**truth.values, **{name: truth.values[name][:count] for name in along}}
        if standing(run.op, run.row, part) is not Standing.TAKEN:
            continue
        results = run.answers(part)
        if results is None or kept is None:
            return
        if not _equal([t[:count] for t in kept], [t.clone() for t in _batched(run, results)]):
            run.fail("batch invariance", f"a batch of {count} gives its rows other bits than one of {tokens}")
            return


def _batched(run: Run, results: list[Tensor]) -> list[Tensor]:
    """The results that have a row for each row of the batch."""
    mutated = run.op.parsed.mutated
    return [t for i, t in enumerate(results) if not mutated or mutated[i] in BATCHED.get(run.op.id, ())]


def _other_stream(run: Run, case: Case, truth: Truth) -> None:
    """On a side stream whose inputs arrive late: a launch on any other stream reads NaN."""
    if run.device.type != "cuda":
        return
    side = torch.cuda.Stream(run.device)
    args = run.guarded(truth.values)
    tensors = {k: g.tensor for k, g in args.items() if isinstance(g, Guarded)}
    late = {k: t for k, t in tensors.items() if t.dtype.is_floating_point and k != "weight"}
    real = {k: unique_view(t).clone() for k, t in late.items()}
    for tensor in late.values():
        unique_view(tensor).fill_(float("nan"))
    torch.cuda.synchronize(run.device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for name, tensor in late.items():
            unique_view(tensor).copy_(real[name])
        results = run.call(args, None)
    side.synchronize()
    if results is not None:
        run.compare(results, truth)


def _replays(run: Run, case: Case, truth: Truth) -> None:
    """Captured once, replayed over the values of two more seeds."""
    if run.device.type != "cuda" or (run.row is not None and not run.row.graph_safe):
        return
    args = run.guarded(truth.values)
    positional, keywords = run.bind(args)  # a packed weight is made before the capture, as an engine does
    side = torch.cuda.Stream(run.device)
    side.wait_stream(torch.cuda.current_stream(run.device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(side):  # what is made on first use is made before the capture
            run.fn(*positional, **keywords)
        torch.cuda.synchronize(run.device)
        with capture(graph, side):
            result = run.fn(*positional, **keywords)
    except Exception as error:  # whatever a row raises in a capture, it must not
        run.fail("capture", f"{type(error).__name__}: {error}")
        return
    results = run.answered(result, args)
    for seed in (1, 2):
        values = case.make(run.generator(seed))
        if run.row is not None and run.row.prepack is not None:
            values["weight"] = truth.values["weight"]
        again = run.truth(values)
        held = run.guarded(values)
        if any(held[k] is not g for k, g in args.items() if isinstance(g, Guarded)):
            return  # this case has other shapes for every seed
        graph.replay()
        torch.cuda.synchronize(run.device)
        run.compare(results, again)


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in zip(first, second, strict=True))

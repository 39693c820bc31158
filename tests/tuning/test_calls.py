"""Calls to measure: that example arguments are of the shape that was asked for, and which shapes are asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rapid_llm.kernels  # noqa: F401 - declares the ops
from rapid_llm.kernels import registry
from rapid_llm.kernels.ops.block_formats import FORMATS
from rapid_llm.kernels.registry import registry as table
from rapid_llm.kernels.registry import timing_records
from rapid_llm.kernels.registry.dispatcher import dims_reader
from rapid_llm.kernels.registry.facts import bind, read
from rapid_llm.tuning.calls import Call
from rapid_llm.tuning.shapes import MODELS, ModelSizes, around_limits, of_keys, of_model, of_trace, to_the_limits

TINY = ModelSizes(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=100)
OPS = [op.id for op in registry.ops() if table.is_shipped(registry.rows(op.id)[0].name)]


@pytest.mark.parametrize("op_id", OPS)
def test_arguments_have_the_shape_that_was_asked_for(op_id: str) -> None:
    """Catches: a time filed under another shape, dtype or scheme than the one measured; an op that nothing measures."""
    op = registry.get_op(op_id)
    schemes = [s for s in op.schemes if s == "unquantized" or FORMATS[s].weights <= 32]
    calls = list(of_model(TINY, [op_id], [op.dtypes[0], "bf16"], schemes, "cpu", quick=True))
    assert calls
    for call in calls:
        values, _ = bind(op, (), call.values("cpu"))
        facts = read(op, dims_reader(op), values)
        found = {name: facts.dims[name] for name in timing_records.dims_of(op)}
        assert (facts.dtype, facts.scheme, found) == (call.dtype, call.scheme, dict(call.dims))


def test_equal_seeds_give_equal_arguments() -> None:
    """Catches: a measurement that nobody can repeat."""
    call = Call("rmsnorm", "fp32", None, {"tokens": 3, "hidden": 8})
    one, two, other = (call.values("cpu", seed)["input"] for seed in (0, 0, 1))
    assert one.equal(two)
    assert not one.equal(other)


def test_what_cannot_be_made_says_so() -> None:
    """Catches: a guess where a size is missing; several ranks measured as if they were one."""
    with pytest.raises(ValueError, match="hidden is not given; give --dim hidden=N"):
        Call("rmsnorm", "fp32", None, {"tokens": 3}).values("cpu")
    with pytest.raises(ValueError, match="no example arguments are known"):
        Call("nothing", "fp32").values("cpu")
    dims = {"tokens": 2, "hidden": 8, "capacity": 2, "ranks": 2}
    with pytest.raises(ValueError, match="2 ranks need as many processes"):
        Call("comm.combine", "fp32", None, dims).values("cpu")


def test_both_sides_of_every_limit_are_measured() -> None:
    """Catches P59: an op whose rows change at a limit, and a sweep that only sees one side of it."""
    sizes = around_limits("linear", (1, 512), 4096, "cpu")
    for row in registry.rows("linear"):
        for dim in (*row.shape.require, *row.shape.prefer) if "cpu" in row.devices else ():
            if dim.name == "tokens":
                assert dim.max is None or {dim.max, dim.max + 1} <= set(sizes)
                assert dim.min is None or {dim.min - 1, dim.min} - {0} <= set(sizes)
    assert around_limits("linear", (1, 512), 4096, "cuda:1") == (1, 8, 9, 512)
    assert around_limits("rmsnorm", (1, 512), 64, "cpu") == (1,)


def test_every_op_of_a_decoder_is_measured() -> None:
    """Catches: an op or a linear layer of a model that a run over its sizes leaves out."""
    calls = list(of_model(MODELS["llama3-8b"], OPS, ["bf16"], ["unquantized"], "cuda"))
    assert {call.op for call in calls} == set(OPS)
    shapes = {(c.dims["out_features"], c.dims["in_features"]) for c in calls if c.op == "linear"}
    assert shapes == {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)}


def test_a_trace_gives_its_calls_once_each(tmp_path: Path) -> None:
    """Catches: the most frequent call measured last; keys of unknown shape measured at a guessed one."""

    def entry(tokens: int, count: int, **dims: int) -> dict[str, object]:
        key = {"op": "rmsnorm", "dtype": "fp32", "scheme": None, "dims": {"tokens": tokens, **dims}}
        return {"key": key, "count": count}

    path = tmp_path / "trace.json"
    entries = [entry(1, 5, hidden=64), entry(2, 9, hidden=64), entry(2, 1, hidden=64), entry(3, 1)]
    path.write_text(json.dumps({"decisions": entries}))
    assert [dict(call.dims) for call in of_trace(path)] == [{"hidden": 64, "tokens": n} for n in (2, 1)]
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a trace"):
        of_trace(path)
    key = {"op": "embedding", "dtype": "fp32", "scheme": "unquantized"}
    call = of_keys([{**key, "dims": {"tokens": 1, "vocab": 10, "numel": 80}}])[0]
    assert call.values("cpu")["weight"].shape == (10, 8)


def test_both_ends_of_what_a_model_binds_are_measured() -> None:
    """Catches P59: a row bound for 9 to 31 tokens by its time at 9; another layer's ranges taken for its."""
    calls = [Call("rmsnorm", "fp32", None, {"tokens": n, "hidden": 64}) for n in (1, 2, 9)]
    calls.append(Call("rmsnorm", "fp32", None, {"tokens": 1, "hidden": 32}))
    found = {(c.dims["hidden"], c.dims["tokens"]) for c in to_the_limits(calls, last=100)}
    assert found == {(64, 1), (64, 2), (64, 8), (64, 9), (64, 100), (32, 1), (32, 100)}
    prefill = Call("attention.prefill", "fp32", None, {"tokens": 4, "sequences": 1, "head_dim": 8})
    assert {c.dims["sequences"] for c in to_the_limits([prefill])} == {1}

"""flashinfer's adapters on the CPU, against a stand-in that has upstream's signatures, demands and roundings.

Every row runs its op's whole conformance suite here: what an adapter passes in a wrong place, order, layout or dtype is
a wrong number or an AssertionError of the stand-in. What the real kernels compute is for a GPU to tell.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import rapid_llm.kernels.ops  # noqa: F401  (registers the rows)
from rapid_llm.kernels import registry
from rapid_llm.kernels.build.freezing import freeze, thaw
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.kernels.registry import UNMEASURED, ArgumentError, KernelSpec, NotReadyError, probes
from rapid_llm.kernels.registry.facts import Facts
from rapid_llm.verify.conformance import check_callable
from tests.truths import SHARED

STAND_IN = Path(__file__).parent / "flashinfer_stand_in"
PACKAGE = "rapid_llm.kernels.backend.flashinfer"
ROWS = [row for op in registry.ops() for row in registry.rows(op.id) if row.backend == "flashinfer"]
TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ATTENTION = [row for row in ROWS if row.op.startswith("attention")]
WIDE = [row for row in ROWS if row.op in ("attention.decode", "attention.prefill", "rope", "silu_and_mul", "rmsnorm")]
VARIANTS = [pytest.param(row, dtype, id=f"{row.name}-{dtype}") for row in ROWS for dtype in row.dtypes]

pytestmark = pytest.mark.skipif(INTERPRETED, reason="flashinfer's adapters launch no Triton kernel")


def _unload() -> None:
    adapters = [m for m in sys.modules if m.startswith(f"{PACKAGE}.")]
    for name in [m for m in sys.modules if m.partition(".")[0] == "flashinfer"] + adapters:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as `flashinfer`, adapters that have just looked it up, and a small workspace."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    _unload()
    monkeypatch.setattr(importlib.import_module(PACKAGE), "available", lambda: True)
    probes.forget()
    monkeypatch.setattr(_module("_plans"), "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(_module("_calls"), "ALIGNMENT", 64)  # torch's CPU allocator gives no more
    yield
    _unload()
    probes.forget()


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def _target(row: KernelSpec) -> Callable[..., Any]:
    module, attr = row.target.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attr)
    return function


def _here(row: KernelSpec) -> KernelSpec:
    """The row as if it ran on the CPU, so that its cases are not skipped."""
    return replace(row, devices=(), capability=())


@pytest.mark.parametrize(("row", "dtype"), VARIANTS)
def test_adapter_fits_the_op(row: KernelSpec, dtype: str) -> None:
    """Would go red if an adapter passed an argument, a layout, a length or a scale otherwise than flashinfer reads it,
    or if a row declared fewer limits or roundings than flashinfer has."""
    report = check_callable(registry.get_op(row.op), _target(row), dtype=dtype, row=_here(row), truths=SHARED)
    swallowed = [f for f in report.failures if f.case.startswith("logits beyond 1e5")]
    assert report.failures == swallowed, str(report)
    # flashinfer hides what lies behind the causal mask by a score of -5e4, which real scores below that lose to. So
    # its prefill is refused, and stays unproven, until a release masks by infinity.
    assert bool(swallowed) == (row.op == "attention.prefill")


@pytest.mark.parametrize("row", WIDE, ids=lambda row: row.name)
def test_adapter_at_its_own_sizes(row: KernelSpec) -> None:
    """Would go red as above; the op's own cases are mostly narrower than what flashinfer takes."""
    op = registry.get_op(row.op)
    op = replace(op, cases=f"tests.kernels.backend.flashinfer_cases:{op.function}")
    report = check_callable(op, _target(row), dtype=row.dtypes[0], row=_here(row))
    assert report.ok, str(report)
    assert report.skipped == 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_say_what_they_are(row: KernelSpec) -> None:
    """Would go red if a row could be captured although it plans on the host, could reach a CPU, or claimed a rank."""
    assert row.devices == ("cuda",)
    assert row.graph_safe == (row not in ATTENTION)
    assert row.priority == UNMEASURED


# -- plans ------------------------------------------------------------------------------------------------------------


def _decode_call(lengths: tuple[int, ...] = (20, 5)) -> tuple[Any, ...]:
    query = torch.randn(len(lengths), 4, 64).half()
    k_cache, v_cache = torch.randn(2, 8, 16, 2, 64).half()
    lens = torch.tensor(lengths, dtype=torch.int32)
    return query, k_cache, v_cache, lens, torch.arange(1, 1 + 3 * len(lengths)).int().view(len(lengths), 3) % 8, 0.125


def _decode() -> tuple[Callable[..., Any], list[int]]:
    return _module("attention_decode").attention_decode, importlib.import_module("flashinfer.decode").PLANS


def test_layers_share_a_plan() -> None:
    """Would go red if each layer of a step planned anew."""
    decode, plans = _decode()
    query, k_cache, v_cache, lens, table, scale = _decode_call()
    for _ in range(3):
        decode(torch.randn_like(query), k_cache, v_cache, lens, table, scale)
    assert len(plans) == 1


@pytest.mark.parametrize(
    "what", ["lengths in place", "table in place", "view in place", "new tensor", "scale", "heads"]
)
def test_a_plan_is_not_taken_for_another_batch(what: str) -> None:
    """Would go red if an answer came from a plan whose lengths, pages or settings are not the call's."""
    decode, plans = _decode()
    query, k_cache, v_cache, lens, table, scale = _decode_call()
    decode(query, k_cache, v_cache, lens, table, scale)
    if what == "lengths in place":
        lens.fill_(7)
    elif what == "table in place":
        table.copy_(table.flip(0))
    elif what == "view in place":
        lens[:1].add_(3)
    elif what == "new tensor":
        lens = torch.tensor([4, 9], dtype=torch.int32)
    elif what == "scale":
        scale = 0.5
    else:
        query = torch.randn(2, 2, 64).half()
    got = decode(query, k_cache, v_cache, lens, table, scale)
    assert len(plans) == 2
    native = registry.load_target("native/attention.decode")(query, k_cache, v_cache, lens, table, scale)
    torch.testing.assert_close(got, native, rtol=2e-3, atol=2e-3)


def test_untracked_tensors_are_planned_each_time() -> None:
    """Would go red if a write under inference_mode, which torch does not count, left an old plan in use."""
    decode, plans = _decode()
    with torch.inference_mode():
        query, k_cache, v_cache, lens, table, scale = _decode_call()
        decode(query, k_cache, v_cache, lens, table, scale)
        lens.fill_(3)
        got = decode(query, k_cache, v_cache, lens, table, scale)
        native = registry.load_target("native/attention.decode")(query, k_cache, v_cache, lens, table, scale)
    assert len(plans) == 2
    torch.testing.assert_close(got, native, rtol=2e-3, atol=2e-3)


def test_a_failed_plan_serves_nobody() -> None:
    """Would go red if the call after a refused batch ran on what planning had left half done."""
    decode, plans = _decode()
    query, k_cache, v_cache, lens, table, scale = _decode_call()
    decode(query, k_cache, v_cache, lens, table, scale)
    with pytest.raises(ArgumentError, match="pages 0 to 7"):
        decode(query, k_cache, v_cache, lens, table + 100, scale)
    decode(query, k_cache, v_cache, lens, table, scale)
    assert len(plans) == 2


def test_wrappers_are_bounded() -> None:
    """Would go red if every stream or device ever used kept its workspace."""
    plans = _module("_plans")
    for number in range(20):
        plans.slot(f"kind {number}", torch.device("cpu"), lambda workspace: object())
    assert len(plans._slots) == plans.MAX_SLOTS
    assert len({id(slot.workspace) for slot in plans._slots.values()}) == 1
    plans.forget()
    assert not plans._slots
    assert not plans._workspaces


def test_plan_and_launch_hold_the_streams_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would go red if two threads of one stream could plan or launch between each other's plan and launch."""
    decode, _ = _decode()
    wrapper = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
    held: list[bool] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            held.extend(slot.lock._inner._is_owned() for slot in _module("_plans")._slots.values())
            return original(*args, **kwargs)

        return call

    for name in ("plan", "run"):
        monkeypatch.setattr(wrapper, name, watched(getattr(wrapper, name)))
    decode(*_decode_call())
    assert held == [True, True]


# -- first uses -------------------------------------------------------------------------------------------------------

DIMS = {"hidden": 64, "rotary_dim": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prepared_rows_run_frozen(row: KernelSpec) -> None:
    """Would go red if prepare() left something to be built by the first call, or a frozen process built it."""
    module, attr = row.prepare.split(":") if row.prepare else ("", "")
    op = registry.get_op(row.op)
    dims = {name: size for name, size in DIMS.items() if name in op.dims}
    facts = Facts(row.op, "cpu", dtype=row.dtypes[0], dims=dims)
    freeze()
    try:
        with pytest.raises(NotReadyError, match="frozen"):
            getattr(importlib.import_module(module), attr)(facts)
        thaw()
        getattr(importlib.import_module(module), attr)(facts)
        freeze()
        with pytest.raises(NotReadyError, match="captured"):
            getattr(importlib.import_module(module), attr)(replace(facts, capturing=True, dtype="other"))
        getattr(importlib.import_module(module), attr)(replace(facts, capturing=True))
        calls = importlib.import_module(module)._CALLS[row.op]
        sizes = [dims[name] for name in calls[0]]
        for args in calls[1](torch.device("cpu"), getattr(torch, TYPES[row.dtypes[0]]), *sizes):
            _target(row)(*args)
    finally:
        thaw()


# -- arguments that only a host sees ----------------------------------------------------------------------------------


def test_lengths_beyond_the_table_are_refused() -> None:
    """Would go red if flashinfer were sent to read beside the block table."""
    decode, _ = _decode()
    query, k_cache, v_cache, lens, table, scale = _decode_call((49, 5))
    with pytest.raises(ArgumentError, match="49 keys, its block_table row 3 pages of 16"):
        decode(query, k_cache, v_cache, lens, table, scale)


def test_prefill_offsets_are_checked() -> None:
    """Would go red if offsets that fall, or reach past query, came to the planner."""
    prefill = _module("attention_prefill").attention_prefill
    query, k_cache, v_cache, lens, table, scale = _decode_call()
    for offsets in ([0, 2, 1], [1, 1, 2], [0, 1, 3]):
        with pytest.raises(ArgumentError, match="must rise from 0 to at most 2"):
            prefill(query, k_cache, v_cache, torch.tensor(offsets).int(), lens, table, scale)


def test_padding_behind_the_last_chunk_is_zero() -> None:
    """Would go red if tokens that no chunk owns kept what was in memory."""
    prefill = _module("attention_prefill").attention_prefill
    query, k_cache, v_cache, lens, table, scale = _decode_call((20, 5, 9))
    out = torch.full_like(query, float("nan"))
    prefill(query, k_cache, v_cache, torch.tensor([0, 1]).int(), lens[:1], table[:1], scale, out=out)
    assert out[0].isfinite().all()
    assert not out[1:].any()


def test_caches_of_two_layouts_are_refused() -> None:
    """Would go red if values were read by the strides of keys."""
    decode, _ = _decode()
    query, k_cache, v_cache, lens, table, scale = _decode_call()
    with pytest.raises(ArgumentError, match="same strides"):
        decode(query, k_cache, v_cache.transpose(1, 2).contiguous().transpose(1, 2), lens, table, scale)

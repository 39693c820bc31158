"""Copies and coldness: what a loop really touches, and what a copy keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.bench import against, bench, bench_stateful
from rapid_llm.bench.errors import ChangedInputError, DegenerateInputError
from rapid_llm.bench.peaks import peaks_of
from rapid_llm.bench.rotation import CACHE_MULTIPLE, Rotation, plan, reuse_bytes
from rapid_llm.bench.storages import bind, copy_arguments, opaque, poison, poisoned, unique_bytes, vary
from rapid_llm.bench.work import Work, amount_text, rate, seconds_text, work_of
from rapid_llm.verify.work import Work as OpWork
from tests.bench.cheats import FACTOR, MOVED, SIZE, honest
from tests.bench.fake_device import FakeDevice
from tests.bench.test_refusals import CHECK, numbers, run

MB = 1_000_000
USUAL: dict[str, Any] = {
    "read_bytes": MB,
    "set_bytes": MB,
    "cache_bytes": 60 * MB,
    "budget_bytes": 10_000 * MB,
    "seconds_a_call": 5e-6,
    "block_seconds": 300e-6,
    "max_copies": 128,
}


def test_small_inputs_are_cold_by_a_flush() -> None:
    """Catches B1: ten copies of 1 MB called cold on a cache of 60 MB."""
    found = plan(**{**USUAL, "max_copies": 10})
    assert found.flush_bytes >= CACHE_MULTIPLE * 60 * MB
    assert found.order == tuple(range(10))
    assert found.cold
    assert not plan(**{**USUAL, "max_copies": 10}, cold=False).cold
    assert reuse_bytes(tuple(range(10)), MB, 0) == 9 * MB  # what those ten alone would have been


def test_rotation_alone_is_cold_where_it_fits() -> None:
    """Catches: a flush that is paid for nothing; one copy too few."""
    found = plan(**{**USUAL, "read_bytes": 100 * MB, "set_bytes": 100 * MB})
    assert (found.copies, found.flush_bytes) == (4, 0)
    assert found.reuse_bytes == 300 * MB
    assert set(found.order) == set(range(4))


@pytest.mark.parametrize("cache", [50, 129, 200])
def test_the_flush_follows_the_cache(cache: int) -> None:
    """Catches B10: a flush of a fixed size on a larger cache."""
    assert plan(**{**USUAL, "cache_bytes": cache * MB}).flush_bytes >= 5 * cache * MB


def test_written_bytes_do_not_count() -> None:
    """Catches B5: a huge scratch that lowers the number of copies."""
    big = plan(**{**USUAL, "read_bytes": 10 * MB, "set_bytes": 400 * MB, "max_copies": 20, "budget_bytes": 10**12})
    assert big.copies == 20
    assert big.flush_bytes > 0
    device = FakeDevice(max_copies=4)
    scratch = torch.randn(SIZE * 16)

    def fn(x: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(5e-6, lambda: torch.mul(x, FACTOR, out=out))

    check = against(lambda x, scratch: x * FACTOR, relative=1e-6, absolute=0)
    work = Work(MOVED, SIZE, read_bytes=MOVED // 2)
    result = run(fn, device, args=(numbers(), scratch), check=check, work=work)
    assert result.plan.reuse_bytes == result.plan.flush_bytes + (result.plan.copies - 1) * MOVED // 2


def test_copies_come_from_the_loop_that_runs() -> None:
    """Catches B6: copies counted from a default number of calls; a label that does not follow the order of calls."""
    device = FakeDevice(max_copies=8)
    result = run(honest(device), device)
    assert set(result.plan.order) == set(range(result.plan.copies))
    assert result.plan.reuse_bytes == reuse_bytes(result.plan.order, SIZE * 4, result.plan.flush_bytes)
    assert device.flushed
    assert set(device.flushed) == {result.plan.flush_bytes}


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 100))
def test_reuse_is_the_least_distance(order: list[int], flush: int) -> None:
    """Catches: a copy used twice in a row that counts as cold; compared with a slow, obvious count."""
    endless = order * 3
    least = None
    for at, copy in enumerate(endless):
        nexts = [i for i in range(at + 1, len(endless)) if endless[i] == copy]
        if nexts and at < len(order):
            crossings = nexts[0] // len(order) - at // len(order)
            seen = len(set(endless[at + 1 : nexts[0]])) * 7 + (flush if crossings else 0)
            least = seen if least is None else min(least, seen)
    assert reuse_bytes(order, 7, flush) == least


def test_warm_is_labelled_and_has_no_bandwidth() -> None:
    """Catches: a warm figure sold as memory bandwidth."""
    device = FakeDevice()
    result = run(honest(device), device, cold=False)
    assert result.label == "warm"
    assert result.bytes_per_second is None
    assert not device.flushed


def test_nothing_is_cold_where_flushing_does_not_evict() -> None:
    """Catches B3, B9: a cache that keeps its lines, and the label cold all the same."""
    device = FakeDevice()
    device.calibration = type(device.calibration)(1.1e-6, 1e-6, 4e12, "scripted")  # type: ignore[union-attr, misc]
    assert run(honest(device), device).label == "warm"


def test_copies_keep_their_layout() -> None:
    """Catches B11: a packed copy of a sliced view, and two views of one storage that became two storages."""
    fused = torch.randn(4, 2, 16, 2, 8)
    keys, values, index = fused[:, 0], fused[:, 1], torch.arange(6).expand(3, 6)
    arguments = bind((keys, [values, index]), {"factor": 2.0})
    copy = copy_arguments(arguments)
    for mine, theirs in ((copy[0], keys), (copy[1][0], values), (copy[1][1], index)):
        assert mine.stride() == theirs.stride()
        assert mine.storage_offset() == theirs.storage_offset()
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert copy[0].untyped_storage().data_ptr() == copy[1][0].untyped_storage().data_ptr()
    assert unique_bytes(copy) == unique_bytes(arguments) == fused.numel() * 4 + 6 * 8


def test_expanded_tensors_count_what_they_hold() -> None:
    """Catches B33: 2 MB reported for 512 bytes behind a stride of 0."""
    assert unique_bytes([torch.zeros(128).expand(4096, 128)]) == 512


def test_variants_differ_and_indices_stay() -> None:
    """Catches B34: equal values in every copy; and page numbers that no longer fit."""
    x, ids = torch.randn(6, 4), torch.arange(6)
    rotation = Rotation(bind((x, ids)))
    rotation.allocate(4)
    assert not torch.equal(rotation.copies[0][0], rotation.copies[1][0])
    assert all(torch.equal(copy[1], ids) for copy in rotation.copies)
    before = [copy[0].clone() for copy in rotation.copies]
    pointers = [copy[0].data_ptr() for copy in rotation.copies]
    rotation.refill(1)
    assert all(not torch.equal(copy[0], old) for copy, old in zip(rotation.copies, before, strict=True))
    assert pointers == [copy[0].data_ptr() for copy in rotation.copies]


def test_rows_of_bytes_move_whole() -> None:
    """Catches: quantised blocks cut in two by the variation."""
    weight = torch.arange(40, dtype=torch.uint8).view(4, 10)
    moved = weight.clone()
    assert vary(bind((moved,)), 1)
    assert torch.equal(moved, weight.roll(1, 0))


@dataclass(frozen=True)
class Packed:
    codes: torch.Tensor
    scale: torch.Tensor
    width: int


def test_packed_weights_are_rotated_too() -> None:
    """Catches: a packed weight in a class of its own, of which every copy reads the same memory."""
    weight = torch.randn(6, 4)
    rotation = Rotation(bind((weight,)), adapt=lambda values: {0: Packed(values[0] * 2, values[0][:1], 4)})
    rotation.allocate(3)
    packed = [copy[0] for copy in rotation.copies]
    assert len({p.codes.data_ptr() for p in packed}) == 3
    assert all(p.width == 4 for p in packed)
    assert torch.equal(packed[1].codes, rotation.masters[1][0] * 2)
    rotation.refill(1)
    assert torch.equal(packed[1].codes, rotation.masters[2][0] * 2)
    assert unique_bytes(packed[0]) == 2 * 6 * 4 * 4  # the slice keeps its whole storage


def test_what_cannot_be_copied_is_named() -> None:
    """Catches: a library's own object, shared by all copies."""
    assert opaque([torch.ones(2), torch.float16, None, 1, "x", {"a": (2.0,)}, torch.device("cpu")]) == ""
    assert opaque([{"a": torch.Generator()}]) == "Generator"
    assert opaque(Packed(torch.ones(1), object(), 1)) == "object"  # type: ignore[arg-type]


def test_rows_that_share_a_scale_stay_together() -> None:
    """Catches: blocks of 128 rows shifted against their scales."""
    weight = torch.randint(0, 255, (512, 16), dtype=torch.uint8)
    moved = weight.clone()
    assert vary(bind((moved,)), 1)
    assert torch.equal(moved, weight.roll(128, 0))


def test_changes_of_inputs_are_found_in_every_copy() -> None:
    """Catches B39: one copy checked of many."""
    rotation = Rotation(bind((torch.randn(8), torch.randn(8))), mutated=(1,))
    rotation.allocate(5)
    rotation.copies[3][1].zero_()
    rotation.refuse_changed("f")
    rotation.restore()
    assert torch.equal(rotation.copies[3][1], rotation.sources[0][1])
    rotation.copies[4][0][2] += 1
    with pytest.raises(ChangedInputError, match=r"f: \d bytes of argument 0"):
        rotation.refuse_changed("f")


def test_inputs_that_cannot_vary_are_refused() -> None:
    """Catches: results that could be remembered, with nothing that would show it."""
    with pytest.raises(DegenerateInputError, match="cannot be varied"):
        Rotation(bind((torch.ones(1),)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
def test_poison_is_told_from_nan(dtype: torch.dtype) -> None:
    """Catches B38: an unwritten result that compares equal, and a NaN result reported as unwritten."""
    tensor = torch.empty(10, dtype=dtype)
    poison(tensor)
    assert poisoned(tensor) == 10
    tensor[:4] = float("nan") if dtype.is_floating_point else 1
    assert poisoned(tensor) == 6
    if dtype.is_floating_point:
        assert bool(torch.isnan(tensor).all())


@pytest.mark.parametrize("tries", [1, 3])
def test_stateful_calls_start_afresh(tries: int) -> None:
    """Catches B26, B51: in-place calls that compound, also where a device tries a block again, and a reset that is
    timed."""
    device = FakeDevice(tries=tries)
    state = {"resets": 0}

    def fn(x: torch.Tensor) -> None:
        device.launch(5e-6, lambda: x.mul_(FACTOR))

    def reset(x: torch.Tensor) -> None:
        state["resets"] += 1
        device.main += 1e-3

    check = against(lambda x: x * FACTOR, relative=1e-6, absolute=0)
    result = bench_stateful(
        fn, reset, (numbers(),), mutated=(0,), work=Work(MOVED), check=check, device=device, samples=7, name="f"
    )
    assert result.seconds.median == pytest.approx(5e-6)
    assert state["resets"] >= 7 * result.plan.copies
    assert len(result.plan.order) == result.plan.copies
    with pytest.raises(ValueError, match="mutated is empty"):
        bench_stateful(fn, reset, (numbers(),), mutated=(), work=Work(MOVED), check=check)


def test_a_change_that_is_not_declared_is_refused() -> None:
    """Catches: an in-place call timed by `bench` as if its input were only read."""
    device = FakeDevice()

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(5e-6, lambda: (torch.mul(x, FACTOR, out=out), x.mul_(1.5)))

    with pytest.raises(ChangedInputError):
        bench(fn, (numbers(),), work=Work(MOVED), check=CHECK, out=torch.empty(SIZE), device=device)


def test_units_are_decimal() -> None:
    """Catches B31: binary units, and slips between bytes a nanosecond and gigabytes a second."""
    assert amount_text(rate(1e9, 1.0), "B/s") == "1.000 GB/s"
    assert amount_text(4.8e12, "B/s") == "4.800 TB/s"
    assert amount_text(999.0, "B/s") == "999.000 B/s"
    assert seconds_text(12.5e-6) == "12.5 us"
    assert seconds_text(2.0) == "2 s"
    with pytest.raises(ValueError, match="no rate"):
        rate(1.0, 0.0)


@settings(deadline=None)
@given(st.floats(1e-3, 1e17))
def test_amounts_read_back(value: float) -> None:
    """Catches B31: a prefix that does not belong to its number."""
    number, unit = amount_text(value, "B/s", 12).split()
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit.removesuffix("B/s")]
    assert float(number) * scale == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_work_of_an_op_is_taken_over() -> None:
    """Catches: written bytes counted as read ones."""
    found = work_of(OpWork(100, 50, 7))
    assert (found.bytes, found.reads, found.flops) == (150, 100, 7)


def test_peaks_by_name() -> None:
    """Catches: an H200 held to the limit of an H100 or an H20, and a name that is unknown held to any."""
    assert peaks_of("NVIDIA H200").bytes_per_second == 4.8e12
    assert peaks_of("NVIDIA GH200 480GB").bytes_per_second == 4.9e12
    assert peaks_of("NVIDIA H20").flops["bf16"] == 148e12
    assert peaks_of("NVIDIA H200").flops["fp8_e4m3"] == 1979e12
    assert peaks_of("Some GPU").bytes_per_second is None

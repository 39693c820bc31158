"""The checks and the stride walk that native rows share, against brute force over every element's address."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid_llm.kernels.ops.arguments import check_written, merge_dims, overlaps, walk, walk_rows
from rapid_llm.kernels.registry import ArgumentError

BUFFER = torch.zeros(4096)


@st.composite
def views(draw: st.DrawFn, dims: int | None = None) -> torch.Tensor:
    """A view of BUFFER as slicing, permuting and expanding make them."""
    count = dims if dims is not None else draw(st.integers(0, 5))
    base = [draw(st.integers(0, 4)) for _ in range(count)]
    start = draw(st.integers(0, 40))
    x = BUFFER[start : start + torch.Size(base).numel()].view(base)
    for dim in range(count):
        if base[dim] > 1 and draw(st.booleans()):
            x = x[(slice(None),) * dim + (slice(draw(st.integers(0, 1)), None, draw(st.integers(1, 2))),)]
    if count and draw(st.booleans()):
        x = x.permute(draw(st.permutations(range(count))))
    if count and 1 in x.shape and draw(st.booleans()):
        x = x.expand([3 if size == 1 else size for size in x.shape])
    return x


def addresses(x: torch.Tensor) -> list[int]:
    """Every element's offset in BUFFER, in the order of x."""
    indices = itertools.product(*(range(size) for size in x.shape))
    return [x.storage_offset() + dot(index, x.stride()) for index in indices]


def dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * stride for i, stride in zip(index, strides, strict=True))


@settings(max_examples=200, deadline=None)
@given(views(), views())
def test_overlaps(a: torch.Tensor, b: torch.Tensor) -> None:
    """Catches: an overlap that is not seen. (Seeing one that is not there is allowed outside of the promised cases.)"""
    truth = bool(set(addresses(a)) & set(addresses(b)))
    assert overlaps(a, b) >= truth
    if a.is_contiguous() and b.is_contiguous():
        assert overlaps(a, b) == truth


def test_overlaps_tells_columns_apart() -> None:
    """Catches: the halves of a fused projection refused as overlapping."""
    fused = BUFFER[:300].view(20, 15)
    assert not overlaps(fused[:, :9], fused[:, 9:12])
    assert not overlaps(fused[:, 9:12], fused[:, :9])
    assert overlaps(fused[:, :10], fused[:, 9:12])
    assert overlaps(fused[:, :9], fused[1:, :1])


def test_overlaps_looks_into_gaps() -> None:
    """Catches: a strided view taken for as long as its elements are many."""
    every_other = BUFFER[0:20:2]
    assert overlaps(BUFFER[15:18], every_other)
    assert overlaps(every_other, BUFFER[15:18])


def test_check_written_refuses_windows() -> None:
    """Catches: only expanded tensors refused, and sliding windows let through."""
    with pytest.raises(ArgumentError, match=r"op: elements of x share memory"):
        check_written("op", "x", BUFFER[:100].unfold(0, 4, 2))


@settings(max_examples=200, deadline=None)
@given(views())
def test_check_written(x: torch.Tensor) -> None:
    """Catches: a shared element that is written twice, and a slice or permutation that is refused."""
    places = addresses(x)
    try:
        check_written("op", "x", x)
    except ArgumentError:
        assert len(set(places)) < len(places)
    else:
        assert len(set(places)) == len(places)


@settings(max_examples=200, deadline=None)
@given(views(), st.integers(1, 4))
def test_walk_meets_every_element_once(x: torch.Tensor, keep: int) -> None:
    """Catches: a dimension merged that must not be, an order that differs between input and output."""
    out = torch.arange(x.numel()).view(x.shape)
    met = []
    for dims, (source, target) in walk(x.shape, keep, x, out):
        assert len(dims) == keep
        for index in itertools.product(*(range(d[0]) for d in dims)):
            at = target.storage_offset() + dot(index, [d[2] for d in dims])
            met.append((at, source.storage_offset() + dot(index, [d[1] for d in dims])))
    assert [source for _, source in sorted(met)] == addresses(x)
    assert len({target for target, _ in met}) == x.numel()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5).flatmap(lambda dims: views(dims)))
def test_walk_rows(x: torch.Tensor) -> None:
    """Catches: a row counted twice or skipped where leading dimensions do not merge."""
    out = torch.arange(x.numel()).view(x.shape)
    met = []
    for rows, inner, (x_outer, x_inner, x_step, *_), (source, _) in walk_rows(x, out):
        for row in range(rows):
            start = source.storage_offset() + row // inner * x_outer + row % inner * x_inner
            met += [start + column * x_step for column in range(x.shape[-1])]
    assert sorted(met) == sorted(addresses(x))


def test_merge_dims_merges() -> None:
    """Catches: a contiguous or transposed tensor walked in more dimensions than it needs."""
    x = torch.zeros(4, 5, 6)
    assert merge_dims(x.shape, x.stride(), x.stride()) == [(120, 1, 1)]
    t = x.permute(2, 0, 1)
    assert merge_dims(t.shape, t.stride(), t.stride()) == [(120, 1, 1)]
    assert merge_dims(x[:, :, :5].shape, x[:, :, :5].stride(), (25, 5, 1)) == [(20, 6, 5), (5, 1, 1)]

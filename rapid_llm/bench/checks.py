"""Judges of results: an op's own oracle and bound, or a reference given by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from rapid_llm.kernels.registry import OpSpec, get_op, probes
from rapid_llm.kernels.registry.facts import bind

from .errors import DegenerateInputError, NoCheckError
from .storages import is_tensor, rebuild, unique_bytes
from .trial import Check, Judge

ON_DEVICE_FLOPS: Final = 2e9
ON_DEVICE_BYTES: Final = 1 << 23
"""Oracles of more arithmetic or larger arguments run where these are, in float64; a CPU would take minutes."""

DISTINCT: Final = 10.0
"""The expected values have to spread over so many times their own bound, or any constant would pass."""


def against_oracle(op: str | OpSpec, roundings: tuple[str, ...] = ()) -> Check:
    """A check by the op's float64 oracle and derived bound; `roundings` as the row declares them."""
    spec = get_op(op) if isinstance(op, str) else op

    def check(*args: Any, **kwargs: Any) -> Judge:
        values, _ = bind(spec, args, kwargs)
        work = probes.load(spec.work)(**values)
        device = next((v.device for v in values.values() if is_tensor(v)), None)
        large = work.flops > ON_DEVICE_FLOPS or unique_bytes(values) > ON_DEVICE_BYTES
        where = device if large and device is not None else "cpu"
        private = {k: rebuild(v, lambda t: t.to(where, copy=True)) for k, v in values.items()}
        expected, bounds = _truth(spec, private, roundings)
        if hasattr(expected, "allowed"):
            return lambda got: _ids(got, expected)
        wanted = (expected,) if is_tensor(expected) else tuple(expected)
        _refuse_flat(spec.id, wanted[0], bounds[0])
        return lambda got: _judge(got, wanted, bounds)

    return check


def against(reference: Callable[..., Any], *, relative: float, absolute: float) -> Check:
    """A check by another implementation: |got - expected| <= absolute + relative * |expected|, for every element."""

    def check(*args: Any, **kwargs: Any) -> Judge:
        copies = [rebuild(a, lambda t: t.clone()) for a in args]
        expected = reference(*copies, **{k: rebuild(v, lambda t: t.clone()) for k, v in kwargs.items()})
        wanted = (expected,) if is_tensor(expected) else tuple(expected)
        wanted = tuple(w.double() for w in wanted)
        bounds = tuple(absolute + relative * w.abs() for w in wanted)
        _refuse_flat("the reference", wanted[0], bounds[0])
        return lambda got: _judge(got, wanted, bounds)

    return check


def _truth(spec: OpSpec, values: dict[str, Any], roundings: tuple[str, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The oracle's answer and its bounds, where `values` are; on the CPU if the op's own code mixes devices."""
    import torch

    device = next((v.device for v in values.values() if is_tensor(v)), torch.device("cpu"))
    try:
        with torch.device(device), _no_tf32():  # oracles that make constants make them beside the arguments
            expected = probes.load(spec.oracle)(**values)
            return expected, probes.load(spec.bound)(values, expected, roundings)
    except RuntimeError as error:
        if device.type == "cpu" or "same device" not in str(error):
            raise
    return _truth(spec, {k: rebuild(v, lambda t: t.cpu()) for k, v in values.items()}, roundings)


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Oracles refuse to run where TF32 might touch them."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def _refuse_flat(name: str, expected: Any, bound: Any) -> None:
    """Raise where the expected values hold NaN, or hardly differ from one another."""
    import torch

    if not expected.numel():
        raise NoCheckError(f"{name}: the result is empty, and proves nothing")
    if not bool(torch.isfinite(expected).all()):
        raise DegenerateInputError(f"{name}: the expected result holds NaN or infinities; give ordinary inputs")
    if expected.numel() >= 8 and float(expected.std()) < DISTINCT * float(bound.median()):
        raise DegenerateInputError(
            f"{name}: the expected result varies by {float(expected.std()):.3g}, hardly more than its bound "
            f"{float(bound.median()):.3g}, so that a constant would pass; give inputs that the result depends on"
        )


def _judge(got: Any, wanted: tuple[Any, ...], bounds: tuple[Any, ...]) -> str | None:
    results = (got,) if is_tensor(got) else tuple(got) if got is not None else ()
    if len(results) != len(wanted):
        return f"{len(results)} results, expected {len(wanted)}"
    for index, (result, expected, bound) in enumerate(zip(results, wanted, bounds, strict=True)):
        if tuple(result.shape) != tuple(expected.shape):
            return f"result {index} has shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
        value = result.detach().to(expected.device).double()
        wrong = ~((value - expected).abs() <= bound)  # also where it is NaN
        count = int(wrong.sum())
        if count:
            at = tuple(int(i) for i in wrong.nonzero()[0])
            return (
                f"{count} of {value.numel()} elements wrong; {list(at)}: got {float(value[at])!r}, "
                f"expected {float(expected[at])!r} +- {float(bound[at]):.3g}"
            )
    return None


def _ids(got: Any, expected: Any) -> str | None:
    """Chosen ids against the acceptable ones; -1 where a row is invalid."""
    ids = got.detach().to(expected.allowed.device)
    vocab = expected.allowed.shape[1]
    inside = (ids >= 0) & (ids < vocab)
    chosen = expected.allowed.gather(1, ids.clamp(0, vocab - 1).long()[:, None])[:, 0]
    good = (inside & chosen).where(~expected.invalid, ids == -1)
    wrong = int((~good).sum())
    return f"{wrong} of {ids.numel()} ids are not acceptable" if wrong else None

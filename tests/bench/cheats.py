"""Functions that cheat: each with the refusal that it must meet. See `test_refusals`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from rapid_llm.bench import BenchError
from rapid_llm.bench import errors as e
from tests.bench.fake_device import FakeDevice

SIZE = 4096
MOVED = 2 * SIZE * 4
TOOK = 5e-6
FACTOR = 0.3

HELD = torch.ones(4)
"""A tensor at module level, for a cheat that reads it."""


def honest(device: FakeDevice, seconds: float = TOOK) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(seconds, lambda: torch.mul(x, FACTOR, out=out))

    return fn


CHEATS: dict[str, tuple[Callable[[FakeDevice], Callable[..., Any]], type[BenchError]]] = {}


def cheat(error: type[BenchError]) -> Callable[[Callable[[FakeDevice], Callable[..., Any]]], None]:
    def add(make: Callable[[FakeDevice], Callable[..., Any]]) -> None:
        CHEATS[make.__name__] = (make, error)

    return add


@cheat(e.UnwrittenError)
def does_nothing(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: None


@cheat(e.UnwrittenError)
def launches_an_empty_kernel(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK)


@cheat(e.UnwrittenError)
def leaves_the_tail(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK, lambda: torch.mul(x[:-3], FACTOR, out=out[:-3]))


@cheat(e.UnwrittenError)
def leaves_one_tile(device: FakeDevice) -> Callable[..., Any]:
    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        out[:1024], out[2048:] = x[:1024] * FACTOR, x[2048:] * FACTOR

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.NoLaunchError)
def works_on_the_host(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, FACTOR, out=out)

    return fn


@cheat(e.UnwrittenError)
def works_while_captured_only(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, FACTOR, out=out)
        device.launch(TOOK)

    return fn


@cheat(e.LeakedWorkError)
def uses_another_stream(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(1e-6)
        device.launch(500e-6, lambda: torch.mul(x, FACTOR, out=out), stream="side")

    return fn


@cheat(e.WrongResultError)
def remembers_by_pointer(device: FakeDevice) -> Callable[..., Any]:
    kept: dict[int, Any] = {}

    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_kept(kept, x.data_ptr(), x))

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.WrongResultError)
def remembers_by_shape(device: FakeDevice) -> Callable[..., Any]:
    kept: dict[Any, Any] = {}
    return lambda x, out: device.launch(TOOK, lambda: out.copy_(_kept(kept, x.shape, x)))


@cheat(e.WrongResultError)
def remembers_by_identity(device: FakeDevice) -> Callable[..., Any]:
    kept: dict[int, Any] = {}
    return lambda x, out: device.launch(TOOK, lambda: out.copy_(_kept(kept, id(x), x)))


def _kept(kept: dict[Any, Any], key: Any, x: torch.Tensor) -> list[float]:
    """Kept as bytes, so that no tensor is held."""
    if key not in kept:
        kept[key] = (x * FACTOR).numpy().tobytes()
    return torch.frombuffer(bytearray(kept[key]), dtype=torch.float32)


@cheat(e.RememberedError)
def is_slow_for_new_values(device: FakeDevice) -> Callable[..., Any]:
    kept: dict[int, float] = {}

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        known = kept.get(x.data_ptr()) == float(x[0])
        kept[x.data_ptr()] = float(x[0])
        device.launch(TOOK if known else 20 * TOOK, lambda: torch.mul(x, FACTOR, out=out))

    return _uncapturable(device, fn)


def _uncapturable(device: FakeDevice, fn: Callable[..., Any]) -> Callable[..., Any]:
    def outer(x: torch.Tensor, out: torch.Tensor) -> None:
        if device.capture is not None:
            raise RuntimeError("reads a value, which no graph can")
        fn(x, out)

    return outer


@cheat(e.WrongResultError)
def is_right_at_first_only(device: FakeDevice) -> Callable[..., Any]:
    calls = [0]

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        calls[0] += 1
        factor = FACTOR if calls[0] <= 12 else 0.31
        device.launch(TOOK, lambda: torch.mul(x, factor, out=out))

    return _uncapturable(device, fn)


@cheat(e.WrongResultError)
def is_wrong_once_in_fifty(device: FakeDevice) -> Callable[..., Any]:
    calls = [0]

    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        calls[0] += 1
        factor = 0.31 if calls[0] % 50 == 43 else FACTOR
        device.launch(TOOK, lambda: torch.mul(x, factor, out=out))

    return _uncapturable(device, fn)


@cheat(e.UnwrittenError)
def skips_every_other_call(device: FakeDevice) -> Callable[..., Any]:
    calls = [0]

    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] % 2:
            torch.mul(x, FACTOR, out=out)

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.BenchError)
def is_one_call_late(device: FakeDevice) -> Callable[..., Any]:
    last: list[Any] = [None]

    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        if last[0] is not None:
            last[0]()
        last[0] = lambda: torch.mul(x, FACTOR, out=out)

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.UnwrittenError)
def writes_the_first_out_always(device: FakeDevice) -> Callable[..., Any]:
    first: dict[str, int] = {}

    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        if first.setdefault("at", out.data_ptr()) == out.data_ptr():
            torch.mul(x, FACTOR, out=out)

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.WrongResultError)
def writes_nan(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK, lambda: out.fill_(float("nan")))


@cheat(e.WrongResultError)
def writes_zeros(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK, lambda: out.zero_())


@cheat(e.WrongResultError)
def computes_in_half_precision(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK, lambda: out.copy_(x.half() * FACTOR))


@cheat(e.WrongResultError)
def ignores_one_element(device: FakeDevice) -> Callable[..., Any]:
    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, FACTOR, out=out)
        out[SIZE // 2] += 1e-3

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.WrongResultError)
def returns_another_tensor_than_out(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=out))
        return out.clone()

    return fn


@cheat(e.ChangedInputError)
def zeroes_its_input(device: FakeDevice) -> Callable[..., Any]:
    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, FACTOR, out=out)
        x.zero_()

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.ChangedInputError)
def writes_one_element_of_its_input(device: FakeDevice) -> Callable[..., Any]:
    def effect(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(x, FACTOR, out=out)
        x[7] = 0.5

    return lambda x, out: device.launch(TOOK, lambda: effect(x, out))


@cheat(e.TooFastError)
def is_faster_than_memory(device: FakeDevice) -> Callable[..., Any]:
    return honest(device, MOVED / 4.9e12)


@cheat(e.ResolutionError)
def takes_no_time(device: FakeDevice) -> Callable[..., Any]:
    return honest(device, 0.0)


@cheat(e.RememberedError)
def keeps_results(device: FakeDevice) -> Callable[..., Any]:
    return functools.lru_cache(honest(device))


@cheat(e.HiddenInputError)
def closes_over_a_tensor(device: FakeDevice) -> Callable[..., Any]:
    held = torch.ones(3)
    return lambda x, out: device.launch(TOOK, lambda: torch.mul(x, FACTOR * held[0], out=out))


@cheat(e.HiddenInputError)
def closes_over_a_list_of_tensors(device: FakeDevice) -> Callable[..., Any]:
    held = {"all": [torch.ones(3)]}
    return lambda x, out: device.launch(TOOK, lambda: torch.mul(x, FACTOR * held["all"][0][0], out=out))


@cheat(e.HiddenInputError)
def closes_over_a_function_that_does(device: FakeDevice) -> Callable[..., Any]:
    held = torch.ones(3)

    def inner(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(TOOK, lambda: torch.mul(x, FACTOR * held[0], out=out))

    return lambda x, out: inner(x, out)


@cheat(e.HiddenInputError)
def has_a_tensor_as_default(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out, held=HELD: device.launch(TOOK, lambda: torch.mul(x, FACTOR * held[0], out=out))


@cheat(e.HiddenInputError)
def has_a_tensor_as_keyword_default(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor, *, held: torch.Tensor = HELD) -> None:
        device.launch(TOOK, lambda: torch.mul(x, FACTOR * held[0], out=out))

    return fn


@cheat(e.HiddenInputError)
def is_a_partial_with_a_tensor(device: FakeDevice) -> Callable[..., Any]:
    return functools.partial(lambda held, x, out: device.launch(TOOK), torch.ones(3))


@cheat(e.HiddenInputError)
def is_a_partial_with_a_tensor_by_name(device: FakeDevice) -> Callable[..., Any]:
    return functools.partial(lambda x, out, held: device.launch(TOOK), held=torch.ones(3))


class Holder:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.held = device, torch.ones(3)

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.device.launch(TOOK, lambda: torch.mul(x, FACTOR * self.held[0], out=out))

    __call__ = run


@cheat(e.HiddenInputError)
def is_a_method_of_an_object_with_a_tensor(device: FakeDevice) -> Callable[..., Any]:
    return Holder(device).run


@cheat(e.HiddenInputError)
def is_an_object_with_a_tensor(device: FakeDevice) -> Callable[..., Any]:
    return Holder(device)


@cheat(e.HiddenInputError)
def reads_a_global_tensor(device: FakeDevice) -> Callable[..., Any]:
    return lambda x, out: device.launch(TOOK, lambda: torch.mul(x, FACTOR * HELD[0], out=out))


@cheat(e.CallFailedError)
def raises(device: FakeDevice) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        raise TypeError("does not take that")

    return fn

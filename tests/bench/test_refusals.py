"""Functions that cheat or say nothing, and the refusal that each must meet. None may leave with a figure.

Each catches: a harness that prints a number for it. Time, device, streams and graphs are scripted (`fake_device`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import cycle, repeat
from typing import Any

import pytest
import torch

from rapid_llm.bench import BenchError, against, bench, compare
from rapid_llm.bench import errors as e
from rapid_llm.bench.device import Clocks
from rapid_llm.bench.trial import RowArm
from rapid_llm.bench.work import Work
from rapid_llm.kernels import dispatch
from rapid_llm.kernels.ops.elementwise.scale import scale as native_scale
from tests.bench.fake_device import FakeDevice

SIZE = 4096
MOVED = 2 * SIZE * 4
TOOK = 5e-6
FACTOR = 0.3

HELD = torch.ones(4)
"""A tensor at module level, for a cheat that reads it."""


def right(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


CHECK = against(right, relative=1e-6, absolute=0.0)


def numbers(size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def run(fn: Callable[..., Any], device: FakeDevice, **changes: Any) -> Any:
    """bench() with all that an honest function would need."""
    x = changes.pop("x", None)
    args = changes.pop("args", (numbers() if x is None else x,))
    out = changes.pop("out", torch.empty(SIZE))
    options = {"work": Work(MOVED, SIZE), "check": CHECK, "samples": 7, "name": "cheat", **changes}
    return bench(fn, args, out=out, device=device, **options)


def honest(device: FakeDevice, seconds: float = TOOK) -> Callable[..., Any]:
    def fn(x: torch.Tensor, out: torch.Tensor) -> None:
        device.launch(seconds, lambda: torch.mul(x, FACTOR, out=out))

    return fn


def test_an_honest_function_is_measured() -> None:
    """Catches: a harness that refuses everything, which would pass every other test here."""
    device = FakeDevice()
    result = run(honest(device), device)
    assert result.seconds.median == pytest.approx(TOOK)
    assert result.cold
    assert result.launches_a_call == 1
    assert result.bytes_per_second == pytest.approx(MOVED / TOOK)
    assert result.flags == ()


# -- cheats on results: name -> (function of the device, the refusal) -------------------------------------------------

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


@pytest.mark.parametrize("name", list(CHEATS))
def test_cheats_are_refused(name: str) -> None:
    """Catches: a figure for the function of this name."""
    make, error = CHEATS[name]
    device = FakeDevice()
    with pytest.raises(error) as caught:
        run(make(device), device)
    if error is not BenchError:
        assert type(caught.value) is error
    assert "cheat" in str(caught.value)


# -- cheats of functions that return their result ---------------------------------------------------------------------


def test_results_in_one_memory_are_refused() -> None:
    """Catches B34: one buffer answered for every call."""
    device, shared = FakeDevice(), []

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.frombuffer(shared[0], dtype=torch.float32)
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=out))
        return out

    shared.append(bytearray(4 * SIZE))
    with pytest.raises(e.BenchError):
        run(fn, device, out=None)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda x, got: x, e.WrongResultError),
        (lambda x, got: got[:-1], e.WrongResultError),
        (lambda x, got: (got, got), e.WrongResultError),
        (lambda x, got: None, e.WrongResultError),
    ],
    ids=["its argument", "another shape", "two tensors", "nothing"],
)
def test_strange_answers_are_refused(answer: Callable[..., Any], error: type[BenchError]) -> None:
    """Catches: an answer that is no result of its own."""
    device = FakeDevice()

    def fn(x: torch.Tensor) -> Any:
        got = torch.empty_like(x)
        device.launch(TOOK, lambda: torch.mul(x, FACTOR, out=got))
        return answer(x, got)

    with pytest.raises(error):
        run(fn, device, out=None)


# -- declarations and inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"work": None}, e.NoWorkError),
        ({"check": None}, e.NoCheckError),
        ({"x": torch.zeros(SIZE)}, e.DegenerateInputError),
        ({"x": torch.ones(SIZE)}, e.DegenerateInputError),
        ({"x": torch.arange(SIZE) % 3 - 1.0}, e.DegenerateInputError),
        ({"x": torch.full((SIZE,), float("nan"))}, e.DegenerateInputError),
        ({"x": numbers(1)}, e.DegenerateInputError),
        ({"args": (3,)}, e.NoCheckError),
        ({"check": against(lambda x: x * 0 + 1, relative=1e-6, absolute=0)}, e.DegenerateInputError),
        ({"check": against(lambda x: x * float("nan"), relative=1e-6, absolute=0)}, e.DegenerateInputError),
        ({"check": against(lambda x: x[:0], relative=1e-6, absolute=0)}, e.NoCheckError),
        ({"check": against(lambda x: x * 0.31, relative=1e-6, absolute=0)}, e.WrongResultError),
        ({"check": against(right, relative=10.0, absolute=10.0)}, e.DegenerateInputError),
        ({"work": Work(1000, 10**10)}, e.TooFastError),
        ({"row": "native/scale"}, e.WrongRowError),
        ({"name": "native/scale"}, e.WrongRowError),
    ],
    ids=[
        *("no work", "no check", "zeros", "ones", "three values", "nan", "one number", "no tensor"),
        *("constant result", "nan expected", "empty result", "another op", "a bound that passes anything"),
        *("beyond the FLOP peak", "not the row", "not the row it is named after"),
    ],
)
def test_what_says_nothing_is_refused(changes: dict[str, Any], error: type[BenchError]) -> None:
    """Catches: a figure for a call whose work, check, inputs or name are worth nothing."""
    device = FakeDevice()
    with pytest.raises(error):
        run(honest(device), device, **changes)


def test_zero_work_cannot_be_declared() -> None:
    """Catches: Work(0) as a way around the declaration."""
    with pytest.raises(e.NoWorkError):
        Work(0)
    with pytest.raises(ValueError, match="whole number"):
        Work(-1)
    with pytest.raises(ValueError, match="more than"):
        Work(10, read_bytes=11)


def test_dispatch_decides_which_row_may_be_named() -> None:
    """Catches: a row timed under a name that dispatch would not run, or a handle forced without saying so."""
    device, x = FakeDevice(), numbers()
    check = against(lambda x, f: x * f, relative=1e-6, absolute=0)
    options = {"args": (x, FACTOR), "check": check}
    forced = dispatch("scale", x, FACTOR, backend="native/scale")
    with pytest.raises(e.WrongRowError, match="forces this row"):
        run(forced, device, name="native/scale", **options)
    with pytest.raises(e.WrongRowError, match="runs native/scale"):
        run(forced, device, row="jit/scale", name="x", **options)
    with pytest.raises(e.WrongRowError, match="is not"):
        run(native_scale, device, row="jit/scale", name="x", **options)


# -- the device and the run -------------------------------------------------------------------------------------------


def test_a_device_that_is_always_slowed_down_ends_in_a_refusal() -> None:
    """Catches B21: every sample dropped, and an empty result or an endless loop."""
    device = FakeDevice(states=repeat(Clocks(1200, 2600, 0x40)))
    with pytest.raises(e.ThrottledError, match="7 of 7"):
        run(honest(device), device)


def test_few_slowed_samples_are_dropped() -> None:
    """Catches: disturbed samples kept, or counted as good."""
    hot, cool = Clocks(1200, 2600, 0x20), Clocks(1980, 2600, 0)
    device = FakeDevice(states=cycle([cool] * 8 + [hot] * 2))
    result = run(honest(device), device, samples=20)
    assert result.dropped == 4
    assert len(result.samples) == 16
    assert {stamp["sm_mhz"] for stamp in result.clocks} == {1200, 1980}


def test_a_power_cap_is_stamped_not_dropped() -> None:
    """Catches: large matrix products that could never be measured, for they always run under the power cap."""
    device = FakeDevice(states=repeat(Clocks(1700, 2600, 0x4)))
    result = run(honest(device), device)
    assert result.dropped == 0
    assert "power-capped" in result.flags


def test_a_host_that_is_too_slow_is_refused() -> None:
    """Catches B17: a queue that ran empty, and the host's time printed as the device's."""
    device = FakeDevice(host_bound=True)
    with pytest.raises(e.HostBoundError, match="waited for the host"):
        run(honest(device), device)


def test_an_unknown_device_is_held_to_the_ceiling_measured_here() -> None:
    """Catches: no limit at all on a device that the table does not have."""
    device = FakeDevice(name="Some GPU")
    device.calibration = type(device.calibration)(2e-6, 1e-6, 1e9, "scripted")  # type: ignore[union-attr, misc]
    device.cache_bytes = 1 << 16
    with pytest.raises(e.TooFastError, match="measured here"):
        run(honest(device, 1e-9), device)


def test_cold_and_warm_do_not_mix() -> None:
    """Catches: a cold arm beside a warm one in one table."""
    device = FakeDevice(memory=1 << 20, max_copies=64, cache_bytes=1000)
    plain = RowArm("a", honest(device), torch.empty(SIZE))
    other = RowArm("b", honest(device), torch.empty(SIZE), adapt=lambda arguments: dict(arguments))
    import rapid_llm.bench.rows as rows

    plans = iter([True, False])
    original = rows.plan_for

    def uneven(trials: Any, work: Any, seconds: float, *, cold: bool) -> Any:
        return original(trials, work, seconds, cold=next(plans))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "plan_for", uneven)
        with pytest.raises(e.MixedColdError, match="some arms"):
            compare([plain, other], [numbers()], work=Work(MOVED, SIZE), check=CHECK, device=device)


def test_the_battery_is_large() -> None:
    """Catches: refusals that nobody tries any more."""
    assert len(CHEATS) >= 36

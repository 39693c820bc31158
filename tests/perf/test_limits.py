"""The roofline of a device, and refusals of what lies above it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rapid_llm.bench.device import Calibration, Device, device_for
from rapid_llm.bench.errors import ResolutionError, TooFastError
from rapid_llm.perf.limits import Limits, measure_limits, product_rate
from rapid_llm.perf.needs import Needs
from tests.bench.fake_device import FakeDevice

from .support import LIMITS


class Timed(FakeDevice):
    """A block takes as long as `seconds` says."""

    seconds = 0.004

    def time(self, block: object, before: object, again: object = None) -> object:
        from rapid_llm.bench.device import Timing

        return Timing(self.seconds)


def test_the_side_that_takes_longer_is_the_limit() -> None:
    """Catches: memory's limit alone for a step that arithmetic bounds, or the smaller of the two."""
    assert LIMITS.seconds(Needs(4e12, 7e13)) == (1.0, "memory")
    assert LIMITS.seconds(Needs(4e11, 1.4e15)) == (2.0, "compute")


def test_faster_than_memory_is_refused() -> None:
    """Catches: a share above 1 quoted as a result; and a refusal of a small model that the cache can hold."""
    LIMITS.refuse_too_fast("decode", Needs(4e12, 1), 10, 0.99)
    with pytest.raises(TooFastError, match=r"decode: 4\.444 TB/s is above 4\.000 TB/s"):
        LIMITS.refuse_too_fast("decode", Needs(4e12, 1), 10, 0.9)
    LIMITS.refuse_too_fast("decode", Needs(4e8, 1), 10, 1e-5)


def test_products_are_counted_and_the_fastest_dtype_counts() -> None:
    """Catches: one product's FLOPs over the time of four, a dtype passed over, a calibration that is not asked."""
    device: Device = Timed(kind="cpu", calibration=Calibration(2.0, 1.0, 9e9, "scripted"))  # type: ignore[assignment]
    found = measure_limits(device, torch.device("cpu"), ["fp32", "bf16"])
    assert found.flops_per_second == 2 * 1024**3 / 0.001
    assert found.flops_by in ("fp32 1024^3", "bf16 1024^3")
    assert (found.bytes_per_second, found.bytes_by) == (9e9, "scripted")
    assert found.nominal_flops_per_second is None


def test_a_clock_that_stands_still_is_refused() -> None:
    """Catches: a division by 0 seconds."""
    device = Timed(kind="cpu")
    device.seconds = 0.0
    with pytest.raises(ResolutionError):
        product_rate(device, torch.device("cpu"), 8, "fp32")  # type: ignore[arg-type]


def test_the_better_of_two_measurements_of_each_side() -> None:
    """Catches: a disturbed calibration that makes shares look better."""
    other = replace(LIMITS, bytes_per_second=5e12, bytes_by="copy", flops_per_second=1.0)
    found = LIMITS.better(other)
    assert (found.bytes_per_second, found.bytes_by) == (5e12, "copy")
    assert (found.flops_per_second, found.flops_by) == (LIMITS.flops_per_second, LIMITS.flops_by)
    assert Limits.better(other, LIMITS).flops_per_second == LIMITS.flops_per_second


@pytest.mark.gpu
def test_on_a_gpu_both_sides_are_near_what_the_maker_says() -> None:
    """Catches: products on the wrong device, events around nothing, bytes counted once where they move twice."""
    found = measure_limits(device_for("cuda"), torch.device("cuda"), ["bf16"])
    assert found.nominal_bytes_per_second is not None
    assert 0.6 < found.bytes_per_second / found.nominal_bytes_per_second <= 1.0
    assert found.nominal_flops_per_second is not None
    assert 0.4 < found.flops_per_second / found.nominal_flops_per_second <= 1.0

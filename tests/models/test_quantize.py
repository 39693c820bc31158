"""Dense weights quantised at load: every weight comes back within the distance that is promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels.ops.block_formats import INT4_GROUPS
from rapid_llm.kernels.registry import ArgumentError
from rapid_llm.models import quantize as quantizing
from rapid_llm.models.quantize import pack_fp8_channel, pack_int4_group, pack_int8_channel, quantize, scheme_for
from tests.reference_formats import row

SCHEMES = ["int8_channel", "fp8_channel", *INT4_GROUPS]
FP32 = 1 + 2.0**-14
"""Room for fp32's roundings: of the scale, the quotient and the product, 3 U of up to 127 steps, against half a one."""


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows that are normal, tiny, huge, zero, of one sign, of one outlier, and of the steps of a scale exactly."""
    g = torch.Generator().manual_seed(5)
    w = torch.randn(8, 256, generator=g)
    w[1] *= 1e-6
    w[2] *= 3e4
    w[3] = 0
    w[4] = w[4].abs() + 5
    w[5, 7] = 1000
    w[6] = torch.arange(256) % 16 - 8.0
    w[7] = -w[7].abs()
    return w.to(dtype)


def read_back(packed: Tensor, scheme: str) -> Tensor:
    """By the formats' second formulation, in plain Python."""
    return torch.tensor([row(bytes(r.tolist()), scheme) for r in packed], dtype=torch.float64)


def promised(w: Tensor, scheme: str) -> Tensor:
    """The bound of `quantize`'s docstring, from the weights alone; d may be fp16 rounded up by 2**-11."""
    w = w.double()
    if scheme == "int8_channel":
        return w.abs().amax(1, keepdim=True) / 254 * FP32 + 0 * w
    if scheme == "fp8_channel":
        return torch.maximum(w.abs() / 16, w.abs().amax(1, keepdim=True) / 448 / 1024) * FP32
    groups = w.unflatten(1, (-1, INT4_GROUPS[scheme]))
    span = groups.amax(2, keepdim=True).clamp_min(0) - groups.amin(2, keepdim=True).clamp_max(0)
    return (span / 30 * (1 + 2.0**-10) + 2.0**-20 + 0 * groups).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_within_the_stated_distance(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a code cut off instead of rounded, a scale of another row, a range that clips its ends, a zero point
    that is rounded away, a piece of rows left out."""
    monkeypatch.setattr(quantizing, "PIECE", 3 * 256)
    w = weights(dtype)
    error = (read_back(quantize(w, scheme), scheme) - w.double()).abs()
    assert bool((error <= promised(w, scheme)).all())
    assert bool((error[3] == 0).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_distance_is_not_slack(scheme: str) -> None:
    """Catches: a bound so wide that a scale twice too large would pass."""
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(6))
    error = (read_back(quantize(w, scheme), scheme) - w.double()).abs()
    assert float((error / promised(w, scheme)).max()) > 0.9


def test_what_a_quantisation_stands_for() -> None:
    """Catches: groups that do not divide a row, or a request that is silently something else."""
    assert scheme_for("int4", 576) == "int4_group64"
    assert scheme_for("int4", 96) == "int4_group32"
    assert scheme_for("int4", 100) is None
    assert scheme_for("int8", 48) == "int8_channel"
    assert scheme_for("fp8", 40) is None
    with pytest.raises(ValueError, match="'int5' is not one of int8, int4, fp8"):
        scheme_for("int5", 64)


def test_packers_take_codes_as_they_are() -> None:
    """Catches: codes quantised a second time, one scale for all rows taken for a row's own, nibbles swapped."""
    g = torch.Generator().manual_seed(7)
    codes = torch.randint(-128, 128, (3, 32), generator=g).to(torch.int8)
    scales = torch.tensor([0.5, 2.0, 0.125])
    assert torch.equal(read_back(pack_int8_channel(codes, scales), "int8_channel"), codes.double() * scales[:, None])
    assert torch.equal(read_back(pack_int8_channel(codes, scales[:1]), "int8_channel"), codes.double() * 0.5)
    eight = torch.randn(3, 32, generator=g).to(torch.float8_e4m3fn)
    want = eight.double() * scales[:, None]
    assert torch.equal(read_back(pack_fp8_channel(eight, scales.bfloat16()), "fp8_channel"), want)
    four = torch.randint(0, 16, (3, 64), generator=g, dtype=torch.uint8)
    scale, zero = torch.rand(3, 2, generator=g).half(), torch.tensor([[8.0, 0.0], [3.5, 16.0], [7.0, 8.0]])
    want = (four.double().view(3, 2, 32) - zero.double()[..., None]) * scale.double()[..., None]
    assert torch.equal(read_back(pack_int4_group(four, scale, zero, 32), "int4_group32"), want.flatten(1))


def test_what_does_not_fit_is_refused() -> None:
    """Catches: NaN quantised to a number, scales of another shape broadcast, groups cut in two."""
    bad = weights()
    bad[7, 9] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite in rows 0 to 7"):
        quantize(bad, "int8_channel")
    with pytest.raises(ValueError, match=r"int4_group128: a row of 160 weights"):
        quantize(torch.ones(2, 160), "int4_group128")
    with pytest.raises(ValueError, match="no weights are quantised to 'q4_k'"):
        quantize(torch.ones(2, 256), "q4_k")
    with pytest.raises(ValueError, match=r"span 2e\+06, more than fp16's scales"):
        quantize(torch.full((2, 32), 2e6), "int4_group32")
    with pytest.raises(ArgumentError, match="columns a multiple of 16"):
        pack_int8_channel(torch.ones(2, 40), torch.ones(2))
    with pytest.raises(ArgumentError, match="3 rows on cpu take one scale each, or one for all"):
        pack_fp8_channel(torch.ones(3, 32).to(torch.float8_e4m3fn), torch.ones(2))
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"take zeros of shape \(2, 1\)"):
        pack_int4_group(codes, torch.ones(2, 1), torch.ones(1, 2), 64)
    with pytest.raises(ArgumentError, match="int4_group48"):
        pack_int4_group(codes, torch.ones(2, 1), torch.ones(2, 1), 48)
    with pytest.raises(ArgumentError, match=r"must be uint8, got torch\.int8"):
        pack_int4_group(codes.to(torch.int8), torch.ones(2, 1), torch.ones(2, 1), 64)

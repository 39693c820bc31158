"""Caches of fp8 e4m3, to the bit: what is stored, what is read back, and who must not touch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_llm.kernels import cpp
from rapid_llm.kernels.ops.attention.attention_decode import attention_decode
from rapid_llm.kernels.ops.attention.attention_prefill import attention_prefill
from rapid_llm.kernels.ops.kvcache.kvcache_write import kvcache_write
from rapid_llm.kernels.ops.kvcache.rope_kvcache_write import rope_kvcache_write
from rapid_llm.kernels.registry import explain, load_target, rows
from tests.kernels.devices import DEVICES
from tests.kernels.fused_cache_write import make

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

E4M3 = torch.float8_e4m3fn
NAN = 0x7F


def number(code: int) -> float:
    """The number of an e4m3 code by the definition of the format (OCP 8-bit floating point, 2023, table 1)."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if code & 0x7F == NAN:
        return float("nan")
    return sign * (2.0**-6 * fraction / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + fraction / 8))


NUMBERS = torch.tensor([number(code) for code in range(NAN)], dtype=torch.float64)
"""Those of the codes without a sign, ascending."""


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number, of two the even code; the largest number's for all beyond it; signs and NaN kept.

    By comparison with the midpoints, which float64 holds exactly.
    """
    size = values.double().abs()
    middle = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    code = torch.searchsorted(middle, size, right=False)
    tie = torch.searchsorted(middle, size, right=True) != code
    code = code + (tie & (code % 2 == 1))
    code = torch.where(torch.isnan(size), NAN, code)
    return (code + 128 * torch.signbit(values)).to(torch.uint8)


def written(values: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes in caches that `values` (tokens, heads, dim) were written to, as keys and as values."""
    tokens, heads, dim = values.shape
    caches = torch.zeros(2, tokens, 1, heads, dim, device=device).to(E4M3)
    key = values.to(device)
    kvcache_write(key, key.clone(), caches[0], caches[1], torch.arange(tokens, device=device))
    both = caches.view(torch.uint8).cpu()
    return both[0, :, 0], both[1, :, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_every_half_is_stored_as_its_nearest_number(device: str) -> None:
    """Catches: truncation, ties away from even, subnormals lost, NaN or infinity for what exceeds 448, -0 without its
    sign: of each of fp16's 65,536 bit patterns."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(32, 16, 128)
    want = nearest(values)
    for got in written(values, device):
        nan = want & NAN == NAN
        assert torch.equal(got & NAN == NAN, nan)
        assert torch.equal(got[~nan], want[~nan])


EDGES = (
    (0.0, 0x00),
    (-0.0, 0x80),
    (2.0**-10, 0x00),
    (2.0**-10 * (1 + 2.0**-23), 0x01),
    (3 * 2.0**-10, 0x02),
    (2.0**-9, 0x01),
    (2.0**-6 - 2.0**-10, 0x08),
    (2.0**-149, 0x00),
    (17.0, 0x58),
    (19.0, 0x5A),
    (447.0, 0x7E),
    (448.0, 0x7E),
    (464.0, 0x7E),
    (465.0, 0x7E),
    (3e38, 0x7E),
    (float("inf"), 0x7E),
    (float("-inf"), 0xFE),
    (-1e9, 0xFE),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges(device: str, dtype: torch.dtype) -> None:
    """Catches: a wrong code where fp16 cannot go: fp32's own subnormals, neighbours of ties, numbers beyond 65,504."""
    kept = [(value, code) for value, code in EDGES if float(torch.tensor(value, dtype=dtype)) == value]
    values = torch.tensor([*(value for value, _ in kept), float("nan")], dtype=dtype).view(1, 1, -1)
    for got in written(values, device):
        assert got.flatten().tolist()[:-1] == [code for _, code in kept]
        assert int(got.flatten()[-1]) & NAN == NAN


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_every_code_is_read_as_its_number(device: str, dtype: torch.dtype, op: str) -> None:
    """Catches: another bias, subnormals flushed, code 127 taken for 480, a sign lost. A query that sees one key answers
    with its value, exactly."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3).view(2, 1, 1, 128)
    keys = torch.zeros(2, 1, 1, 128, device=device).to(E4M3)
    query = torch.ones(2, 1, 128, dtype=dtype, device=device)
    lens = torch.ones(2, dtype=torch.int32, device=device)
    table = torch.arange(2, dtype=torch.int32, device=device).view(2, 1)
    if op == "decode":
        got = attention_decode(query, keys, values, lens, table, 0.25)
    else:
        starts = torch.arange(3, dtype=torch.int32, device=device)
        got = attention_prefill(query, keys, values, starts, lens, table, 0.25)
    want = torch.tensor([number(code) for code in range(256)], dtype=torch.float64)
    torch.testing.assert_close(got.cpu().double().flatten(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_fused_write_stores_the_rotated_key(device: str, interleaved: bool) -> None:
    """Catches: a key that the fused op stores before its rotation, or value's heads in key's place."""
    call = make(5, device=device, dtype=torch.float32)
    call.k_cache, call.v_cache = call.k_cache.to(E4M3), call.v_cache.to(E4M3)
    apart = call.copy()
    rope_kvcache_write(*call.args, interleaved=interleaved)
    kvcache_write(call.key, call.value, apart.k_cache, apart.v_cache, apart.slots)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(getattr(call, name).view(torch.uint8), getattr(apart, name).view(torch.uint8)), name


OTHERS = [
    (op, row.name)
    for op in ("kvcache.write", "rope_kvcache_write", "attention.decode", "attention.prefill")
    for row in rows(op)
    if not row.is_native
]


@pytest.mark.parametrize(("op", "name"), OTHERS)
def test_rows_that_cannot_read_it_are_out_and_say_why(op: str, name: str) -> None:
    """Catches: a row that would take the bytes of an fp8 cache for numbers of its own."""
    for bits, wanted in ((8, True), (16, False)):
        (verdict,) = [
            v for v in explain(op, device="cuda", dtype="bf16", dims={"kv_bits": bits}).rows if v.row.name == name
        ]
        assert ("needs kv_bits >= 16, got 8" in {r.text for r in verdict.reasons}) is wanted


def _call(op: str, caches: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
    x, lens = torch.zeros(2, 2, 16), torch.ones(2, dtype=torch.int32)
    if op == "kvcache.write":
        return (x, x.clone(), *caches, torch.arange(2))
    if op == "rope_kvcache_write":
        return (x, x.clone(), x.clone(), *caches, torch.arange(2), torch.zeros(4, 16), torch.arange(2))
    starts = (torch.arange(3, dtype=torch.int32),) if op == "attention.prefill" else ()
    return (x, *caches, *starts, lens, torch.zeros(2, 1, dtype=torch.int32), 1.0)


@pytest.mark.parametrize("op", ["kvcache.write", "rope_kvcache_write", "attention.decode", "attention.prefill"])
@pytest.mark.parametrize(
    "kinds", [(E4M3, torch.float32), (torch.float32, E4M3), (torch.float8_e5m2, torch.float8_e5m2)], ids=str
)
def test_refusals(op: str, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Catches: keys of one dtype beside values of another, and another fp8 read as e4m3."""
    caches = tuple(torch.zeros(2, 4, 2, 16).to(kind) for kind in kinds)
    with pytest.raises(RuntimeError, match=rf"{op}.*(dtype|caches are)"):
        load_target(f"native/{op}")(*_call(op, caches))  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["kvcache.write", "rope_kvcache_write", "attention.decode"])
def test_cpp_rows_refuse_it_by_name(op: str) -> None:
    """Catches: a row that was called past dispatch and reads bytes as fp32, beyond the cache's end."""
    if cpp.available() is not True:
        pytest.skip(f"C++ kernels: {cpp.available()}")
    row = f"cpp/{op}"
    caches = tuple(torch.zeros(2, 4, 2, 16).to(E4M3) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"dtype|fp32|float"):
        load_target(row)(*_call(op, caches))  # type: ignore[arg-type]

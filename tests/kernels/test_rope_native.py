"""`native/rope`: what the conformance suite does not say."""

from __future__ import annotations

import math

import pytest
import torch

from rapid_llm.kernels.ops.rope.rope import rope
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def table(positions: int, rotary: int, device: str) -> torch.Tensor:
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * torch.logspace(
        0, -4, rotary // 2, dtype=torch.float64
    )
    return torch.cat((angle.cos(), angle.sin()), -1).float().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_projection(device: str, tokens: int, interleaved: bool) -> None:
    """Catches: query and key rotated jointly where they lie side by side differing from apart, or touching value."""
    heads = torch.randn(tokens, 9 + 3 + 3, 64, device=device)
    query, key, value = heads.split((9, 3, 3), 1)
    apart = query.clone(), key.clone()
    untouched = value.clone()
    positions = torch.tensor([7, 0, 3, 9][:tokens], device=device)
    cache = table(10, 64, device)
    rope(query, key, positions, cache, interleaved=interleaved)
    rope(*apart, positions.int(), cache, interleaved=interleaved)
    assert torch.equal(query, apart[0])
    assert torch.equal(key, apart[1])
    assert torch.equal(value, untouched)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("order", ["key first", "a gap", "tokens inside heads"])
def test_views_that_only_look_fused(device: str, tokens: int, order: str) -> None:
    """Catches: query and key of one buffer taken for neighbours when they are not."""
    buffer = torch.randn(16, 16, 8, device=device)
    if order == "key first":
        query, key = buffer[:tokens, 3:9], buffer[:tokens, :3]
    elif order == "a gap":
        query, key = buffer[:tokens, :6], buffer[:tokens, 7:9]
    else:  # heads are the outer dimension: key's follow query's, but a token's own heads lie far apart
        query, key = buffer[:6, :tokens].transpose(0, 1), buffer[6:9, :tokens].transpose(0, 1)
    apart = query.clone(), key.clone()
    rest = buffer.clone()
    positions = torch.tensor([2, 0, 3][:tokens], device=device)
    rope(query, key, positions, table(4, 8, device))
    rope(*apart, positions, table(4, 8, device))
    assert torch.equal(query, apart[0])
    assert torch.equal(key, apart[1])
    assert int((buffer != rest).sum()) <= query.numel() + key.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_is_a_rotation_by_the_position(device: str, interleaved: bool) -> None:
    """Catches: sine and cosine swapped, a wrong sign, the wrong pairs. e^(i a) times e^(i b) is e^(i (a + b))."""
    pair = 5
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 16)
    start, angle = 0.4, 3 * math.pow(10, -4 * pair / 15)
    query = torch.zeros(1, 1, 40, device=device)
    query[..., first], query[..., second] = math.cos(start), math.sin(start)
    query[..., 32:] = 5.0
    rope(query, query.clone(), torch.tensor([3], device=device), table(4, 32, device), interleaved=interleaved)
    assert float(query[0, 0, first]) == pytest.approx(math.cos(start + angle), abs=1e-6)
    assert float(query[0, 0, second]) == pytest.approx(math.sin(start + angle), abs=1e-6)
    assert bool((query[..., 32:] == 5.0).all())
    assert int((query[..., :32] != 0).sum()) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [-1, 4])
@pytest.mark.parametrize("tokens", [1, 2])
def test_position_outside(device: str, position: int, tokens: int) -> None:
    """Catches: a read beyond the table. The CPU raises; a GPU kernel cannot, and marks the token with NaN."""
    query, key = torch.ones(tokens, 2, 8, device=device), torch.ones(tokens, 1, 8, device=device)
    positions = torch.tensor([position, 1][:tokens], device=device)
    if device == "cpu" and not INTERPRETED:
        with pytest.raises(IndexError):
            rope(query, key, positions, table(4, 8, device))
        return
    rope(query, key, positions, table(4, 8, device))
    assert bool(query[0].isnan().all())
    assert bool(query[1:].isfinite().all())


def test_token_strides_that_differ() -> None:
    """Catches: only the first token's key following its query, and the others rotated where they are not."""
    buffer = torch.randn(400)
    query, key = buffer.as_strided((3, 2, 8), (40, 8, 1), 0), buffer.as_strided((3, 1, 8), (80, 8, 1), 16)
    with pytest.raises(RuntimeError, match=r"rope: query overlaps key"):  # it does not, but that takes a search to see
        rope(query, key, torch.tensor([1, 2, 3]), table(4, 8, "cpu"))


def test_refusals() -> None:
    """Catches: shapes that broadcast, a table in another precision, overlapping arguments."""
    query, key, cache, positions = (
        torch.ones(2, 4, 8),
        torch.ones(2, 2, 8),
        torch.ones(9, 8),
        torch.zeros(2, dtype=torch.int64),
    )
    with pytest.raises(RuntimeError, match=r"rope.*head_dim"):
        rope(query, torch.ones(2, 2, 4), positions, cache)
    with pytest.raises(RuntimeError, match=r"rope.*positions.*\(2,\)"):
        rope(query, key, positions[:1], cache)
    with pytest.raises(RuntimeError, match=r"rope.*float32"):
        rope(query, key, positions, cache.half())
    with pytest.raises(RuntimeError, match=r"rope.*rotary_dim"):
        rope(query, key, positions, torch.ones(9, 10))
    with pytest.raises(RuntimeError, match=r"rope.*overlaps key"):
        rope(query, query[:, 1:], positions, cache)
    with pytest.raises(RuntimeError, match=r"rope.*share memory"):
        rope(query[:, :1].expand(2, 4, 8), key, positions, cache)

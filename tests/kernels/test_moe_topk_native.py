"""`native/moe.topk`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.moe.topk import moe_topk
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_ties_go_to_the_lower_id(device: str, renormalize: bool) -> None:
    """Catches: an unstable sort, zeros of two signs told apart, an expert chosen twice where -inf must be taken."""
    inf = float("inf")
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [-0.0, 0.0, -1.0, 0.0], [-inf, -inf, 3.0, -inf]], device=device)
    weights, ids = moe_topk(logits, 3, renormalize)
    assert ids.tolist() == [[1, 2, 0], [0, 1, 3], [2, 0, 1]]
    assert ids.dtype == torch.int32
    e = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64).exp()
    total = e.sum() if renormalize else e.sum() + torch.tensor(1.0).double().exp()
    torch.testing.assert_close(weights[0].double().cpu(), e / total, rtol=1e-6, atol=0)
    assert weights[2].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_nan_has_valid_ids(device: str) -> None:
    """Catches: an id outside the experts, which the experts' kernel would follow, or a neighbour made NaN."""
    logits = torch.randn(3, 7, device=device)
    logits[1] = float("nan")
    weights, ids = moe_topk(logits, 2)
    assert ids[1].tolist() == [0, 1]
    assert weights.isnan().any(1).tolist() == [False, True, False]


def test_refusals() -> None:
    """Catches: more experts asked for than there are, integers, a batch of sequences."""
    with pytest.raises(RuntimeError, match=r"moe\.topk: k is 5; choose between 1 and the 4 experts"):
        moe_topk(torch.ones(2, 4), 5)
    with pytest.raises(RuntimeError, match=r"moe\.topk: k is 0"):
        moe_topk(torch.ones(2, 4), 0)
    with pytest.raises(RuntimeError, match=r"moe\.topk: logits must be \(tokens, experts\)"):
        moe_topk(torch.ones(2, 3, 4), 1)
    with pytest.raises(RuntimeError, match=r"moe\.topk: logits.*int64"):
        moe_topk(torch.ones(2, 4, dtype=torch.int64), 1)

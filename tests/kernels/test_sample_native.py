"""`native/sample`: what the conformance suite does not say."""

from __future__ import annotations

import pytest
import torch

from rapid_llm.kernels.ops.sampling import _search
from rapid_llm.kernels.ops.sampling import sample as module
from rapid_llm.kernels.ops.sampling.sample import sample
from rapid_llm.kernels.ops.triton_support import INTERPRETED
from rapid_llm.verify.oracles import sample as acceptable
from tests.kernels.devices import DEVICES

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

NAMES = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")

VOCAB = 700 if INTERPRETED else 5000
"""Several chunks and a ragged last one; in the interpreter a row of 5000 takes half a second."""


def draw(
    logits: torch.Tensor,
    uniform: torch.Tensor | float,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(ids, the arguments) with the same parameters in every row."""
    rows, device = logits.shape[0], logits.device

    def row(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    if not isinstance(uniform, torch.Tensor):
        uniform = row(uniform)
    args = (logits, row(temperature), row(top_k, torch.int32), row(top_p), row(min_p), uniform)
    return sample(*args), args


def check(ids: torch.Tensor, args: tuple[torch.Tensor, ...]) -> None:
    allowed, invalid = acceptable(**dict(zip(NAMES, (a.cpu() for a in args), strict=True)))
    ids = ids.cpu()
    assert bool((ids[invalid] == -1).all()), ids
    good = allowed[torch.arange(len(ids)), ids.clamp(min=0)] & (ids >= 0)
    assert bool((good | invalid).all()), (ids, torch.nonzero(~(good | invalid)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0, 8.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 7},
        {"top_k": 300},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
    ],
)
def test_several_chunks(device: str, spread: float, filters: dict[str, float]) -> None:
    """Catches: a floor that cuts off what the filters keep, a wrong threshold, an order lost between chunks."""
    g = torch.Generator().manual_seed(3)
    rows = 2 if INTERPRETED else 8
    logits = (torch.randn(rows, VOCAB, generator=g) * spread).to(device)
    check(*draw(logits, torch.rand(rows, generator=g).to(device), **filters))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [{"top_k": 400}, {"top_p": 0.97}, {"min_p": 1e-3}])
def test_more_candidates_than_the_workspace(
    device: str, filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: candidates lost where they exceed the workspace, instead of a search over the whole row."""
    monkeypatch.setattr(_search, "candidate_capacity", lambda vocab: 64)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(device)
    check(*draw(logits, torch.tensor([0.1, 0.95], device=device), **filters))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filters", [{"top_k": 650}, {"top_p": 0.99, "temperature": 3.0}, {"min_p": 1e-4}])
def test_several_blocks_of_candidates(device: str, filters: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a running sum, count or order lost between the blocks of one program."""
    monkeypatch.setattr(_search, "resolve_tiles", lambda op, device, vocab: {"BLOCK": 256, "num_warps": 2})
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(6)).to(device)
    check(*draw(logits, torch.tensor([0.2, 0.6, 0.97], device=device), **filters))


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_lowest_of_equal_maxima(device: str) -> None:
    """Catches: a later maximum, also one in another chunk; -0.0 and 0.0 told apart; a padded tail winning."""
    logits = torch.full((3, VOCAB), -1.0, device=device)
    logits[0, 600], logits[0, 299], logits[0, 300] = 2.0, 2.0, 2.0
    logits[1, 5], logits[1, 650] = -0.0, 0.0
    logits[2] = -3e38
    for dtype in (torch.float32, torch.float16):
        ids, _ = draw(logits.to(dtype).clamp(min=-6e4), 0.5, temperature=0.0)
        assert ids.tolist() == [299, 5, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_follow_the_probabilities(device: str) -> None:
    """Catches: a draw that is off by one, skewed by a filter, or in another order than the vocabulary's."""
    steps = 8 if INTERPRETED else 400
    weights = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    logits = weights.log().to(device).expand(steps, 5)
    uniform = ((torch.arange(steps) + 0.5) / steps).to(device)
    ids, _ = draw(logits, uniform)
    assert bool((ids[1:] >= ids[:-1]).all())
    counts = torch.bincount(ids.cpu(), minlength=5) / steps
    torch.testing.assert_close(counts, weights, rtol=0, atol=1e-6)
    ids, _ = draw(logits, uniform, top_k=2)
    counts = torch.bincount(ids.cpu(), minlength=5) / steps
    torch.testing.assert_close(counts, torch.tensor([2 / 3, 0, 1 / 3, 0, 0]), rtol=0, atol=1 / steps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures(device: str, temperature: float) -> None:
    """Catches: logits / temperature that overflows to NaN, where the quotient's differences do not."""
    logits = torch.tensor([[3.0, 80.0, 80.0, -70.0]], device=device)
    ids = [int(draw(logits, u, temperature=temperature)[0]) for u in (0.0, 0.3, 0.6, 0.99)]
    assert ids == ([1, 1, 2, 2] if temperature < 1 else [0, 1, 2, 3])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_independent(device: str) -> None:
    """Catches: greedy and random rows in one batch, unusable rows, or another row's parameters reaching a row."""
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 300, generator=g).to(device)
    logits[1, 17], logits[3] = float("nan"), -float("inf")
    args = [
        logits,
        torch.tensor([0.0, 1.0, 0.8, 1.0, 0.0, 2.0], device=device),
        torch.tensor([-1, 0, 10**6, 5, 3, 2], dtype=torch.int32, device=device),
        torch.tensor([1.0, 0.5, 0.0, 1.0, 0.1, 0.9], device=device),
        torch.tensor([0.0, 0.1, 0.0, 0.0, 1.0, 0.3], device=device),
        torch.rand(6, generator=g).to(device),
    ]
    together = sample(*args)
    alone = [int(sample(*(a[i : i + 1] for a in args))) for i in range(6)]
    assert together.tolist() == alone
    assert together[[1, 3]].tolist() == [-1, -1]
    assert int(together[2]) == int(logits[2].argmax())
    check(together, tuple(args))


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str) -> None:
    """Catches: a launch over nothing, and a row without a token given one."""
    none = torch.zeros(2, 0, device=device)
    assert draw(none, 0.5)[0].tolist() == [-1, -1]
    assert draw(none[:0], 0.5)[0].shape == (0,)


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_without_triton(spread: float) -> None:
    """Catches: the path of a GPU without Triton choosing ids that no precision allows."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(40, 200, generator=g) * spread
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), -float("inf")
    choices = (
        [0.0, 0.7, 1.0, 3.0, 1.0],
        [0, 3, 500],
        [1.0, 0.9, 0.0, 0.5],
        [0.0, 0.2, 0.0],
        [0.0, 0.99, 0.4, 0.7, 0.1, 0.6, 0.2],
    )
    parameters = [torch.tensor(c)[torch.arange(40) % len(c)] for c in choices]
    parameters[1] = parameters[1].int()
    args = (logits, *parameters)
    check(module._sample_on_device(*args, torch.empty(40, dtype=torch.int64)), args)


def test_refusals() -> None:
    """Catches: parameters that broadcast, or bits read as another type."""
    logits, row = torch.zeros(2, 5), torch.zeros(2)
    with pytest.raises(RuntimeError, match=r"sample: logits must be \(rows, vocab\)"):
        sample(logits[0], row, row.int(), row, row, row)
    with pytest.raises(RuntimeError, match=r"sample: min_p must be \(2,\)"):
        sample(logits, row, row.int(), row, row[:1], row)
    with pytest.raises(RuntimeError, match=r"sample: top_k has dtype torch.float32; use int32"):
        sample(logits, row, row, row, row, row)
    with pytest.raises(RuntimeError, match=r"sample: uniform has dtype torch.float64; use float32"):
        sample(logits, row, row.int(), row, row, row.double())
    with pytest.raises(RuntimeError, match=r"sample: out.*same shape"):
        sample(logits, row, row.int(), row, row, row, torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
def test_graph_follows_its_arguments() -> None:
    """Catches: a parameter read on the host while the graph is captured and frozen into it."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 40000, generator=g).cuda()
    _, args = draw(logits, 0.5, temperature=0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sample(*args)
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 0.9), (1.0, 0, 0.99)):
        args[1].fill_(temperature)
        args[2].fill_(top_k)
        args[3].fill_(top_p)
        args[5].copy_(torch.rand(4, generator=g))
        graph.replay()
        check(ids, args)

"""`jit/linear` and `jit/linear.settled`: what the conformance suite does not say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import dispatch, jit, registry
from rapid_llm.kernels.ops.gemm import linear_jit

FUNCTIONS = {"jit/linear": linear_jit.linear, "jit/linear.settled": linear_jit.linear_settled}
DTYPES = [pytest.param(torch.float16, id="fp16"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(scope="module")
def built() -> None:
    """Builds once, so that a broken toolchain fails first and with its log; skips where the path is absent."""
    if not (probe := jit.why_not()).ok:
        pytest.skip(f"jit: {probe.text}")
    jit.load_jit("linear", "gemm/linear_gemv.cu")


@pytest.fixture(params=FUNCTIONS)
def linear(request: pytest.FixtureRequest, built: None) -> Callable[..., Tensor]:
    return FUNCTIONS[request.param]


def _draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers, which nothing is writing any more when they are returned."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return linear_jit.settle(drawn.to("cuda", dtype), "unquantized")


def _assert_close(result: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within fp32 sums and one rounding of the product in float64."""
    features = input.shape[-1]
    exact = input.double() @ weight.double().t()
    total = input.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, total = exact + bias.double(), total + bias.double().abs()
    bound = exact.abs() * torch.finfo(result.dtype).eps + total * (features + 1) * 2.0**-23 + 1e-7
    assert ((result.double() - exact).abs() <= bound).all()


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_refuses_cpu_tensors() -> None:
    """Catches: host memory handed to a kernel, or a compile started for it."""
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    for function in FUNCTIONS.values():
        with pytest.raises(RuntimeError, match=r"linear.*CUDA"):
            function(x, x)


def test_takes_up_to_eight_tokens() -> None:
    """Catches: a row offered for a shape, dtype or scheme that its launcher refuses."""
    for name in FUNCTIONS:
        row = registry.get_row(name)
        assert [str(dim) for dim in row.shape.require] == ["tokens <= 8", "in_features <= 1073741823"]
        assert (row.dtypes, row.schemes) == (("bf16", "fp16"), ("unquantized",))
    assert registry.get_row("jit/linear").prepack is None
    assert registry.get_row("jit/linear.settled").prepack is not None  # never for a weight that may be in the making


def test_settled_weights_are_not_copied() -> None:
    """Catches: a second copy of every weight of a model."""
    weight = torch.zeros(4, 8)
    assert linear_jit.settle(weight, "unquantized") is weight


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [0, 1, 7, 8, 64, 576, 1544, 4096, 4097])
@pytest.mark.parametrize("outputs", [1, 33, 264, 2500])
def test_values(linear: Callable[..., Tensor], dtype: torch.dtype, features: int, outputs: int) -> None:
    """Catches: a dropped tail of features or outputs, a chunk lost by a warp, another warp's sums."""
    weight, bias = _draw(outputs, features, dtype=dtype), _draw(outputs, dtype=dtype, seed=2)
    for rows in (1, 2, 3, 8):
        x = _draw(rows, features, dtype=dtype, seed=rows)
        out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=dtype)
        assert linear(x, weight, bias, out) is out
        _assert_close(out, x, weight, bias)
        _assert_close(linear(x, weight), x, weight)


@pytest.mark.gpu
def test_large_layers(linear: Callable[..., Tensor]) -> None:
    """Catches: a plan for big weights that leaves outputs out; the shapes of an 8B model's layers."""
    for outputs, features in ((6144, 4096), (4096, 14336), (28672, 4096), (2048, 2048), (49152, 576)):
        weight, x = _draw(outputs, features), _draw(3, features, seed=1)
        _assert_close(linear(x, weight), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [576, 577])
@pytest.mark.parametrize("outputs", [40, 4100])
def test_rows_do_not_depend_on_each_other(linear: Callable[..., Tensor], outputs: int, features: int) -> None:
    """Catches: an order of summation, or a plan, that depends on how many rows from two up there are."""
    weight, x = _draw(outputs, features), _draw(8, features, seed=1)
    together = linear(x, weight)
    for row in range(7):
        assert torch.equal(linear(x[row : row + 2], weight), together[row : row + 2])
    assert torch.equal(linear(x[3:6], weight), together[3:6])


@pytest.mark.gpu
def test_strides(linear: Callable[..., Tensor]) -> None:
    """Catches: strides of input, weight, bias or out ignored; a write outside of out's own elements."""
    weight, x = _draw(65, 128)[:, 8:72], _draw(2, 9, 96)[:, ::3, 16:80]
    bias = _draw(130)[::2]
    memory = torch.full((2, 3, 65, 2), torch.nan, device="cuda", dtype=torch.bfloat16)
    out = memory[..., 0]
    assert linear(x, weight, bias, out) is out
    _assert_close(out.reshape(6, 65), x.reshape(6, 64), weight, bias)
    assert memory[..., 1].isnan().all()
    _assert_close(linear(x[0, 0], weight).view(1, -1), x[0, :1], weight)
    _assert_close(linear(x[:, 0, 1:], weight[:, 1:]), x[:, 0, 1:], weight[:, 1:])  # rows that are not aligned


@pytest.mark.gpu
def test_reads_what_the_kernel_before_it_wrote(linear: Callable[..., Tensor]) -> None:
    """Catches: an input read, or out written, before the previous kernel has finished with it."""
    weight = _draw(2048, 2048, scale=1 / 45)
    x = _draw(4, 2048, seed=1)
    expected = [x]
    for _ in range(12):
        expected.append(linear(expected[-1], weight))
        torch.cuda.synchronize()
    for _ in range(20):
        a, b = x.clone(), torch.empty_like(x)  # two buffers, each written while the call before may still read it
        for step in range(12):
            a, b = linear(a, weight, None, b), a
            if step % 5 == 4:
                a = a.clone()
        assert torch.equal(a, expected[-1])


@pytest.mark.gpu
def test_reads_weights_just_written(built: None) -> None:
    """Catches: weights read ahead by the row that takes any weight."""
    x, source = _draw(1, 4096, seed=1), _draw(4096, 4096)
    expected, weight = linear_jit.linear(x, source), torch.empty_like(source)
    for _ in range(20):
        weight.fill_(torch.nan)
        weight.copy_(source)
        first = linear_jit.linear(x, weight)
        weight.zero_()
        second = linear_jit.linear(x, weight)
        assert torch.equal(first, expected)
        assert not second.any()


@pytest.mark.gpu
def test_captured_and_replayed(linear: Callable[..., Tensor]) -> None:
    """Catches: host work per call, a stream of its own, results that remember the captured values."""
    weight, x = _draw(512, 512), _draw(2, 512)
    linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, weight), weight)
    for seed in (3, 4):
        x.copy_(_draw(2, 512, seed=seed))
        graph.replay()
        assert torch.equal(y, linear(linear(x, weight), weight))


@pytest.mark.gpu
def test_side_stream(linear: Callable[..., Tensor]) -> None:
    """Catches: a launch on the default stream."""
    weight, x = _draw(512, 512), torch.zeros(1, 512, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.fill_(1.0)
        y = linear(x, weight)
    side.synchronize()
    _assert_close(y, torch.ones_like(x), weight)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(linear: Callable[..., Tensor]) -> None:
    """Catches: a launch on the current device instead of the tensors'."""
    weight, x = _draw(64, 64).to("cuda:1"), _draw(1, 64).to("cuda:1")
    _assert_close(linear(x, weight), x, weight)
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"linear.*weight.*CUDA device"):
        linear(x, weight.to("cuda:0"))


@pytest.mark.gpu
def test_refusals(linear: Callable[..., Tensor]) -> None:
    """Catches: shapes, dtypes or overlaps that would read or write stray memory."""
    x, weight = _draw(2, 64), _draw(5, 64)
    with pytest.raises(RuntimeError, match=r"linear.*up to 8 rows"):
        linear(_draw(9, 64), weight)
    with pytest.raises(RuntimeError, match=r"linear.*float32"):
        linear(x.float(), weight.float())
    with pytest.raises(RuntimeError, match=r"linear.*weight.*dtype"):
        linear(x, weight.half())
    with pytest.raises(RuntimeError, match=r"linear.*same shape"):
        linear(x, weight[:, :32])
    with pytest.raises(RuntimeError, match=r"linear.*bias.*same shape"):
        linear(x, weight, weight[0])
    with pytest.raises(RuntimeError, match=r"linear.*out.*same shape"):
        linear(x, weight, None, _draw(3, 5))
    with pytest.raises(RuntimeError, match=r"linear.*out overlaps input"):
        linear(x, weight, None, x.view(-1)[:10].view(2, 5))
    with pytest.raises(RuntimeError, match=r"linear.*share memory"):
        linear(x, weight, None, _draw(1, 5).expand(2, 5))
    with pytest.raises(RuntimeError, match=r"linear.*contiguous in its last dimension"):
        linear(_draw(64, 2).t(), weight)
    with pytest.raises(RuntimeError, match=r"linear.*CUDA"):
        linear(x, weight.cpu())


@pytest.mark.gpu
def test_bound_by_name(built: None) -> None:
    """Catches: a row that cannot be reached by name, or whose prepack is not run."""
    x, weight = _draw(1, 64), _draw(8, 64)
    plain = dispatch("linear", x, weight, backend="jit/linear")
    assert plain.spec.name == "jit/linear"
    settled = dispatch("linear", x, weight, backend="jit/linear.settled", prepack=True)
    assert torch.equal(settled(x, settled.prepack(weight)), plain(x, weight))

"""The extension's two doors on a GPU: torch's op and the module's function reach one launcher; opcheck; compiled calls.

Values, graphs, streams and devices are tested of the rows themselves; compiled, a row goes through torch's op.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapid_llm.kernels import aot, registry
from rapid_llm.kernels.registry import KernelSpec
from tests.kernels.gpu_rows import Call, need, parameters

pytestmark = pytest.mark.gpu

OPS = ("fused_add_rmsnorm", "linear", "rmsnorm", "rope", "rope_kvcache_write", "scale", "silu_and_mul")


@pytest.fixture(scope="module")
def extension() -> Any:
    """Skips with the probe's reason where the extension cannot run."""
    found = aot.why_not()
    if not found.ok:
        pytest.skip(f"aot: {found.text}")
    return aot.load()


def arguments(op: str) -> tuple[Any, ...]:
    """One call in bf16, by position as the launcher takes them."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", torch.bfloat16)

    table, slots = torch.randn(64, 32, device="cuda"), torch.tensor([3, 17, -1], device="cuda")
    positions = torch.tensor([1, 5, 9], device="cuda")
    heads = (draw(3, 4, 32), draw(3, 2, 32))
    return {
        "fused_add_rmsnorm": (draw(5, 64), draw(5, 64) * 2, draw(64), 1e-6),
        "linear": (draw(2, 24), draw(2, 64), draw(24, 64), draw(24), False),
        "rmsnorm": (draw(5, 64) * 0, draw(5, 64), draw(64), 1e-6),
        "rope": (*heads, positions, table, False),
        "rope_kvcache_write": (
            *heads,
            draw(3, 2, 32) + 1,
            torch.zeros(2, 16, 2, 32, device="cuda", dtype=torch.bfloat16),
            torch.zeros(2, 16, 2, 32, device="cuda", dtype=torch.bfloat16),
            positions,
            table,
            slots,
            True,
        ),
        "scale": (draw(100) * 0, draw(100), 0.3),
        "silu_and_mul": (draw(5, 32) * 0, draw(5, 64)),
    }[op]


@pytest.mark.parametrize("op", OPS)
def test_both_doors_give_the_same_bits(extension: Any, op: str) -> None:
    """Catches: a schema whose arguments are in another order, a view that misses strides, dtype or device."""
    torch.manual_seed(0)
    one = arguments(op)
    torch.manual_seed(0)
    two = arguments(op)
    before = [value.clone() if isinstance(value, Tensor) else value for value in one]
    assert getattr(extension, op)(*one) is None
    assert getattr(torch.ops.rapid_llm, op).default(*two) is None
    changed = False
    for a, b, old in zip(one, two, before, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            changed |= not torch.equal(a, old)
    assert changed


@pytest.mark.parametrize("op", OPS)
def test_opcheck(extension: Any, op: str) -> None:
    """Catches: [A6] an argument that is written to unmarked, a fake kernel that disagrees, a broken compiled call."""
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.rapid_llm, op).default, arguments(op), test_utils=tests)


@pytest.mark.parametrize("row", parameters("aot"))
def test_rows_compile_without_a_graph_break(extension: Any, row: KernelSpec) -> None:
    """Catches: [A6] the module's function called while torch traces: no graph could hold it."""
    function = need(row)
    call = Call.of(row, "bf16")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        call.check(call.run(compiled))


def test_errors_are_the_launchers_by_both_doors(extension: Any) -> None:
    """Catches: a door that checks less, or whose error is not the RuntimeError that names the op."""
    x = torch.ones(4, 6, device="cuda")
    for function in (extension.scale, torch.ops.rapid_llm.scale.default):
        with pytest.raises(RuntimeError, match=r"scale: out must have the same shape"):
            function(torch.empty(4, 1, device="cuda"), x, 2.0)
        with pytest.raises(RuntimeError, match=r"scale: out must be a CUDA tensor"):
            function(torch.empty(4, 6), x, 2.0)


def test_a_lazily_negated_tensor(extension: Any) -> None:
    """Catches: the bits of the base taken for the values: torch resolves them for its op, the module refuses them."""
    x, out = torch._neg_view(torch.ones(4, device="cuda")), torch.empty(4, device="cuda")
    torch.ops.rapid_llm.scale.default(out, x, 2.0)
    assert out.tolist() == [-2.0] * 4
    with pytest.raises(RuntimeError, match="lazy negation"):
        extension.scale(out, x, 2.0)


def test_the_rows_are_forced_by_name(extension: Any) -> None:
    """Catches: a row that cannot be named, though its probe says yes."""
    from rapid_llm.kernels import dispatch

    x = torch.ones(4, 6, device="cuda")
    handle = dispatch("scale", x, 2.0, backend="aot/scale")
    assert handle.spec.name == registry.get_row("aot/scale").name
    assert torch.equal(handle(x, 2.0), x * 2)

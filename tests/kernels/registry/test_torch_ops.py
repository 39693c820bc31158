"""Each op as a torch op: it resolves, its fake is right, opcheck passes, torch.compile keeps one graph (P67, P69)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rapid_llm.kernels as kernels
from rapid_llm.kernels import torch_ops
from rapid_llm.kernels.registry import KernelError, get_op, ops, probes, registry
from rapid_llm.kernels.registry.dispatcher import load_target
from rapid_llm.kernels.torch_ops import NAMESPACE, define_all

IDS = [op.id for op in ops()]


def paged() -> dict[str, Any]:
    """Two sequences of 5 and 17 keys in a cache of four pages of 16, with two query heads on one kv head."""
    k_cache, v_cache = torch.randn(2, 5, 16, 1, 8)
    table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "seq_lens": torch.tensor([5, 17], dtype=torch.int32),
        "block_table": table,
    }


def arguments(op_id: str) -> dict[str, Any]:
    """One small valid call of each op, shapes that no constant in a fake kernel could guess."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 64), torch.randn(64)
    half = torch.tensor([0.5, 0.5])
    return {
        "scale": lambda: {"input": x, "factor": 0.3},
        "silu_and_mul": lambda: {"input": x},
        "gelu_and_mul": lambda: {"input": x},
        "moe.topk": lambda: {"logits": torch.randn(5, 12), "k": 3},
        "fused_moe": lambda: {
            "input": torch.randn(3, 8),
            "gate_up": torch.randn(4, 12, 8),
            "down": torch.randn(4, 8, 6),
            "topk_weights": torch.rand(3, 2),
            "topk_ids": torch.tensor([[0, 2], [3, 1], [2, 0]], dtype=torch.int32),
        },
        "rmsnorm": lambda: {"input": x, "weight": w},
        "fused_add_rmsnorm": lambda: {"input": x, "residual": torch.randn(3, 64), "weight": w},
        "rope": lambda: {
            "query": torch.randn(3, 2, 8),
            "key": torch.randn(3, 1, 8),
            "positions": torch.tensor([0, 4, 2]),
            "cos_sin_cache": torch.randn(9, 8),
        },
        "embedding": lambda: {"input": torch.tensor([[1, 0, 2]]), "weight": torch.randn(5, 7)},
        "linear": lambda: {"input": x, "weight": torch.randn(10, 64), "bias": torch.randn(10)},
        "linear_add": lambda: {"input": x, "weight": torch.randn(10, 64), "residual": torch.randn(3, 10)},
        "rmsnorm_linear": lambda: {
            "input": x,
            "norm_weight": w,
            "weight": torch.randn(10, 64),
            "bias": torch.randn(10),
        },
        "rmsnorm_linear_silu_and_mul": lambda: {"input": x, "norm_weight": w, "weight": torch.randn(10, 64)},
        "kvcache.write": lambda: {
            "key": torch.randn(3, 1, 8),
            "value": torch.randn(3, 1, 8),
            "k_cache": torch.zeros(4, 16, 1, 8),
            "v_cache": torch.zeros(4, 16, 1, 8),
            "slot_mapping": torch.tensor([17, -1, 40]),
        },
        "rope_kvcache_write": lambda: {
            **arguments("rope"),
            **{name: x for name, x in arguments("kvcache.write").items() if name != "key"},
        },
        "attention.prefill": lambda: {
            "query": torch.randn(7, 2, 8),
            "cu_seqlens_q": torch.tensor([0, 5, 7], dtype=torch.int32),
            "scale": 0.35,
            **paged(),
        },
        "attention.mla_decode": lambda: {
            "query": torch.randn(2, 3, 8),
            "kv_cache": torch.randn(5, 16, 1, 8),
            "scale": 0.35,
            "value_dim": 6,
            **{k: v for k, v in paged().items() if k in ("seq_lens", "block_table")},
        },
        "comm.dispatch": lambda: {
            "input": x,
            "topk_ids": torch.tensor([[1, 3], [-1, -1], [0, -1]]),
            "topk_weights": torch.rand(3, 2),
            "recv": torch.randn(5, 64),
            "recv_ids": torch.zeros(5, 2, dtype=torch.int64),
            "recv_weights": torch.zeros(5, 2),
            "recv_source": torch.zeros(5, 2, dtype=torch.int32),
            "num_experts": 4,
        },
        "comm.combine": lambda: {
            "input": x,
            "recv_source": torch.tensor([[0, 4], [-1, -1], [0, 1]], dtype=torch.int32),
            "tokens": 7,
        },
        "attention.decode": lambda: {"query": torch.randn(2, 2, 8), "scale": 0.35, **paged()},
        "sample": lambda: {
            "logits": torch.randn(2, 11),
            "temperature": half,
            "top_k": torch.tensor([0, 3], dtype=torch.int32),
            "top_p": half,
            "min_p": torch.zeros(2),
            "uniform": half,
        },
    }[op_id]()


def overload(op_id: str, suffix: str = "") -> Any:
    define_all()
    return getattr(getattr(torch.ops, NAMESPACE), get_op(op_id).function + suffix).default


@pytest.mark.parametrize("op_id", IDS)
def test_every_op_resolves_and_equals_its_public_function(op_id: str) -> None:
    values = arguments(op_id)
    public = getattr(kernels, get_op(op_id).function)
    if get_op(op_id).parsed.mutated:
        mine = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        public(**mine)
        got = overload(op_id)(**values)
        several = (got,) if isinstance(got, torch.Tensor) else got
        for name, result in zip(get_op(op_id).parsed.mutated, several, strict=True):
            torch.testing.assert_close(result, mine[name], rtol=0, atol=0)
        return
    expected = public(**values)
    torch.testing.assert_close(overload(op_id)(**values), expected, rtol=0, atol=0)
    if get_op(op_id).outs:
        return
    out = torch.full_like(expected, 3)
    assert overload(op_id, "_out")(**values, out=out) is None
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("op_id", IDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_opcheck(op_id: str) -> None:
    """torch's own checks of schema, fake kernel and functionalisation, dynamic shapes included."""
    in_place = bool(get_op(op_id).parsed.mutated)
    values = arguments(op_id)
    torch.library.opcheck(overload(op_id), (), values)
    if in_place:
        torch.library.opcheck(overload(op_id, "_"), (), arguments(op_id))
    elif not get_op(op_id).outs:
        out = torch.empty_like(overload(op_id)(**values))
        torch.library.opcheck(overload(op_id, "_out"), (), {**values, "out": out})


@pytest.mark.parametrize("op_id", IDS)
def test_a_strided_input_gives_the_layout_that_the_fake_promises(op_id: str) -> None:
    values = {k: spread(v) if isinstance(v, torch.Tensor) else v for k, v in arguments(op_id).items()}
    if get_op(op_id).parsed.mutated:
        return
    with torch._subclasses.FakeTensorMode() as mode:
        fake = overload(op_id)(
            **{k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        )
    real = overload(op_id)(**values)
    several = zip(*(r if isinstance(r, tuple) else (r,) for r in (real, fake)), strict=True)
    for one, other in several:
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after every row."""
    if x.dim() < 2:
        return x
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("op_id", IDS)
def test_torch_compile_keeps_one_graph(op_id: str) -> None:
    public = getattr(kernels, get_op(op_id).function)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    values = arguments(op_id)
    expected = arguments(op_id)
    want = public(**expected)
    torch._dynamo.reset()
    got = torch.compile(public, backend=backend, fullgraph=True)(**values)
    for name in get_op(op_id).parsed.mutated:
        torch.testing.assert_close(values[name], expected[name], rtol=0, atol=0)
    if want is not None:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert any(NAMESPACE in str(node.target) for graph in graphs for node in graph.graph.nodes)


def test_a_selected_handle_compiles_into_the_graph() -> None:
    x = torch.randn(3, 64)
    handle = kernels.dispatch("scale", x, 0.5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: handle(t, 0.5) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * 0.5 + 1, rtol=0, atol=0)


def test_a_second_copy_of_the_package_is_a_typed_error() -> None:
    """P37: torch aborts or raises obscurely where one namespace is defined twice in a process."""
    define_all()
    namespace: dict[str, Any] = {"__name__": "rapid_llm.kernels.second_copy", "__package__": "rapid_llm.kernels"}
    source = Path(torch_ops.__file__).read_text()
    exec(compile(source.replace("registry.on_change(_follow)", ""), "second copy", "exec"), namespace)
    with pytest.raises(KernelError, match="defined already, by another copy"):
        namespace["define_all"]()


@pytest.mark.parametrize("op_id", IDS)
def test_torch_compile_of_a_function_that_calls_the_op(op_id: str) -> None:
    """Catches: globals that Dynamo cannot look up again, which compiling the op alone does not show."""
    public, values, expected = getattr(kernels, get_op(op_id).function), arguments(op_id), arguments(op_id)
    want = public(**expected)
    torch._dynamo.reset()
    got = torch.compile(lambda **kwargs: public(**kwargs), backend="eager", fullgraph=True)(**values)
    for name in get_op(op_id).parsed.mutated:
        torch.testing.assert_close(values[name], expected[name], rtol=0, atol=0)
    if want is not None:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    if want is not None and not get_op(op_id).outs:
        out = torch.empty_like(want)
        torch._dynamo.reset()
        compiled = torch.compile(lambda out, **kwargs: public(**kwargs, out=out), backend="eager", fullgraph=True)
        assert compiled(out, **arguments(op_id)) is out
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("op_id", IDS)
def test_fake_tensors_never_reach_a_row(op_id: str) -> None:
    """Catches: a C++ row reading address 0. The same call runs for real first, so that a decision is there to reuse."""
    public = getattr(kernels, get_op(op_id).function)
    want = public(**arguments(op_id))
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments(op_id).items()}
        got = public(**fakes)
    assert (got is None) == (want is None)
    if want is not None:
        several = zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True)
        assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in several)


@pytest.mark.parametrize("op_id", IDS)
def test_a_tensor_elsewhere_is_refused_after_a_good_call(op_id: str) -> None:
    """Catches: a check made only when a decision is made; each tensor argument in turn lies on another device."""
    op = get_op(op_id)
    public = getattr(kernels, op.function)
    public(**arguments(op_id))
    for arg in op.parsed.tensors[1:]:
        values = arguments(op_id)
        values[arg.name] = values[arg.name].to("meta")
        with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|device"):
            public(**values)


def cpu_rows() -> list[str]:
    """Every row for the CPU that reads its tensors as they are and is there."""
    rows = [r for op in ops() for r in registry.rows(op.id) if r.backend in ("cpp", "torch") and r.prepack is None]
    return [r.name for r in rows if r.dtypes and "fp32" in r.dtypes and set(r.schemes or ()) <= {"unquantized"}]


@pytest.mark.parametrize("name", cpu_rows())
def test_a_bound_row_refuses_a_tensor_that_is_not_there(name: str) -> None:
    """Catches: garbage without an error from a bound handle, whose tensors no dispatch looks at: each tensor in turn is
    on the meta device, of another dtype's memory, or without memory."""
    row = registry.get_row(name)
    if not probes.check(row.available).ok:
        pytest.skip(f"{name} is not available here")
    op, function = get_op(row.op), load_target(name)
    function(**arguments(row.op))
    for arg in op.parsed.tensors:
        if arguments(row.op).get(arg.name) is None:
            continue
        spoilers = [
            lambda t: t.to("meta"),
            *([_without_memory] if row.backend == "cpp" else []),
        ]  # torch's own operators crash
        for spoil in spoilers:
            values = arguments(row.op)
            values[arg.name] = spoil(values[arg.name])
            with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|device|memory|storage"):
                function(**values)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    left = tensor.clone()
    left.untyped_storage().resize_(0)
    return left

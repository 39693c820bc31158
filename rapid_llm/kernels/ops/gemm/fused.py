"""Linear layers with what a decoder does right before or after them: norm, activation, addition to the residual."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

_DTYPES = ("fp32", "fp16", "bf16")
_DIMS = {
    "tokens": "input.numel() // max(input.shape[-1], 1)",
    "in_features": "input.shape[-1]",
    "out_features": "weight.shape[0]",
}
_TRUTH = "rapid_llm.verify.fused"
_CASES = "rapid_llm.verify.cases.fused"

LINEAR_ADD = OpSpec(
    id="linear_add",
    schema="(Tensor input, Tensor weight, Tensor(a!) residual) -> ()",
    group="gemm",
    dims=_DIMS,
    out=None,
    dtypes=_DTYPES,
    oracle=f"{_TRUTH}:linear_add",
    cases=f"{_CASES}:linear_add",
    bound=f"{_TRUTH}:linear_add_bound",
    work=f"{_TRUTH}:linear_add_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""In place: residual += input @ weight.T.

    input: (..., in_features). weight: (out_features, in_features), dense. residual: (..., out_features), overlapping
    neither. All of one dtype. Sums, and the addition to residual, in fp32; rounded once, when residual is written.
    Returns None.
    """,
)

RMSNORM_LINEAR = OpSpec(
    id="rmsnorm_linear",
    schema="(Tensor input, Tensor norm_weight, Tensor weight, Tensor? bias=None, float eps=1e-06) -> Tensor",
    group="gemm",
    dims={**_DIMS, "biased": "0 if bias is None else 1"},
    out=Out(shape="(*input.shape[:-1], weight.shape[0])", dtype="input.dtype"),
    dtypes=_DTYPES,
    oracle=f"{_TRUTH}:rmsnorm_linear",
    cases=f"{_CASES}:rmsnorm_linear",
    bound=f"{_TRUTH}:rmsnorm_linear_bound",
    work=f"{_TRUTH}:rmsnorm_linear_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""rmsnorm(input, norm_weight, eps) @ weight.T + bias.

    input: (..., in_features). norm_weight: (in_features,), in fp32 or input's dtype. weight: (out_features,
    in_features), dense, and bias: (out_features,), in input's dtype. eps: added to the mean square of a row.
    Everything in fp32 but for the normalised row, which may be rounded to input's dtype before the product, as by two
    calls. Returns (..., out_features) in input's dtype, rounded once.
    """,
)

RMSNORM_LINEAR_SILU_AND_MUL = OpSpec(
    id="rmsnorm_linear_silu_and_mul",
    schema="(Tensor input, Tensor norm_weight, Tensor weight, float eps=1e-06) -> Tensor",
    group="gemm",
    dims={**{k: v for k, v in _DIMS.items() if k != "out_features"}, "intermediate": "weight.shape[0] // 2"},
    out=Out(shape="(*input.shape[:-1], weight.shape[0] // 2)", dtype="input.dtype"),
    dtypes=_DTYPES,
    oracle=f"{_TRUTH}:rmsnorm_linear_silu_and_mul",
    cases=f"{_CASES}:rmsnorm_linear_silu_and_mul",
    bound=f"{_TRUTH}:rmsnorm_linear_silu_and_mul_bound",
    work=f"{_TRUTH}:rmsnorm_linear_silu_and_mul_work",
    numerics=Numerics(accumulate="fp32"),
    doc="""silu(gate) * up with gate, up = the halves of rmsnorm(input, norm_weight, eps) @ weight.T.

    input: (..., in_features). norm_weight: (in_features,), in fp32 or input's dtype. weight: (2 * intermediate,
    in_features) in input's dtype, dense, the gate's rows first. eps: added to the mean square of a row.
    Everything in fp32 but for the normalised row, gate and up, which may be rounded to input's dtype on the way (and
    overflow there), as by three calls. Returns (..., intermediate) in input's dtype, rounded once.
    """,
)

register(
    LINEAR_ADD,
    RMSNORM_LINEAR,
    RMSNORM_LINEAR_SILU_AND_MUL,
    *(
        KernelSpec(
            name=f"native/{op}",
            op=op,
            backend="native",
            target=f"rapid_llm.kernels.ops.gemm.{module}:{op}",
            dtypes=_DTYPES,
            priority=0,
        )
        for op, module in (
            ("linear_add", "fused_residual"),
            ("rmsnorm_linear", "fused_norm"),
            ("rmsnorm_linear_silu_and_mul", "fused_norm"),
        )
    ),
)


def _jit(op: str, shape: tuple[Dim, ...], layout: tuple[str, ...]) -> KernelSpec:
    """A row for one token that reads the first weights while the previous kernel still runs, so that it takes only
    weights that nothing writes any more. Nothing on its way is rounded."""
    module = f"rapid_llm.kernels.ops.gemm.fused_{op}_jit"
    return KernelSpec(
        name=f"jit/{op}.settled",
        op=op,
        backend="jit",
        target=f"{module}:{op}",
        available="rapid_llm.kernels.jit:available",
        devices=("cuda",),
        dtypes=("bf16", "fp16"),
        capability=((80, None),),
        shape=Shape(require=(Dim("tokens", max=1), *shape)),
        layout=("input:last_dim_contiguous", "weight:last_dim_contiguous", *layout),
        prepack="rapid_llm.kernels.ops.gemm.linear_jit:settle",
        prepare=f"{module}:prepare",
    )


_WHOLE = Dim("in_features", max=2**30 - 8, multiple_of=8)
_ALIGNED = ("input:aligned16", "weight:aligned16", "norm_weight:aligned16", "norm_weight:last_dim_contiguous")

register(
    _jit("linear_add", (Dim("in_features", max=2**30 - 1),), ()),
    _jit("rmsnorm_linear", (_WHOLE,), _ALIGNED),
    _jit("rmsnorm_linear_silu_and_mul", (_WHOLE,), _ALIGNED),
)

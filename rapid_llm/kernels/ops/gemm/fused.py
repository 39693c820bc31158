"""Linear layers with what a decoder does right before or after them: norm, activation, addition to the residual."""

from rapid_llm.kernels.registry import KernelSpec, Numerics, OpSpec, Out, register

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

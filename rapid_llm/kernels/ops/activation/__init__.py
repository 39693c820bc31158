"""Gated activations of the feed-forward block."""

from rapid_llm.kernels.registry import KernelSpec, OpSpec, Out, register

SILU_AND_MUL = OpSpec(
    id="silu_and_mul",
    schema="(Tensor input) -> Tensor",
    group="activation",
    dims={"tokens": "input.numel() // max(input.shape[-1], 1)", "features": "input.shape[-1] // 2"},
    out=Out(shape="(*input.shape[:-1], input.shape[-1] // 2)", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:silu_and_mul",
    cases="rapid_llm.verify.cases:silu_and_mul",
    bound="rapid_llm.verify.bounds:silu_and_mul",
    work="rapid_llm.verify.work:silu_and_mul",
    doc="""silu(gate) * up with gate, up = input[..., :d], input[..., d:] (SwiGLU, Shazeer 2020).

    input: (..., 2d). Returns (..., d) in input's dtype; computed in fp32 and rounded once.
    silu(z) = z / (1 + exp(-z)).
    """,
)

register(
    SILU_AND_MUL,
    KernelSpec(
        name="native/silu_and_mul",
        op="silu_and_mul",
        backend="native",
        target="rapid_llm.kernels.ops.activation.silu_and_mul:silu_and_mul",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/silu_and_mul",
        op="silu_and_mul",
        backend="cpp",
        target="rapid_llm.kernels.ops.activation.silu_and_mul_cpp:silu_and_mul",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        layout=("contiguous",),
        priority=30,
    ),
)

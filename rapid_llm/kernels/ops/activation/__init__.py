"""Gated activations of the feed-forward block."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

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
    numerics=Numerics(accumulate="fp32", roundings=("subnormal:zero",)),
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
        # check: allow row-tests: the conformance suite runs it on every CPU
        name="cpp/silu_and_mul",
        op="silu_and_mul",
        backend="cpp",
        target="rapid_llm.kernels.ops.activation.silu_and_mul_cpp:silu_and_mul",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        layout=("contiguous",),
        priority=30,
        batch_invariant=True,
    ),
)

register(
    *(
        KernelSpec(
            name=f"flashinfer/silu_and_mul{suffix}",
            op="silu_and_mul",
            backend="flashinfer",
            target="rapid_llm.kernels.backend.flashinfer.silu_and_mul:silu_and_mul",
            available="rapid_llm.kernels.backend.flashinfer:available",
            prepare="rapid_llm.kernels.backend.flashinfer.prepare:prepare",
            devices=("cuda",),
            dtypes=(dtype,),
            capability=((80, None),),
            shape=Shape(require=(Dim("features", min=8, multiple_of=8),)),
            layout=("input:contiguous", "input:aligned16"),
            roundings=roundings,
        )
        for dtype, suffix, roundings in (("bf16", "", ("subnormal:zero",)), ("fp16", ".fp16", ()))
    )
)

register(
    KernelSpec(
        name="jit/silu_and_mul",
        op="silu_and_mul",
        backend="jit",
        target="rapid_llm.kernels.ops.activation.silu_and_mul_jit:silu_and_mul",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.activation.silu_and_mul_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

register(
    KernelSpec(
        name="nvrtc/silu_and_mul",
        op="silu_and_mul",
        backend="nvrtc",
        target="rapid_llm.kernels.ops.activation.silu_and_mul_nvrtc:silu_and_mul",
        available="rapid_llm.kernels.nvrtc:available",
        prepare="rapid_llm.kernels.ops.activation.silu_and_mul_nvrtc:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
    ),
)

register(
    KernelSpec(
        name="aot/silu_and_mul",
        op="silu_and_mul",
        backend="aot",
        target="rapid_llm.kernels.ops.activation.silu_and_mul_aot:silu_and_mul",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

GELU_AND_MUL = OpSpec(
    id="gelu_and_mul",
    schema="(Tensor input) -> Tensor",
    group="activation",
    dims={"tokens": "input.numel() // max(input.shape[-1], 1)", "features": "input.shape[-1] // 2"},
    out=Out(shape="(*input.shape[:-1], input.shape[-1] // 2)", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:gelu_and_mul",
    cases="rapid_llm.verify.cases:gelu_and_mul",
    bound="rapid_llm.verify.bounds:gelu_and_mul",
    work="rapid_llm.verify.work:gelu_and_mul",
    numerics=Numerics(accumulate="fp32"),
    doc="""gelu(gate) * up with gate, up = input[..., :d], input[..., d:] (GeGLU, Shazeer 2020).

    input: (..., 2d). Returns (..., d) in input's dtype; computed in fp32 and rounded once. GELU in its tanh form
    (Hendrycks and Gimpel 2016): gelu(z) = 0.5 z (1 + tanh u) = z / (1 + exp(-2 u)), where u = sqrt(2 / pi) (z +
    0.044715 z^3); to the relative precision of fp32 for negative z too.
    """,
)

register(
    GELU_AND_MUL,
    KernelSpec(
        name="native/gelu_and_mul",
        op="gelu_and_mul",
        backend="native",
        target="rapid_llm.kernels.ops.activation.gelu_and_mul:gelu_and_mul",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

"""Root-mean-square normalisation, alone and fused with the residual addition."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

_DIMS = {"tokens": "input.numel() // max(input.shape[-1], 1)", "hidden": "input.shape[-1]"}

_NUMERICS = Numerics(accumulate="fp32", roundings=("weight:bf16", "weight:fp16", "subnormal:zero"))

RMSNORM = OpSpec(
    id="rmsnorm",
    schema="(Tensor input, Tensor weight, float eps=1e-06) -> Tensor",
    group="layernorm",
    dims=_DIMS,
    out=Out(shape="input.shape", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:rmsnorm",
    cases="rapid_llm.verify.cases:rmsnorm",
    bound="rapid_llm.verify.bounds:rmsnorm",
    work="rapid_llm.verify.work:rmsnorm",
    numerics=_NUMERICS,
    doc="""input / sqrt(mean(input**2, -1) + eps) * weight (Zhang and Sennrich 2019).

    input: (..., hidden). weight: (hidden,), of any floating dtype. eps: added to the mean square.
    Returns input's shape and dtype; computed in fp32 and rounded once.
    """,
)

FUSED_ADD_RMSNORM = OpSpec(
    id="fused_add_rmsnorm",
    schema="(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps=1e-06) -> ()",
    group="layernorm",
    dims=_DIMS,
    out=None,
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:fused_add_rmsnorm",
    cases="rapid_llm.verify.cases:fused_add_rmsnorm",
    bound="rapid_llm.verify.bounds:fused_add_rmsnorm",
    work="rapid_llm.verify.work:fused_add_rmsnorm",
    numerics=_NUMERICS,
    doc="""In place: residual += input, then input = rmsnorm(residual, weight, eps).

    input, residual: (..., hidden), same shape and dtype, not overlapping. weight: (hidden,).
    The sum is taken in fp32 and rounded once into residual; the norm reads the *unrounded* sum. Returns None.
    """,
)

register(
    RMSNORM,
    FUSED_ADD_RMSNORM,
    KernelSpec(
        name="native/rmsnorm",
        op="rmsnorm",
        backend="native",
        target="rapid_llm.kernels.ops.layernorm.rmsnorm:rmsnorm",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
    KernelSpec(
        name="native/fused_add_rmsnorm",
        op="fused_add_rmsnorm",
        backend="native",
        target="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm:fused_add_rmsnorm",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/rmsnorm",
        op="rmsnorm",
        backend="cpp",
        target="rapid_llm.kernels.ops.layernorm.norms_cpp:rmsnorm",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        layout=("contiguous",),
        priority=30,
        batch_invariant=True,
    ),
)

register(
    KernelSpec(
        # check: allow row-tests: the conformance suite runs it on every CPU
        name="cpp/fused_add_rmsnorm",
        op="fused_add_rmsnorm",
        backend="cpp",
        target="rapid_llm.kernels.ops.layernorm.norms_cpp:fused_add_rmsnorm",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        layout=("contiguous",),
        priority=30,
        batch_invariant=True,
    ),
)


def _flashinfer(op: str, layout: tuple[str, ...], dtype: str, *flushes: str, suffix: str = "") -> KernelSpec:
    """A row of one dtype, to which the weight is rounded if it has another."""
    return KernelSpec(
        name=f"flashinfer/{op}{suffix}",
        op=op,
        backend="flashinfer",
        target=f"rapid_llm.kernels.backend.flashinfer.{op}:{op}",
        available="rapid_llm.kernels.backend.flashinfer:available",
        prepare="rapid_llm.kernels.backend.flashinfer.prepare:prepare",
        devices=("cuda",),
        dtypes=(dtype,),
        capability=((80, None),),
        shape=Shape(require=(Dim("hidden", min=8, max=16384, multiple_of=8),)),
        layout=layout,
        roundings=(f"weight:{dtype}", *flushes),
    )


_ROWS = ("input:last_dim_contiguous", "input:aligned16")
_DENSE = ("input:contiguous", "input:aligned16", "residual:contiguous", "residual:aligned16")

register(
    _flashinfer("rmsnorm", _ROWS, "bf16", "subnormal:zero"),
    _flashinfer("rmsnorm", _ROWS, "fp16", suffix=".fp16"),
    _flashinfer("fused_add_rmsnorm", _DENSE, "bf16", "subnormal:zero"),
    _flashinfer("fused_add_rmsnorm", _DENSE, "fp16", suffix=".fp16"),
)

register(
    KernelSpec(
        name="jit/rmsnorm",
        op="rmsnorm",
        backend="jit",
        target="rapid_llm.kernels.ops.layernorm.rmsnorm_jit:rmsnorm",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.layernorm.rmsnorm_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

register(
    KernelSpec(
        name="jit/fused_add_rmsnorm",
        op="fused_add_rmsnorm",
        backend="jit",
        target="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm_jit:fused_add_rmsnorm",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

register(
    KernelSpec(
        name="nvrtc/rmsnorm",
        op="rmsnorm",
        backend="nvrtc",
        target="rapid_llm.kernels.ops.layernorm.rmsnorm_nvrtc:rmsnorm",
        available="rapid_llm.kernels.nvrtc:available",
        prepare="rapid_llm.kernels.ops.layernorm.rmsnorm_nvrtc:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
    ),
)

register(
    KernelSpec(
        name="nvrtc/fused_add_rmsnorm",
        op="fused_add_rmsnorm",
        backend="nvrtc",
        target="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm_nvrtc:fused_add_rmsnorm",
        available="rapid_llm.kernels.nvrtc:available",
        prepare="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm_nvrtc:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
    ),
)

register(
    KernelSpec(
        name="aot/rmsnorm",
        op="rmsnorm",
        backend="aot",
        target="rapid_llm.kernels.ops.layernorm.rmsnorm_aot:rmsnorm",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

register(
    KernelSpec(
        name="aot/fused_add_rmsnorm",
        op="fused_add_rmsnorm",
        backend="aot",
        target="rapid_llm.kernels.ops.layernorm.fused_add_rmsnorm_aot:fused_add_rmsnorm",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("last_dim_contiguous",),
    ),
)

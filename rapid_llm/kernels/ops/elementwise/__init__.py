"""Elementwise ops: `scale`, the worked example of every kernel path."""

from rapid_llm.kernels.registry import GoldenRecord, KernelSpec, OpSpec, Out, register

SCALE = OpSpec(
    id="scale",
    schema="(Tensor input, float factor) -> Tensor",
    group="elementwise",
    dims={},
    out=Out(shape="input.shape", dtype="input.dtype"),
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:scale",
    cases="rapid_llm.verify.cases:scale",
    bound="rapid_llm.verify.bounds:scale",
    work="rapid_llm.verify.work:scale",
    doc="""input * factor, elementwise.

    input: any shape. factor: a Python float; the product is taken in fp32 and rounded once to input's dtype.
    Returns a tensor of input's shape and dtype. `out` may be `input`; any other overlap is an error.
    """,
)

register(
    SCALE,
    KernelSpec(
        name="native/scale",
        op="scale",
        backend="native",
        target="rapid_llm.kernels.ops.elementwise.scale:scale",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
        batch_invariant=True,
    ),
)

register(
    KernelSpec(
        name="jit/scale",
        op="scale",
        backend="jit",
        target="rapid_llm.kernels.ops.elementwise.scale_jit:scale",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.elementwise.scale_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
        golden=GoldenRecord(verified=False, max_abs_diff=0.0, baseline="native/scale"),
    ),
)

register(
    KernelSpec(
        name="nvrtc/scale",
        op="scale",
        backend="nvrtc",
        target="rapid_llm.kernels.ops.elementwise.scale_nvrtc:scale",
        available="rapid_llm.kernels.nvrtc:available",
        prepare="rapid_llm.kernels.ops.elementwise.scale_nvrtc:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
        golden=GoldenRecord(verified=False, max_abs_diff=0.0, baseline="native/scale"),
    ),
)

register(
    KernelSpec(
        name="aot/scale",
        op="scale",
        backend="aot",
        target="rapid_llm.kernels.ops.elementwise.scale_aot:scale",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("contiguous",),
        golden=GoldenRecord(verified=False, max_abs_diff=0.0, baseline="native/scale"),
    ),
)

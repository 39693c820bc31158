"""Rotary position embedding."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Shape, register

ROPE = OpSpec(
    id="rope",
    schema=(
        "(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor cos_sin_cache, *, bool interleaved=False) -> ()"
    ),
    group="rope",
    dims={"tokens": "query.shape[0]", "head_dim": "query.shape[-1]", "rotary_dim": "cos_sin_cache.shape[-1]"},
    out=None,
    dtype_of="query",
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:rope",
    cases="rapid_llm.verify.cases:rope",
    bound="rapid_llm.verify.bounds:rope",
    work="rapid_llm.verify.work:rope",
    numerics=Numerics(accumulate="fp32", roundings=("subnormal:zero",)),
    doc="""Rotate query and key in place by their positions (RoFormer, Su et al. 2021).

    query: (tokens, query_heads, head_dim); key: (tokens, kv_heads, head_dim), same dtype, any strides, not overlapping.
    positions: (tokens,) int32 or int64, each in [0, max_position). cos_sin_cache: (max_position, rotary_dim) fp32, the
    first half cosines and the second half sines of each pair's angle; rotary_dim <= head_dim, the rest passes through.
    interleaved: pairs are (2i, 2i + 1) if true (GPT-J, raw GGUF llama), else (i, i + rotary_dim / 2) (GPT-NeoX).
    Computed in fp32, rounded once. Returns None.
    """,
)

register(
    ROPE,
    KernelSpec(
        name="native/rope",
        op="rope",
        backend="native",
        target="rapid_llm.kernels.ops.rope.rope:rope",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/rope",
        op="rope",
        backend="cpp",
        target="rapid_llm.kernels.ops.rope.rope_cpp:rope",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        layout=("query:last_dim_contiguous", "key:last_dim_contiguous", "cos_sin_cache:contiguous"),
        priority=30,
        batch_invariant=True,
    ),
)

register(
    *(
        KernelSpec(
            name=f"flashinfer/rope{suffix}",
            op="rope",
            backend="flashinfer",
            target="rapid_llm.kernels.backend.flashinfer.rope:rope",
            available="rapid_llm.kernels.backend.flashinfer:available",
            prepare="rapid_llm.kernels.backend.flashinfer.prepare:prepare",
            devices=("cuda",),
            dtypes=(dtype,),
            capability=((80, None),),
            shape=Shape(require=(Dim("rotary_dim", one_of=(64, 128, 256, 512)),)),
            layout=(
                *("query:last_dim_contiguous", "query:aligned16", "key:last_dim_contiguous", "key:aligned16"),
                *("cos_sin_cache:contiguous", "cos_sin_cache:aligned16"),
            ),
            roundings=roundings,
        )
        for dtype, suffix, roundings in (("bf16", "", ("subnormal:zero",)), ("fp16", ".fp16", ()))
    )
)

register(
    KernelSpec(
        name="jit/rope",
        op="rope",
        backend="jit",
        target="rapid_llm.kernels.ops.rope.rope_jit:rope",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.rope.rope_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("query:last_dim_contiguous", "key:last_dim_contiguous", "cos_sin_cache:last_dim_contiguous"),
    ),
)

register(
    KernelSpec(
        name="aot/rope",
        op="rope",
        backend="aot",
        target="rapid_llm.kernels.ops.rope.rope_aot:rope",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        layout=("query:last_dim_contiguous", "key:last_dim_contiguous", "cos_sin_cache:last_dim_contiguous"),
    ),
)

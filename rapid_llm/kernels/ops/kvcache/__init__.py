"""Writes into the paged key/value cache."""

from rapid_llm.kernels.registry import Dim, KernelSpec, OpSpec, Shape, register

_USUAL = {"kv_bits": (16, 32)}
_SAME_KIND = Shape(require=(Dim("kv_bits", min=16),))
"""What a row without fp8 caches requires."""

KVCACHE_WRITE = OpSpec(
    id="kvcache.write",
    schema="(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
    group="kvcache",
    dims={
        "tokens": "key.shape[0]",
        "kv_heads": "key.shape[1]",
        "head_dim": "key.shape[2]",
        "page_size": "k_cache.shape[1]",
        "kv_bits": "8 * k_cache.element_size()",
    },
    usual=_USUAL,
    out=None,
    dtype_of="key",
    dtypes=("fp32", "fp16", "bf16"),
    facts=("kv:paged",),
    oracle="rapid_llm.verify.oracles:kvcache_write",
    cases="rapid_llm.verify.cases:kvcache_write",
    bound="rapid_llm.verify.bounds:kvcache_write",
    work="rapid_llm.verify.work:kvcache_write",
    doc="""Store each token's key and value in its slot of the paged cache, in place.

    key, value: (tokens, kv_heads, head_dim), any strides. k_cache, v_cache: (pages, page_size, kv_heads, head_dim), of
    key's dtype, or both of float8_e4m3fn: then numbers are rounded to nearest even and saturate at 448. slot_mapping:
    (tokens,) int64; slot s is page s // page_size, row s % page_size; a negative slot is padding and writes nothing.
    Distinct tokens must have distinct slots. Returns None.
    """,
)

register(
    KVCACHE_WRITE,
    KernelSpec(
        name="native/kvcache.write",
        op="kvcache.write",
        backend="native",
        target="rapid_llm.kernels.ops.kvcache.kvcache_write:kvcache_write",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/kvcache.write",
        op="kvcache.write",
        backend="cpp",
        target="rapid_llm.kernels.ops.kvcache.kvcache_write_cpp:kvcache_write",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32", "fp16", "bf16"),
        shape=_SAME_KIND,
        layout=("last_dim_contiguous",),
        priority=30,
    ),
)

ROPE_KVCACHE_WRITE = OpSpec(
    id="rope_kvcache_write",
    schema=(
        "(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor(c!) k_cache, Tensor(d!) v_cache, Tensor positions, "
        "Tensor cos_sin_cache, Tensor slot_mapping, *, bool interleaved=False) -> ()"
    ),
    group="kvcache",
    dims={
        "tokens": "query.shape[0]",
        "kv_heads": "key.shape[1]",
        "head_dim": "query.shape[-1]",
        "rotary_dim": "cos_sin_cache.shape[-1]",
        "page_size": "k_cache.shape[1]",
        "kv_bits": "8 * k_cache.element_size()",
    },
    usual=_USUAL,
    out=None,
    dtype_of="query",
    dtypes=("fp32", "fp16", "bf16"),
    facts=("kv:paged",),
    oracle="rapid_llm.verify.oracles:rope_kvcache_write",
    cases="rapid_llm.verify.cases:rope_kvcache_write",
    bound="rapid_llm.verify.bounds:rope_kvcache_write",
    work="rapid_llm.verify.work:rope_kvcache_write",
    doc="""`rope` of query and key, then `kvcache.write` of the rotated key and of value: the two ops in one call.

    query, key, positions, cos_sin_cache, interleaved: as in `rope`; key too is rotated in place, of padding tokens as
    well. value, k_cache, v_cache, slot_mapping: as in `kvcache.write`; a negative slot is padding. The cache receives
    the same bits as key; one of float8_e4m3fn receives their rounding, or that of the fp32 value before it. query, key,
    value and the caches do not overlap. Computed in fp32, rounded once. Returns None.
    """,
)

register(
    ROPE_KVCACHE_WRITE,
    KernelSpec(
        name="native/rope_kvcache_write",
        op="rope_kvcache_write",
        backend="native",
        target="rapid_llm.kernels.ops.kvcache.rope_kvcache_write:rope_kvcache_write",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/rope_kvcache_write",
        op="rope_kvcache_write",
        backend="cpp",
        target="rapid_llm.kernels.ops.kvcache.rope_kvcache_write_cpp:rope_kvcache_write",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        shape=_SAME_KIND,
        layout=(
            *("query:last_dim_contiguous", "key:last_dim_contiguous", "value:last_dim_contiguous"),
            *("k_cache:last_dim_contiguous", "v_cache:last_dim_contiguous", "cos_sin_cache:contiguous"),
        ),
        priority=30,
        batch_invariant=True,
    ),
)

register(
    KernelSpec(
        name="jit/rope_kvcache_write",
        op="rope_kvcache_write",
        backend="jit",
        target="rapid_llm.kernels.ops.kvcache.rope_kvcache_write_jit:rope_kvcache_write",
        available="rapid_llm.kernels.jit:available",
        prepare="rapid_llm.kernels.ops.kvcache.rope_kvcache_write_jit:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        shape=_SAME_KIND,
        layout=(
            *("query:last_dim_contiguous", "key:last_dim_contiguous", "value:last_dim_contiguous"),
            *("k_cache:last_dim_contiguous", "v_cache:last_dim_contiguous", "cos_sin_cache:last_dim_contiguous"),
        ),
    ),
)

register(
    KernelSpec(
        name="aot/rope_kvcache_write",
        op="rope_kvcache_write",
        backend="aot",
        target="rapid_llm.kernels.ops.kvcache.rope_kvcache_write_aot:rope_kvcache_write",
        available="rapid_llm.kernels.aot:available",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
        shape=_SAME_KIND,
        layout=(
            *("query:last_dim_contiguous", "key:last_dim_contiguous", "value:last_dim_contiguous"),
            *("k_cache:last_dim_contiguous", "v_cache:last_dim_contiguous", "cos_sin_cache:last_dim_contiguous"),
        ),
    ),
)

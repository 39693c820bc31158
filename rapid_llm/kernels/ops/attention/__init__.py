"""Attention over paged caches: ragged prefill and single-token decode, and decode over a latent (MLA) cache."""

from rapid_llm.kernels.registry import Dim, KernelSpec, Numerics, OpSpec, Out, Shape, register

_DIMS = {
    "query_heads": "query.shape[1]",
    "kv_heads": "k_cache.shape[2]",
    "head_dim": "query.shape[2]",
    "page_size": "k_cache.shape[1]",
    "window": "window",
    "softcap": "int(softcap != 0)",
    "kv_bits": "8 * k_cache.element_size()",
}
_USUAL = {"window": (0,), "softcap": (0,), "kv_bits": (16, 32)}
_PLAIN = (Dim("window", max=0), Dim("softcap", max=0), Dim("kv_bits", min=16))
"""What a row without a window, a cap of scores and an fp8 cache requires."""

_NUMERICS = Numerics(accumulate="fp32", roundings=("probs:bf16", "probs:fp16", "partials:bf16", "partials:fp16"))
"""probs: the weights of the keys, before they multiply the values. partials: the results of parts of a sequence."""

PREFILL = OpSpec(
    id="attention.prefill",
    schema=(
        "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_table, "
        "float scale, int window=0, float softcap=0.0) -> Tensor"
    ),
    group="attention",
    dims={"tokens": "query.shape[0]", "sequences": "seq_lens.shape[0]", **_DIMS},
    usual=_USUAL,
    out=Out(shape="query.shape", dtype="query.dtype"),
    dtype_of="query",
    dtypes=("fp32", "fp16", "bf16"),
    facts=("kv:paged",),
    oracle="rapid_llm.verify.oracles:attention_prefill",
    cases="rapid_llm.verify.cases:attention_prefill",
    bound="rapid_llm.verify.bounds_paged:attention_prefill",
    work="rapid_llm.verify.work:attention_prefill",
    numerics=_NUMERICS,
    doc="""Causal attention of ragged query chunks over the paged cache, which already holds the chunks' own keys.

    query: (tokens, query_heads, head_dim), the chunks of all sequences back to back. k_cache, v_cache: (pages,
    page_size, kv_heads, head_dim), of query's dtype or both of float8_e4m3fn; query_heads is a multiple of kv_heads
    (GQA: query head h reads kv head h // (Hq / Hkv)). cu_seqlens_q: (sequences + 1,) int32 offsets of each chunk.
    seq_lens: (sequences,) int32, each sequence's whole length including its chunk. block_table: (sequences, max_pages)
    int32. scale: factor on the scores.
    Query i of a chunk of q tokens is at position p = seq_len - q + i and sees keys 0 .. p, or with a window w > 0 the
    last w of them, p - w + 1 .. p. With a softcap c > 0 a score s, scaled already, becomes c tanh(s / c) (Gemma 2).
    A token that sees no key gives zeros, and so does one behind the last chunk (padding).
    Returns (tokens, query_heads, head_dim) in query's dtype; scores and sums in fp32.
    """,
)

DECODE = OpSpec(
    id="attention.decode",
    schema=(
        "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor block_table, float scale, "
        "int window=0, float softcap=0.0) -> Tensor"
    ),
    group="attention",
    dims={"sequences": "query.shape[0]", **_DIMS},
    usual=_USUAL,
    out=Out(shape="query.shape", dtype="query.dtype"),
    dtype_of="query",
    dtypes=("fp32", "fp16", "bf16"),
    facts=("kv:paged",),
    oracle="rapid_llm.verify.oracles:attention_decode",
    cases="rapid_llm.verify.cases:attention_decode",
    bound="rapid_llm.verify.bounds_paged:attention_decode",
    work="rapid_llm.verify.work:attention_decode",
    numerics=_NUMERICS,
    doc="""Attention of one query token per sequence over its paged cache.

    query: (sequences, query_heads, head_dim). k_cache, v_cache: (pages, page_size, kv_heads, head_dim), dtypes and GQA
    as in prefill. seq_lens: (sequences,) int32 keys to see; 0 (a padded row) gives zeros. block_table: (sequences,
    max_pages) int32. scale, window, softcap: as in prefill, for a query at position seq_len - 1. Returns query's shape
    and dtype; scores and sums in fp32. Split-KV on CUDA, with a number of splits that depends on the batch and the
    device alone, never on a length.
    """,
)

register(
    PREFILL,
    DECODE,
    KernelSpec(
        name="native/attention.prefill",
        op="attention.prefill",
        backend="native",
        target="rapid_llm.kernels.ops.attention.attention_prefill:attention_prefill",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
    KernelSpec(
        name="native/attention.decode",
        op="attention.decode",
        backend="native",
        target="rapid_llm.kernels.ops.attention.attention_decode:attention_decode",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="cpp/attention.decode",
        op="attention.decode",
        backend="cpp",
        target="rapid_llm.kernels.ops.attention.attention_decode_cpp:attention_decode",
        available="rapid_llm.kernels.cpp:available",
        devices=("cpu",),
        dtypes=("fp32",),
        shape=Shape(require=_PLAIN),
        layout=("query:last_dim_contiguous", "k_cache:last_dim_contiguous", "v_cache:last_dim_contiguous"),
        priority=30,
    ),
)

MLA_DECODE = OpSpec(
    id="attention.mla_decode",
    schema=(
        "(Tensor query, Tensor kv_cache, Tensor seq_lens, Tensor block_table, float scale, int value_dim=512) -> Tensor"
    ),
    group="attention",
    dims={
        "sequences": "query.shape[0]",
        "query_heads": "query.shape[1]",
        "head_dim": "query.shape[2]",
        "value_dim": "value_dim",
        "page_size": "kv_cache.shape[1]",
    },
    out=Out(shape="(query.shape[0], query.shape[1], value_dim)", dtype="query.dtype"),
    dtype_of="query",
    dtypes=("fp32", "fp16", "bf16"),
    facts=("kv:paged",),
    oracle="rapid_llm.verify.latent:attention_mla_decode",
    cases="rapid_llm.verify.cases.latent:attention_mla_decode",
    bound="rapid_llm.verify.latent:attention_mla_decode_bound",
    work="rapid_llm.verify.latent:attention_mla_decode_work",
    numerics=Numerics(accumulate="fp32", roundings=("probs:bf16", "probs:fp16")),
    doc="""Attention of one query token per sequence over a latent cache, as DeepSeek's MLA decodes.

    query: (sequences, heads, head_dim), already multiplied into the latent space: 576 = 512 + 64 for rope in DeepSeek.
    kv_cache: (pages, page_size, 1, head_dim), one latent row a token, which is the key of every head; its first
    value_dim elements are the value. seq_lens: (sequences,) int32 keys to see; 0 (a padded row) gives zeros.
    block_table: (sequences, max_pages) int32. scale: factor on the scores. Returns (sequences, heads, value_dim) in
    query's dtype; scores and sums in fp32.
    """,
)


def _flashmla(dtype: str, suffix: str) -> KernelSpec:
    """A row of one dtype, for the weights of the keys are rounded to it. The release is for SM 90 alone."""
    return KernelSpec(
        name=f"flashmla/attention.mla_decode{suffix}",
        op="attention.mla_decode",
        backend="flashmla",
        target="rapid_llm.kernels.backend.flashmla.mla_decode:attention_mla_decode",
        available="rapid_llm.kernels.backend.flashmla:available",
        devices=("cuda",),
        dtypes=(dtype,),
        capability=((90, 90),),
        shape=Shape(
            require=(
                Dim("page_size", one_of=(64,)),
                Dim("head_dim", one_of=(512, 576)),
                Dim("value_dim", one_of=(512,)),
            )
        ),
        layout=(
            *("query:last_dim_contiguous", "query:aligned16", "kv_cache:last_dim_contiguous", "kv_cache:aligned16"),
            *("seq_lens:contiguous", "block_table:last_dim_contiguous"),
        ),
        roundings=(f"probs:{dtype}",),
    )


register(
    MLA_DECODE,
    KernelSpec(
        name="native/attention.mla_decode",
        op="attention.mla_decode",
        backend="native",
        target="rapid_llm.kernels.ops.attention.attention_mla_decode:attention_mla_decode",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
    _flashmla("bf16", ""),
    _flashmla("fp16", ".fp16"),
)


def _flashinfer(op: str, function: str, dtype: str, suffix: str) -> KernelSpec:
    """A row of one dtype, to which weights and partial results are rounded; it plans each step on the host."""
    return KernelSpec(
        name=f"flashinfer/{op}{suffix}",
        op=op,
        backend="flashinfer",
        target=f"rapid_llm.kernels.backend.flashinfer.{function}:{function}",
        available="rapid_llm.kernels.backend.flashinfer:available",
        prepare="rapid_llm.kernels.backend.flashinfer.prepare:prepare",
        devices=("cuda",),
        dtypes=(dtype,),
        capability=((80, None),),
        shape=Shape(require=(Dim("head_dim", one_of=(64, 128, 256)), *_PLAIN)),
        layout=tuple(
            f"{tensor}:{tag}"
            for tensor in ("query", "k_cache", "v_cache")
            for tag in ("last_dim_contiguous", "aligned16")
        ),
        roundings=(f"probs:{dtype}", f"partials:{dtype}"),
        graph_safe=False,
    )


register(
    *(
        _flashinfer(op, function, dtype, suffix)
        for op, function in (("attention.decode", "attention_decode"), ("attention.prefill", "attention_prefill"))
        for dtype, suffix in (("bf16", ""), ("fp16", ".fp16"))
    )
)

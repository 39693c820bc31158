"""Choosing the next token from logits."""

from rapid_llm.kernels.registry import KernelSpec, OpSpec, Out, register

SAMPLE = OpSpec(
    id="sample",
    schema=("(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) -> Tensor"),
    group="sampling",
    dims={"rows": "logits.shape[0]", "vocab": "logits.shape[1]"},
    out=Out(shape="(logits.shape[0],)", dtype="torch.int64"),
    dtype_of="logits",
    dtypes=("fp32", "fp16", "bf16"),
    oracle="rapid_llm.verify.oracles:sample",
    cases="rapid_llm.verify.cases:sample",
    bound="rapid_llm.verify.bounds:sample",
    work="rapid_llm.verify.work:sample",
    doc="""One token id per row of logits, by inverse transform sampling; deterministic given `uniform`.

    logits: (rows, vocab), any strides. All parameters are per row, (rows,): temperature fp32 (0 is greedy: the lowest
    id among the maxima), top_k int32 (<= 0 or >= vocab is off; ties with the k-th logit are kept), top_p fp32 (>= 1 is
    off; the smallest set of most probable tokens whose mass reaches top_p, ties with the last one kept, never empty; 0
    keeps only the most probable), min_p fp32 (0 is off; drops tokens less probable than min_p times the most probable),
    uniform fp32 in [0, 1). Order: logits / temperature, softmax in fp32, top_k, top_p (of the top_k mass), min_p.
    The token is the first id, in vocabulary order, whose cumulative kept mass exceeds uniform times the kept mass.
    A row that holds NaN or +inf, or nothing but -inf, gives -1. Returns (rows,) int64.
    """,
)

register(
    SAMPLE,
    KernelSpec(
        name="native/sample",
        op="sample",
        backend="native",
        target="rapid_llm.kernels.ops.sampling.sample:sample",
        dtypes=("fp32", "fp16", "bf16"),
        priority=0,
    ),
)

register(
    KernelSpec(
        name="flashinfer/sample",
        op="sample",
        backend="flashinfer",
        target="rapid_llm.kernels.backend.flashinfer.sample:sample",
        available="rapid_llm.kernels.backend.flashinfer:available",
        prepare="rapid_llm.kernels.backend.flashinfer.prepare:prepare",
        devices=("cuda",),
        dtypes=("fp32", "fp16", "bf16"),
        capability=((80, None),),
    ),
)

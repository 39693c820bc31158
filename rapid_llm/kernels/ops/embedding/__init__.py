"""Token embedding from a dense or block-quantised table."""

from rapid_llm.kernels.ops.block_formats import FORMATS, FP8
from rapid_llm.kernels.registry import KernelSpec, OpSpec, Out, register

SCHEMES = ("unquantized", *(scheme for scheme in FORMATS if scheme != FP8))
"""Embedding tables come dense, in GGUF's blocks, or in what this package quantises to."""

EMBEDDING = OpSpec(
    id="embedding",
    schema="(Tensor input, Tensor weight, *, ScalarType? dtype=None, str scheme='unquantized') -> Tensor",
    group="embedding",
    dims={"tokens": "input.numel()", "vocab": "weight.shape[0]"},
    out=Out(
        shape="(*input.shape, weight.shape[1] if scheme == 'unquantized' else row_elements(weight.shape[1], scheme))",
        dtype="dtype if dtype is not None else (weight.dtype if scheme == 'unquantized' else torch.float32)",
    ),
    dtype_of="weight",
    dtypes=("fp32", "fp16", "bf16", "uint8"),
    schemes=SCHEMES,
    oracle="rapid_llm.verify.oracles:embedding",
    cases="rapid_llm.verify.cases:embedding",
    bound="rapid_llm.verify.bounds:embedding",
    work="rapid_llm.verify.work:embedding",
    doc="""Rows of `weight` by token id.

    input: ids of any shape, int32 or int64, each in [0, vocab); on CPU an id outside is an IndexError, on CUDA its row
    is zeros. weight: (vocab, hidden) dense for scheme 'unquantized', else (vocab, bytes) uint8 as `linear` has them.
    dtype: of the result; default weight's own, fp32 for quantised tables. Returns (*input.shape, hidden).
    """,
)

register(
    EMBEDDING,
    KernelSpec(
        name="native/embedding",
        op="embedding",
        backend="native",
        target="rapid_llm.kernels.ops.embedding.embedding:embedding",
        dtypes=("fp32", "fp16", "bf16", "uint8"),
        schemes=SCHEMES,
        priority=0,
        batch_invariant=True,
    ),
)

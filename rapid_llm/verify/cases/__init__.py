"""The inputs on which every row of an op is tried: one function per op, named as in `OpSpec.cases`.

`cases(dtype, device, scheme, *, budget)` gives a list of `Case`. budget `full` is the whole set; `interpret` is a
small one whose grids suit Triton's interpreter (about a millisecond for each program). A dtype and scheme that the op
does not combine have no cases.
"""

from rapid_llm.verify.cases.build import BUDGETS, Case
from rapid_llm.verify.cases.elementwise import gelu_and_mul, scale, silu_and_mul
from rapid_llm.verify.cases.matrix import embedding, linear
from rapid_llm.verify.cases.norm import fused_add_rmsnorm, rmsnorm
from rapid_llm.verify.cases.paged import attention_decode, attention_prefill, kvcache_write
from rapid_llm.verify.cases.rope import rope
from rapid_llm.verify.cases.rope_kvcache_write import rope_kvcache_write
from rapid_llm.verify.cases.sampling import sample

__all__ = [
    "BUDGETS",
    "Case",
    "attention_decode",
    "attention_prefill",
    "embedding",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "kvcache_write",
    "linear",
    "rmsnorm",
    "rope",
    "rope_kvcache_write",
    "sample",
    "scale",
    "silu_and_mul",
]

"""The inputs on which every row of an op is tried: one function per op, named as in `OpSpec.cases`.

`cases(dtype, device, scheme, *, budget)` gives a list of `Case`. budget `full` is the whole set; `interpret` is a
small one whose grids suit Triton's interpreter (about a millisecond for each program).
"""

from rapid_llm.verify.cases.build import Case
from rapid_llm.verify.cases.elementwise import scale, silu_and_mul
from rapid_llm.verify.cases.norm import fused_add_rmsnorm, rmsnorm

__all__ = ["Case", "fused_add_rmsnorm", "rmsnorm", "scale", "silu_and_mul"]

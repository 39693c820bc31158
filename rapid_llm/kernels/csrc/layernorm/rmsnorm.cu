// rmsnorm by just-in-time CUDA. Not Triton: a thread's share of a row stays in registers as 16-byte vectors of the
// stored dtype, the weight is on its way while the sum is awaited, and rows of any length need no power of two.
#include "layernorm/rmsnorm_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rmsnorm))

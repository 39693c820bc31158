// silu_and_mul by just-in-time CUDA. Not Triton: every thread has four 16-byte loads under way whatever the row's
// length, where a Triton tile is a power of two of columns.
#include "activation/silu_and_mul_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(silu_and_mul))

// rmsnorm_linear_silu_and_mul for one row of input by just-in-time CUDA. Not Triton: the weight is read while the kernel
// before this one still runs (programmatic dependent launch), in loads that are kept in flight by hand.
#include "gemm/fused_norm_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rmsnorm_linear_silu_and_mul))

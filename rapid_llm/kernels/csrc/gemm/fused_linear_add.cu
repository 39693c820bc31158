// linear_add for one row of input by just-in-time CUDA. Not Triton: as linear, it reads the first weights while the
// kernel before it still runs (programmatic dependent launch).
#include "gemm/fused_linear_add_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_add))

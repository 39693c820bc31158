// linear for up to 8 rows of input by just-in-time CUDA. Not Triton: the tensor cores take operands straight from 16-byte
// loads of a row, several of which stay in flight in each thread, and the next weights are read while the kernel before
// this one still runs (programmatic dependent launch).
#include "gemm/linear_gemv_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear))

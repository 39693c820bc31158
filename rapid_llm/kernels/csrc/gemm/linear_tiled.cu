// linear over tiled q8_0, q4_0 and q4_1 blocks for up to 8 rows of input by just-in-time CUDA. Not Triton: codes become
// operands of the tensor cores in the registers that they were loaded into, by masks and one packed addition.
#include "gemm/linear_tiled_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_tiled))

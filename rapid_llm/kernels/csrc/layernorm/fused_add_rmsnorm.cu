// fused_add_rmsnorm by just-in-time CUDA. Not Triton: the unrounded sum of a row stays in registers between its two
// uses, the loads of both tensors and of the weight are all under way at once, and no length needs a power of two.
#include "layernorm/fused_add_rmsnorm_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(fused_add_rmsnorm))

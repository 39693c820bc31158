// rope by just-in-time CUDA. It is said in Triton as well; here it is one small call on the host, and shares its device
// code with rope_kvcache_write.
#include "rapid_llm/module.h"
#include "rope/rope_launch.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rope))

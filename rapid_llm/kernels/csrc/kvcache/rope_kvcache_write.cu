// rope_kvcache_write by just-in-time CUDA. It is said in Triton as well, in a launch of some thirty run-time arguments on
// every layer of every step; here it is one small call on the host, and every access is 16 bytes wide.
#include "kvcache/rope_kvcache_write_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rope_kvcache_write))

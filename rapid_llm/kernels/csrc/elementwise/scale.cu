// scale by just-in-time CUDA. It is said in Triton as well; here it is the worked example of this path.
#include "elementwise/scale_launch.h"
#include "rapid_llm/module.h"

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(scale))

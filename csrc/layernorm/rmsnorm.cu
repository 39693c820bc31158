// rmsnorm as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "layernorm/rmsnorm_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::rmsnorm(Tensor& out, const Tensor& input, const Tensor& weight, double eps) {
  rapid_llm::rmsnorm(out, input, weight, eps);
}

#ifndef __CUDA_ARCH__
void ext::rmsnorm(StableTensor& out, const StableTensor& input, const StableTensor& weight, double eps) {
  Tensor out_view = view(out);
  rapid_llm::rmsnorm(out_view, view(input), view(weight), eps);
}
#endif

}  // namespace rapid_llm

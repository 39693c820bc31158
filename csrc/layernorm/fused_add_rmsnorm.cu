// fused_add_rmsnorm as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "layernorm/fused_add_rmsnorm_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::fused_add_rmsnorm(Tensor& input, Tensor& residual, const Tensor& weight, double eps) {
  rapid_llm::fused_add_rmsnorm(input, residual, weight, eps);
}

#ifndef __CUDA_ARCH__
void ext::fused_add_rmsnorm(StableTensor& input, StableTensor& residual, const StableTensor& weight, double eps) {
  Tensor input_view = view(input);
  Tensor residual_view = view(residual);
  rapid_llm::fused_add_rmsnorm(input_view, residual_view, view(weight), eps);
}
#endif

}  // namespace rapid_llm

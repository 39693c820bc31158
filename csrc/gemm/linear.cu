// linear as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "gemm/linear_gemv_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::linear(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, bool settled) {
  rapid_llm::linear(out, input, weight, bias, settled);
}

#ifndef __CUDA_ARCH__
void ext::linear(StableTensor& out, const StableTensor& input, const StableTensor& weight, const OptionalTensor& bias,
                 bool settled) {
  Tensor out_view = view(out);
  const Tensor bias_view = bias.has_value() ? view(*bias) : Tensor{};
  rapid_llm::linear(out_view, view(input), view(weight), bias.has_value() ? &bias_view : nullptr, settled);
}
#endif

}  // namespace rapid_llm

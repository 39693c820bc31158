// silu_and_mul as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "activation/silu_and_mul_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::silu_and_mul(Tensor& out, const Tensor& input) {
  rapid_llm::silu_and_mul(out, input);
}

#ifndef __CUDA_ARCH__
void ext::silu_and_mul(StableTensor& out, const StableTensor& input) {
  Tensor out_view = view(out);
  rapid_llm::silu_and_mul(out_view, view(input));
}
#endif

}  // namespace rapid_llm

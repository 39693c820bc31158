// scale as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "elementwise/scale_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::scale(Tensor& out, const Tensor& input, double factor) {
  rapid_llm::scale(out, input, factor);
}

#ifndef __CUDA_ARCH__
void ext::scale(StableTensor& out, const StableTensor& input, double factor) {
  Tensor out_view = view(out);
  rapid_llm::scale(out_view, view(input), factor);
}
#endif

}  // namespace rapid_llm

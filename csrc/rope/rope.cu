// rope as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "rope/rope_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::rope(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved) {
  rapid_llm::rope(query, key, positions, cos_sin_cache, interleaved);
}

#ifndef __CUDA_ARCH__
void ext::rope(StableTensor& query, StableTensor& key, const StableTensor& positions, const StableTensor& cos_sin_cache,
               bool interleaved) {
  Tensor query_view = view(query);
  Tensor key_view = view(key);
  rapid_llm::rope(query_view, key_view, view(positions), view(cos_sin_cache), interleaved);
}
#endif

}  // namespace rapid_llm

// rope_kvcache_write as an op of the extension: two doors to the launcher that the just-in-time build calls too.
#include "kvcache/rope_kvcache_write_launch.h"
#include "rapid_llm_ext.h"

namespace rapid_llm {

void thin::rope_kvcache_write(Tensor& query, Tensor& key, const Tensor& value, Tensor& k_cache, Tensor& v_cache,
                              const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slot_mapping,
                              bool interleaved) {
  rapid_llm::rope_kvcache_write(query, key, value, k_cache, v_cache, positions, cos_sin_cache, slot_mapping,
                                interleaved);
}

#ifndef __CUDA_ARCH__
void ext::rope_kvcache_write(StableTensor& query, StableTensor& key, const StableTensor& value, StableTensor& k_cache,
                             StableTensor& v_cache, const StableTensor& positions, const StableTensor& cos_sin_cache,
                             const StableTensor& slot_mapping, bool interleaved) {
  Tensor query_view = view(query);
  Tensor key_view = view(key);
  Tensor k_cache_view = view(k_cache);
  Tensor v_cache_view = view(v_cache);
  rapid_llm::rope_kvcache_write(query_view, key_view, view(value), k_cache_view, v_cache_view, view(positions),
                                view(cos_sin_cache), view(slot_mapping), interleaved);
}
#endif

}  // namespace rapid_llm

// rope_kvcache_write of fp32 heads on a CPU: rotate, and store what was rotated while it lies in the first-level cache.
//
// Why not PyTorch: in decode the two ops are a dozen tiny aten calls per layer; here they are one call.

#include "kvcache/cache_cpu.h"
#include "rope/rotation_cpu.h"

#include "rapid_llm/module.h"

namespace rapid_llm {

void rope_kvcache_write(Tensor& query, Tensor& key, const Tensor& value, Tensor& k_cache, Tensor& v_cache,
                        const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slot_mapping,
                        bool interleaved, int64_t threads) {
  constexpr const char* op = "rope_kvcache_write";
  check_rotation(op, query, key, positions, cos_sin_cache);
  check_cache_write(op, key, value, k_cache, v_cache, slot_mapping);
  check_disjoint(op, "query", query, "value", value);
  check_disjoint(op, "key", key, "value", value);
  const Indices at(op, "positions", positions), slots(op, "slot_mapping", slot_mapping);
  const int64_t tokens = query.size(0), half = cos_sin_cache.size(1) / 2;
  check_positions(op, at, tokens, cos_sin_cache);
  check_slots(op, slots, tokens, k_cache);
  const door::Unlocked unlocked(query.numel() + 3 * key.numel());
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cosine = cos_sin_cache.as<float>() + at[t] * cos_sin_cache.stride(0);
    rotate(query.as<float>() + t * query.stride(0), query.size(1), query.stride(1), cosine, half, interleaved);
    rotate(key.as<float>() + t * key.stride(0), key.size(1), key.stride(1), cosine, half, interleaved);
    if (slots[t] < 0) continue;
    store(k_cache, slots[t], key, t);
    store(v_cache, slots[t], value, t);
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rope_kvcache_write))

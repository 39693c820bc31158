// kvcache.write on a CPU, of any dtype.
//
// Why not PyTorch: skipping negative slots and scattering key and value takes half a dozen aten calls per layer.

#include "kvcache/cache_cpu.h"

#include "rapid_llm/module.h"

namespace rapid_llm {

void kvcache_write(const Tensor& key, const Tensor& value, Tensor& k_cache, Tensor& v_cache,
                   const Tensor& slot_mapping) {
  constexpr const char* op = "kvcache.write";
  check_cache_write(op, key, value, k_cache, v_cache, slot_mapping);
  RAPID_CHECK(key.dtype != DType::other, op, ": takes real numbers of up to 8 bytes");
  const Indices slots(op, "slot_mapping", slot_mapping);
  const int64_t tokens = key.size(0);
  check_slots(op, slots, tokens, k_cache);
  const door::Unlocked unlocked(2 * key.numel());
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    store(k_cache, slots[t], key, t);
    store(v_cache, slots[t], value, t);
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(kvcache_write))

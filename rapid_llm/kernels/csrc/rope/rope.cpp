// rope in place on fp32 heads on a CPU.
//
// Why not PyTorch: rotating halves in place takes a gather and three aten calls each for query and key, all tiny in
// decode.

#include "rope/rotation_cpu.h"

#include "rapid_llm/module.h"

namespace rapid_llm {

void rope(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
          int64_t threads) {
  constexpr const char* op = "rope";
  check_rotation(op, query, key, positions, cos_sin_cache);
  const Indices at(op, "positions", positions);
  const int64_t tokens = query.size(0), half = cos_sin_cache.size(1) / 2;
  check_positions(op, at, tokens, cos_sin_cache);
  const door::Unlocked unlocked(query.numel() + key.numel());
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cosine = cos_sin_cache.as<float>() + at[t] * cos_sin_cache.stride(0);
    rotate(query.as<float>() + t * query.stride(0), query.size(1), query.stride(1), cosine, half, interleaved);
    rotate(key.as<float>() + t * key.stride(0), key.size(1), key.stride(1), cosine, half, interleaved);
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rope))

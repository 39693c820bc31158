// silu_and_mul for dense fp32 rows on a CPU.
//
// Why not PyTorch: at one row its silu and mul are two aten calls over two strided halves, each costing more than the
// arithmetic; at many rows they pass over memory twice.

#include <cstdint>

#include "../include/exp.h"

extern "C" void silu_and_mul(const float* input, std::int64_t rows, std::int64_t features, float* out, int threads) {
  constexpr std::int64_t kParallel = 1 << 13;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * features > kParallel) schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* gate = input + r * 2 * features;
    const float* up = gate + features;
    float* y = out + r * features;
#pragma omp simd
    for (std::int64_t i = 0; i < features; ++i) y[i] = gate[i] / (1.0f + rapid_llm::exp(-gate[i])) * up[i];
  }
}

// rmsnorm and fused_add_rmsnorm for dense fp32 rows on a CPU.
//
// Why not PyTorch: at one row, decode's case, the arithmetic takes a fifth of a microsecond and each aten call one or more;
// the PyTorch form makes five of them. Here it is one call and two passes over a row that stays in the first-level cache.

#include <cmath>
#include <cstdint>

namespace {

// Below this many elements a second thread costs more than it brings.
constexpr std::int64_t kParallel = 1 << 15;

inline void norm_row(const float* x, const float* weight, float eps, std::int64_t hidden, float* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (std::int64_t i = 0; i < hidden; ++i) squares += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(hidden) + eps);
#pragma omp simd
  for (std::int64_t i = 0; i < hidden; ++i) out[i] = x[i] * inverse * weight[i];
}

}  // namespace

extern "C" void rmsnorm(const float* input, const float* weight, float eps, std::int64_t rows, std::int64_t hidden,
                        float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * hidden > kParallel) schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) norm_row(input + r * hidden, weight, eps, hidden, out + r * hidden);
}

extern "C" void fused_add_rmsnorm(float* input, float* residual, const float* weight, float eps, std::int64_t rows,
                                  std::int64_t hidden, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * hidden > kParallel) schedule(static)
  for (std::int64_t r = 0; r < rows; ++r) {
    float* x = input + r * hidden;
    float* sum = residual + r * hidden;
#pragma omp simd
    for (std::int64_t i = 0; i < hidden; ++i) sum[i] += x[i];
    norm_row(sum, weight, eps, hidden, x);
  }
}

// rmsnorm and fused_add_rmsnorm for dense fp32 rows on a CPU.
//
// Why not PyTorch: at one row, decode's case, the arithmetic takes a fifth of a microsecond and each aten call one or
// more; the PyTorch form makes five of them. Here it is one call and two passes over a row that stays in the first-
// level cache.

#include <cmath>

#include "rapid_llm/host.h"
#include "rapid_llm/module.h"

namespace rapid_llm {
namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kParallel = 1 << 15;

inline void norm_row(const float* x, const float* weight, float eps, int64_t hidden, float* out) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < hidden; ++i) squares += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(hidden) + eps);
#pragma omp simd
  for (int64_t i = 0; i < hidden; ++i) out[i] = x[i] * inverse * weight[i];
}

// The length of a row.
int64_t check_rows(const char* op, const Tensor& input, const Tensor& weight) {
  check_cpu(op, "input", input, DType::float32);
  check_cpu(op, "weight", weight, DType::float32);
  RAPID_CHECK(input.dim > 0, op, ": input must have a last dimension, got a scalar");
  RAPID_CHECK(weight.dim == 1 && weight.size(0) == input.size(-1), op,
              ": weight must have the same shape as a row of input, (", input.size(-1), ",): got ", weight.shape());
  check_contiguous(op, "input", input);
  check_contiguous(op, "weight", weight);
  return input.size(-1);
}

}  // namespace

// `out` may be `input`.
void rmsnorm(Tensor& out, const Tensor& input, const Tensor& weight, double eps, int64_t threads) {
  constexpr const char* op = "rmsnorm";
  const int64_t hidden = check_rows(op, input, weight), elements = input.numel();
  check_cpu(op, "out", out, DType::float32);
  check_shape(op, "out", out, input);
  check_contiguous(op, "out", out);
  check_alias(op, out, "input", input);
  check_disjoint(op, "out", out, "weight", weight);
  if (elements == 0) return;
  const door::Unlocked unlocked(elements);
  const float *x = input.as<float>(), *scale = weight.as<float>();
  float* y = out.as<float>();
#pragma omp parallel for num_threads(threads) if (threads > 1 && elements > kParallel) schedule(static)
  for (int64_t at = 0; at < elements; at += hidden) norm_row(x + at, scale, eps, hidden, y + at);
}

void fused_add_rmsnorm(Tensor& input, Tensor& residual, const Tensor& weight, double eps, int64_t threads) {
  constexpr const char* op = "fused_add_rmsnorm";
  const int64_t hidden = check_rows(op, input, weight), elements = input.numel();
  check_cpu(op, "residual", residual, DType::float32);
  check_shape(op, "residual", residual, input);
  check_contiguous(op, "residual", residual);
  check_disjoint(op, "input", input, "residual", residual);
  check_disjoint(op, "input", input, "weight", weight);
  check_disjoint(op, "residual", residual, "weight", weight);
  if (elements == 0) return;
  const door::Unlocked unlocked(elements);
  const float* scale = weight.as<float>();
  float *x = input.as<float>(), *sum = residual.as<float>();
#pragma omp parallel for num_threads(threads) if (threads > 1 && elements > kParallel) schedule(static)
  for (int64_t at = 0; at < elements; at += hidden) {
#pragma omp simd
    for (int64_t i = 0; i < hidden; ++i) sum[at + i] += x[at + i];
    norm_row(sum + at, scale, eps, hidden, x + at);
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(rmsnorm), RAPID_LLM_FUNCTION(fused_add_rmsnorm))

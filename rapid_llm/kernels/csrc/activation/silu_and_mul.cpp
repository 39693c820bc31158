// silu_and_mul for dense fp32 rows on a CPU.
//
// Why not PyTorch: at one row its silu and mul are two aten calls over two strided halves, each costing more than the
// arithmetic; at many rows they pass over memory twice.

#include "include/exp.h"
#include "rapid_llm/host.h"
#include "rapid_llm/module.h"

namespace rapid_llm {

void silu_and_mul(Tensor& out, const Tensor& input, int64_t threads) {
  constexpr const char* op = "silu_and_mul";
  constexpr int64_t parallel = 1 << 13;
  check_cpu(op, "input", input, DType::float32);
  check_cpu(op, "out", out, DType::float32);
  RAPID_CHECK(input.dim > 0, op, ": input must have a last dimension, got a scalar");
  const int64_t features = input.size(-1) / 2;
  RAPID_CHECK(input.size(-1) == 2 * features, op, ": the last dimension holds gate and up and must be even, got ",
              input.size(-1));
  bool shape = out.dim == input.dim && out.size(-1) == features;
  for (int at = 0; shape && at < input.dim - 1; ++at) shape = out.sizes[at] == input.sizes[at];
  RAPID_CHECK(shape, op, ": out must have the same shape as input with half its last dimension, ", features, ": got ",
              out.shape(), " for ", input.shape());
  check_contiguous(op, "input", input);
  check_contiguous(op, "out", out);
  check_disjoint(op, "out", out, "input", input);
  const int64_t elements = out.numel();
  if (elements == 0) return;
  const door::Unlocked unlocked(8 * elements);
  const float* x = input.as<float>();
  float* y = out.as<float>();
#pragma omp parallel for num_threads(threads) if (threads > 1 && elements > parallel) schedule(static)
  for (int64_t at = 0; at < elements; at += features) {
    const float *gate = x + 2 * at, *up = gate + features;
    float* to = y + at;
#pragma omp simd
    for (int64_t i = 0; i < features; ++i) to[i] = gate[i] / (1.0f + rapid_llm::exp(-gate[i])) * up[i];
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(silu_and_mul))

// linear_add's launcher: linear's own kernels with the residual as a bias that lies where the result goes. The thread
// that stores an output is the one that reads its bias, just before, and after the kernel before this one has ended.
#pragma once

#include "gemm/fused_launch.h"

namespace rapid_llm {

// The weight is settled: no kernel still running writes it, so the first of it is read while the previous kernel ends.
inline void linear_add(Tensor& residual, const Tensor& input, const Tensor& weight) {
  check_fused("linear_add", "residual", residual, input, weight, 1);
  if (residual.numel() == 0) return;
  GemvArguments arguments = gemv_arguments(residual, input, weight, nullptr);
  arguments.weight_stride = weight.stride(0);
  arguments.bias = residual.data;
  arguments.bias_stride = residual.stride(-1);
  arguments.early = true;
  const bool whole = whole_rows(arguments, weight);
  const Launch launch("linear_add", input);
  if (input.dtype == DType::float16) {
    plan_gemv<half_t>(launch, arguments, whole);
  } else {
    plan_gemv<bfloat16_t>(launch, arguments, whole);
  }
  check_launch("linear_add");
}

}  // namespace rapid_llm

// The launchers of rmsnorm_linear and rmsnorm_linear_silu_and_mul: checks, then the kernel whose blocks fit the weight.
#pragma once

#include "gemm/fused_launch.h"
#include "gemm/fused_norm_row.cuh"

namespace rapid_llm {

template <class T, class W, int PARTS, int WARPS, int SHARE, int ROWS, int DEPTH>
void launch_norm_row(const char* op, const Launch& launch, const NormArguments& arguments) {
  launch_early(op, launch, arguments, norm_row_kernel<T, W, PARTS, WARPS, SHARE, ROWS, DEPTH>,
               launch.blocks(arguments.linear.outputs, WARPS / SHARE * ROWS), WARPS * 32);
}

// Which kernel takes which weight: as for linear where a result takes one row of it. The template's last numbers are
// warps of a block, warps that share a result, results of a warp, and loads in flight.
template <class T, class W, int PARTS>
void plan_norm_row(const char* op, const Launch& launch, const NormArguments& arguments) {
  const int64_t outputs = arguments.linear.outputs, features = arguments.linear.features;
  // Two rows a result: a warp each, four loads in flight. Of twelve plans the fastest on an H200 for 16384 x 2048 and
  // 28672 x 4096 (16.5 and 54.3 us; linear's plans take 18.7 and 56.1).
  if (PARTS == 2 || features < 1024) return launch_norm_row<T, W, PARTS, 4, 1, 1, 4>(op, launch, arguments);
  if constexpr (PARTS == 1) {
    if (outputs <= 1024 || features >= 4 * outputs) {
      return launch_norm_row<T, W, PARTS, 8, 8, 2, 2>(op, launch, arguments);
    }
    int multiprocessors = 0;
    check(op, cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device()));
    if (filled((outputs + 7) / 8, 4 * multiprocessors) >= filled((outputs + 3) / 4, 6 * multiprocessors)) {
      return launch_norm_row<T, W, PARTS, 8, 2, 2, 2>(op, launch, arguments);
    }
    launch_norm_row<T, W, PARTS, 4, 4, 4, 2>(op, launch, arguments);
  }
}

// The weight is settled: no kernel still running writes it, so the first of it is read while the previous kernel ends.
template <int PARTS>
void norm_linear(const char* op, Tensor& out, const Tensor& input, const Tensor& norm_weight, const Tensor& weight,
                 const Tensor* bias, double eps) {
  check_fused(op, "out", out, input, weight, PARTS);
  check_cuda(op, "norm_weight", norm_weight);
  RAPID_CHECK(norm_weight.device == input.device, op, ": norm_weight must be on the same CUDA device, cuda:",
              input.device, ": got cuda:", norm_weight.device);
  RAPID_CHECK(norm_weight.dtype == input.dtype || norm_weight.dtype == DType::float32, op,
              ": norm_weight must have dtype ", name_of(input.dtype), " or float32, got ", name_of(norm_weight.dtype));
  RAPID_CHECK(norm_weight.dim == 1 && norm_weight.size(0) == input.size(-1), op,
              ": norm_weight must have the same shape as a row of input, (", input.size(-1), "): got ",
              norm_weight.shape());
  check_dense_rows(op, "norm_weight", norm_weight);
  check_disjoint(op, "out", out, "norm_weight", norm_weight);
  if (bias != nullptr) {
    check_like(op, "bias", *bias, input);
    RAPID_CHECK(bias->dim == 1 && bias->size(0) == out.size(-1), op, ": bias must have the same shape as a row of the "
                "result, (", out.size(-1), "): got ", bias->shape());
    check_disjoint(op, "out", out, "bias", *bias);
  }
  if (out.numel() == 0) return;
  NormArguments arguments = {};
  arguments.linear = gemv_arguments(out, input, weight, bias);
  arguments.linear.weight_stride = weight.stride(0);
  arguments.linear.early = true;
  arguments.scale = norm_weight.data;
  arguments.eps = static_cast<float>(eps);
  arguments.inverse_features = 1.0f / static_cast<float>(input.size(-1) > 0 ? input.size(-1) : 1);
  RAPID_CHECK(whole_rows(arguments.linear, weight) && reinterpret_cast<uint64_t>(norm_weight.data) % 16 == 0, op,
              ": this kernel takes features in multiples of 8, and rows that begin at multiples of 16 bytes; got input ",
              input.shape(), ", weight ", weight.shape(), " with rows ", weight.stride(0), " apart");
  const Launch launch(op, input);
  const auto plan = [&](auto type) {
    using T = typename decltype(type)::type;
    if (norm_weight.dtype == DType::float32) {
      plan_norm_row<T, float, PARTS>(op, launch, arguments);
    } else {
      plan_norm_row<T, T, PARTS>(op, launch, arguments);
    }
  };
  if (input.dtype == DType::float16) {
    plan(Type<half_t>{});
  } else {
    plan(Type<bfloat16_t>{});
  }
  check_launch(op);
}

inline void rmsnorm_linear(Tensor& out, const Tensor& input, const Tensor& norm_weight, const Tensor& weight,
                           const Tensor* bias, double eps) {
  norm_linear<1>("rmsnorm_linear", out, input, norm_weight, weight, bias, eps);
}

inline void rmsnorm_linear_silu_and_mul(Tensor& out, const Tensor& input, const Tensor& norm_weight,
                                        const Tensor& weight, double eps) {
  norm_linear<2>("rmsnorm_linear_silu_and_mul", out, input, norm_weight, weight, nullptr, eps);
}

}  // namespace rapid_llm

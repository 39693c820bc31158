// fused_add_rmsnorm's launcher: checks, then a row in registers where vectors fit, else the kernel that takes anything.
#pragma once

#include "layernorm/fused_add_rmsnorm.cuh"
#include "layernorm/norm_launch.h"

namespace rapid_llm {

template <class T, int N>
void launch_fused_add_rmsnorm_any(const Launch& launch, const Rows<2>& rows, const Tensor& weight, float eps,
                                  int hidden) {
  const dim3 threads = row_block<N>(rows.count, (hidden + N - 1) / N, 4).threads;
  fused_add_rmsnorm_any_kernel<T, N><<<launch.blocks(rows.count, threads.y), threads, 0, launch.stream()>>>(
      static_cast<T*>(rows.data[0]), static_cast<T*>(rows.data[1]), any_floats(weight), eps, 1.0f / hidden, hidden,
      rows.count, rows.inner, rows.outer_step[0], rows.inner_step[0], rows.outer_step[1], rows.inner_step[1]);
}

template <class T, class W>
void launch_fused_add_rmsnorm(const Launch& launch, const Rows<2>& rows, const Tensor& weight, float eps, int hidden) {
  constexpr int N = 16 / sizeof(T), most = 16 / N;
  const RowBlock block = row_block<N>(rows.count, hidden / N, most);
  if (block.each == 0) return launch_fused_add_rmsnorm_any<T, N>(launch, rows, weight, eps, hidden);
  const auto run = [&](auto kernel) {
    kernel<<<launch.blocks(rows.count, block.threads.y), block.threads, 0, launch.stream()>>>(
        static_cast<T*>(rows.data[0]), static_cast<T*>(rows.data[1]), weight.as<W>(), eps, 1.0f / hidden, hidden,
        rows.count, rows.inner, rows.outer_step[0], rows.inner_step[0], rows.outer_step[1], rows.inner_step[1]);
  };
  if (block.each == 1) return run(fused_add_rmsnorm_kernel<T, W, N, 1>);
  if constexpr (most == 4) {
    if (block.each == 4) return run(fused_add_rmsnorm_kernel<T, W, N, 4>);
  }
  run(fused_add_rmsnorm_kernel<T, W, N, 2>);
}

inline void fused_add_rmsnorm(Tensor& input, Tensor& residual, const Tensor& weight, double eps) {
  constexpr const char* op = "fused_add_rmsnorm";
  check_cuda(op, "input", input);
  check_like(op, "residual", residual, input);
  check_shape(op, "residual", residual, input);
  check_dense_rows(op, "input", input);
  check_dense_rows(op, "residual", residual);
  check_written(op, "input", input);
  check_written(op, "residual", residual);
  check_disjoint(op, "input", input, "residual", residual);
  check_weight(op, weight, input);
  check_disjoint(op, "input", input, "weight", weight);
  check_disjoint(op, "residual", residual, "weight", weight);
  if (input.numel() == 0) return;
  const Launch launch(op, input);
  const int hidden = static_cast<int>(input.size(-1));
  dispatch_floating(op, input, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = 16 / sizeof(T);
    for_each_rows<2>(op, {&input, &residual}, [&](const Rows<2>& rows) {
      const bool vectors = hidden % N == 0 && reinterpret_cast<uint64_t>(weight.data) % 16 == 0 &&
                           aligned_rows(rows, 0, sizeof(T)) && aligned_rows(rows, 1, sizeof(T));
      const bool known = weight.dtype == input.dtype || weight.dtype == DType::float32;
      if (!vectors) return launch_fused_add_rmsnorm_any<T, 1>(launch, rows, weight, static_cast<float>(eps), hidden);
      if (!known) return launch_fused_add_rmsnorm_any<T, N>(launch, rows, weight, static_cast<float>(eps), hidden);
      dispatch_weight<T>(input, weight, [&](auto weight_type) {
        using W = typename decltype(weight_type)::type;
        launch_fused_add_rmsnorm<T, W>(launch, rows, weight, static_cast<float>(eps), hidden);
      });
    });
  });
  check_launch(op);
}

}  // namespace rapid_llm

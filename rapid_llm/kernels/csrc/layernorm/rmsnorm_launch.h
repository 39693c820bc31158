// rmsnorm's launcher: checks, then a row in registers where vectors fit, else the kernel that takes anything.
#pragma once

#include "layernorm/norm_launch.h"
#include "layernorm/rmsnorm.cuh"

namespace rapid_llm {

template <class T, int N>
void launch_rmsnorm_any(const Launch& launch, const Rows<2>& rows, const Tensor& weight, float eps, int hidden) {
  const dim3 threads = row_block<N>(rows.count, (hidden + N - 1) / N, 4).threads;
  rmsnorm_any_kernel<T, N><<<launch.blocks(rows.count, threads.y), threads, 0, launch.stream()>>>(
      static_cast<T*>(rows.data[1]), static_cast<const T*>(rows.data[0]), any_floats(weight), eps, 1.0f / hidden,
      hidden, rows.count, rows.inner, rows.outer_step[0], rows.inner_step[0], rows.outer_step[1], rows.inner_step[1]);
}

// The most vectors a thread that registers hold: the row's and the weight's.
template <class T, class W>
constexpr int rmsnorm_vectors = sizeof(T) == 2 && sizeof(W) == 4 ? 2 : 4;

template <class T, class W>
void launch_rmsnorm(const Launch& launch, const Rows<2>& rows, const Tensor& weight, float eps, int hidden) {
  constexpr int N = 16 / sizeof(T), most = rmsnorm_vectors<T, W>;
  const RowBlock block = row_block<N>(rows.count, hidden / N, most);
  if (block.each == 0) return launch_rmsnorm_any<T, N>(launch, rows, weight, eps, hidden);
  const auto run = [&](auto kernel) {
    kernel<<<launch.blocks(rows.count, block.threads.y), block.threads, 0, launch.stream()>>>(
        static_cast<T*>(rows.data[1]), static_cast<const T*>(rows.data[0]), weight.as<W>(), eps, 1.0f / hidden, hidden,
        rows.count, rows.inner, rows.outer_step[0], rows.inner_step[0], rows.outer_step[1], rows.inner_step[1]);
  };
  if (block.each == 1) return run(rmsnorm_kernel<T, W, N, 1>);
  if constexpr (most == 4) {
    if (block.each == 4) return run(rmsnorm_kernel<T, W, N, 4>);
  }
  run(rmsnorm_kernel<T, W, N, 2>);
}

inline void rmsnorm(Tensor& out, const Tensor& input, const Tensor& weight, double eps) {
  check_cuda("rmsnorm", "input", input);
  check_like("rmsnorm", "out", out, input);
  check_shape("rmsnorm", "out", out, input);
  check_dense_rows("rmsnorm", "input", input);
  check_dense_rows("rmsnorm", "out", out);
  check_written("rmsnorm", "out", out);
  check_alias("rmsnorm", out, "input", input);
  check_weight("rmsnorm", weight, input);
  check_disjoint("rmsnorm", "out", out, "weight", weight);
  if (input.numel() == 0) return;
  const Launch launch("rmsnorm", input);
  const int hidden = static_cast<int>(input.size(-1));
  dispatch_floating("rmsnorm", input, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = 16 / sizeof(T);
    for_each_rows<2>("rmsnorm", {&input, &out}, [&](const Rows<2>& rows) {
      const bool vectors = hidden % N == 0 && reinterpret_cast<uint64_t>(weight.data) % 16 == 0 &&
                           aligned_rows(rows, 0, sizeof(T)) && aligned_rows(rows, 1, sizeof(T));
      const bool known = weight.dtype == input.dtype || weight.dtype == DType::float32;
      if (!vectors) return launch_rmsnorm_any<T, 1>(launch, rows, weight, static_cast<float>(eps), hidden);
      if (!known) return launch_rmsnorm_any<T, N>(launch, rows, weight, static_cast<float>(eps), hidden);
      dispatch_weight<T>(input, weight, [&](auto weight_type) {
        using W = typename decltype(weight_type)::type;
        launch_rmsnorm<T, W>(launch, rows, weight, static_cast<float>(eps), hidden);
      });
    });
  });
  check_launch("rmsnorm");
}

}  // namespace rapid_llm

// silu_and_mul's launcher: checks, then 16-byte vectors where both halves of every row are aligned, else elements.
#pragma once

#include "activation/silu_and_mul.cuh"
#include "rapid_llm/launch.h"
#include "rapid_llm/rows.h"

namespace rapid_llm {

template <class T, int N, int V>
void launch_silu_and_mul(const Launch& launch, const Rows<2>& rows, int64_t half) {
  const int64_t vectors = half / N;
  // Whole warps that share a row evenly, so that its last block is nearly full too.
  const int64_t chunks = (vectors + 256 * V - 1) / (256 * V);
  const int64_t threads = ((vectors + chunks * V - 1) / (chunks * V) + 31) / 32 * 32;
  silu_and_mul_kernel<T, N, V><<<launch.blocks(rows.count * chunks, 1), static_cast<unsigned>(threads), 0,
                                 launch.stream()>>>(
      static_cast<T*>(rows.data[1]), static_cast<const T*>(rows.data[0]), half, static_cast<u32>(chunks), rows.inner,
      rows.outer_step[0], rows.inner_step[0], rows.outer_step[1], rows.inner_step[1]);
}

inline void silu_and_mul(Tensor& out, const Tensor& input) {
  constexpr const char* op = "silu_and_mul";
  check_cuda(op, "input", input);
  check_like(op, "out", out, input);
  check_dense_rows(op, "input", input);
  const int64_t half = input.size(-1) / 2;
  RAPID_CHECK(input.size(-1) == 2 * half, op, ": the last dimension holds gate and up and must be even, got ",
              input.size(-1));
  bool shape = out.dim == input.dim && out.size(-1) == half;
  for (int at = 0; shape && at < input.dim - 1; ++at) shape = out.sizes[at] == input.sizes[at];
  RAPID_CHECK(shape, op, ": out must have the same shape as input with half its last dimension, ", half, ": got ",
              out.shape(), " for ", input.shape());
  check_dense_rows(op, "out", out);
  check_written(op, "out", out);
  check_disjoint(op, "out", out, "input", input);
  if (out.numel() == 0) return;
  const Launch launch(op, input);
  dispatch_floating(op, input, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int N = 16 / sizeof(T);
    for_each_rows<2>(op, {&input, &out}, [&](const Rows<2>& rows) {
      if (half % N != 0 || !aligned_rows(rows, 0, sizeof(T)) || !aligned_rows(rows, 1, sizeof(T))) {
        return launch_silu_and_mul<T, 1, 4>(launch, rows, half);
      }
      // Few vectors want many blocks, many want several loads in flight in each thread.
      if (rows.count * (half / N) < 132 * 2048) return launch_silu_and_mul<T, N, 1>(launch, rows, half);
      launch_silu_and_mul<T, N, 2>(launch, rows, half);
    });
  });
  check_launch(op);
}

}  // namespace rapid_llm

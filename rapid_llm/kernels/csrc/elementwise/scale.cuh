// scale: out = input * factor, the product taken in fp32 and rounded once.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

// `out` may be `input`: each thread reads its elements before it writes them, so no pointer is __restrict__.
// Vectors 0 .. vectors - 1 are whole; the last block also takes the `count - vectors * N` elements after them.
template <class T, int N, int UNROLL>
__global__ void __launch_bounds__(256) scale_kernel(T* out, const T* input, float factor, i64 vectors, i64 count) {
  using V = Vec<T, N>;
  const i64 first = static_cast<i64>(blockIdx.x) * (256 * UNROLL) + threadIdx.x;
  V held[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const i64 at = first + u * 256;
    if (at < vectors) held[u] = reinterpret_cast<const V*>(input)[at];
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const i64 at = first + u * 256;
    if (at >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) held[u].at[i] = from_float<T>(to_float(held[u].at[i]) * factor);
    reinterpret_cast<V*>(out)[at] = held[u];
  }
  if (blockIdx.x == gridDim.x - 1) {
    const i64 at = vectors * N + threadIdx.x;
    if (at < count) out[at] = from_float<T>(to_float(input[at]) * factor);
  }
}

}  // namespace rapid_llm

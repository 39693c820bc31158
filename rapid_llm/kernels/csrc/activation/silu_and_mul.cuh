// silu_and_mul: out = gate / (1 + exp(-gate)) * up, in fp32, rounded once; gate and up are the halves of input's rows.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

__device__ __forceinline__ float silu_times(float gate, float up) {
  // Not __fdividef, which is 0 for a divisor above 2^126 where a reciprocal is still a subnormal number.
  float reciprocal;
  asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + __expf(-gate)));
  return gate * reciprocal * up;
}

// Block b takes chunk b % chunks of row b / chunks, blockDim.x * V vectors of N; `half` is a multiple of N. Rows and
// both their halves begin on boundaries of a vector.
template <class T, int N, int V>
__global__ void __launch_bounds__(256) silu_and_mul_kernel(T* __restrict__ out, const T* __restrict__ input, i64 half,
                                                           u32 chunks, i64 inner, i64 input_outer, i64 input_inner,
                                                           i64 out_outer, i64 out_inner) {
  const i64 row = blockIdx.x / chunks;
  const i64 vectors = half / N;
  const i64 first = static_cast<i64>(blockIdx.x % chunks) * (blockDim.x * V) + threadIdx.x;
  const T* from = input + row_start(row, inner, input_outer, input_inner);
  const Vec<T, N>* gates = reinterpret_cast<const Vec<T, N>*>(from);
  const Vec<T, N>* ups = reinterpret_cast<const Vec<T, N>*>(from + half);
  Vec<T, N> gate[V], up[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const i64 at = first + v * blockDim.x;
    if (at < vectors) gate[v] = gates[at], up[v] = ups[at];
  }
  Vec<T, N>* to = reinterpret_cast<Vec<T, N>*>(out + row_start(row, inner, out_outer, out_inner));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const i64 at = first + v * blockDim.x;
    if (at >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) gate[v].at[i] = from_float<T>(silu_times(to_float(gate[v].at[i]), to_float(up[v].at[i])));
    to[at] = gate[v];
  }
}

}  // namespace rapid_llm

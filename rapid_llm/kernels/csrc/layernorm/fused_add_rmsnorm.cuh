// fused_add_rmsnorm: residual += input, then input = rmsnorm of the unrounded sum, in fp32, each rounded once.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

// A row in the registers of blockDim.x threads (whole warps): both tensors are read once and written once. `hidden` is
// a multiple of N and at most blockDim.x * V * N; rows begin on 16-byte boundaries. A block holds blockDim.y rows, more
// than one only where blockDim.x is 32.
template <class T, class W, int N, int V>
__global__ void __launch_bounds__(1024) fused_add_rmsnorm_kernel(T* __restrict__ input, T* __restrict__ residual,
                                                                 const W* __restrict__ weight, float eps,
                                                                 float inverse_hidden, int hidden, i64 rows, i64 inner,
                                                                 i64 input_outer, i64 input_inner, i64 residual_outer,
                                                                 i64 residual_inner) {
  static_assert(V * N <= 16, "more floats than fit into the registers of 1024 threads");
  __shared__ float shared[32];
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // the same for a whole warp, and blocks of more warps hold one row
  const int vectors = hidden / N;
  Vec<T, N>* x = reinterpret_cast<Vec<T, N>*>(input + row_start(row, inner, input_outer, input_inner));
  Vec<T, N>* sum = reinterpret_cast<Vec<T, N>*>(residual + row_start(row, inner, residual_outer, residual_inner));
  Vec<T, N> one[V], two[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at < vectors) one[v] = x[at], two[v] = sum[at];
  }
  float total[V][N], squares = 0.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      total[v][i] = to_float(one[v].at[i]) + to_float(two[v].at[i]);
      squares += total[v][i] * total[v][i];
      two[v].at[i] = from_float<T>(total[v][i]);
    }
    sum[at] = two[v];
  }
  Pack<W, N> scale[V];  // asked for before the sum is awaited
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at < vectors) scale[v].load(weight + at * N);
  }
  const float inverse = rsqrtf(block_sum<false>(squares, shared) * inverse_hidden + eps);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) one[v].at[i] = from_float<T>(total[v][i] * inverse * scale[v].at(i));
    x[at] = one[v];
  }
}

// Whatever the kernel above does not take: any length, any alignment where N is 1, a weight of any floating dtype. Both
// tensors are read twice, and the sum is taken again, because the stored one is rounded. Blocks as above.
template <class T, int N>
__global__ void __launch_bounds__(1024) fused_add_rmsnorm_any_kernel(T* __restrict__ input, T* __restrict__ residual,
                                                                     AnyFloats weight, float eps, float inverse_hidden,
                                                                     int hidden, i64 rows, i64 inner, i64 input_outer,
                                                                     i64 input_inner, i64 residual_outer,
                                                                     i64 residual_inner) {
  __shared__ float shared[32];
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  T* x = input + row_start(row, inner, input_outer, input_inner);
  T* sum = residual + row_start(row, inner, residual_outer, residual_inner);
  const int step = blockDim.x * N;
  float squares = 0.0f;
  for (int at = threadIdx.x * N; at < hidden; at += step) {
    float one[N], two[N];
    load_floats<N>(x + at, one);
    load_floats<N>(sum + at, two);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += (one[i] + two[i]) * (one[i] + two[i]);
  }
  const float inverse = rsqrtf(block_sum<false>(squares, shared) * inverse_hidden + eps);
  for (int at = threadIdx.x * N; at < hidden; at += step) {
    float one[N], two[N], scale[N];
    load_floats<N>(x + at, one);
    load_floats<N>(sum + at, two);
    weight.load<N>(at, scale);
    Vec<T, N> stored, normed;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      stored.at[i] = from_float<T>(one[i] + two[i]);
      normed.at[i] = from_float<T>((one[i] + two[i]) * inverse * scale[i]);
    }
    *reinterpret_cast<Vec<T, N>*>(sum + at) = stored;
    *reinterpret_cast<Vec<T, N>*>(x + at) = normed;
  }
}

}  // namespace rapid_llm

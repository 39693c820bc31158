// rmsnorm: out = input / sqrt(mean(input**2) + eps) * weight for each row, in fp32, rounded once.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

// A row in the registers of blockDim.x threads (whole warps, 512 at most where V * N is over 16, else 1024): one read,
// one write. `hidden` is a multiple of N and at most blockDim.x * V * N; rows begin on 16-byte boundaries. A block holds blockDim.y rows, more than one only where
// blockDim.x is 32. `out` may be `input`: a thread reads its elements before it writes them, and no other reads them.
template <class T, class W, int N, int V>
__global__ void __launch_bounds__(V * N > 16 ? 512 : 1024)
    rmsnorm_kernel(T* out, const T* input, const W* __restrict__ weight, float eps, float inverse_hidden, int hidden,
                   i64 rows, i64 inner, i64 input_outer, i64 input_inner, i64 out_outer, i64 out_inner) {
  __shared__ float shared[32];
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // the same for a whole warp, and blocks of more warps hold one row
  const int vectors = hidden / N;
  const Vec<T, N>* from = reinterpret_cast<const Vec<T, N>*>(input + row_start(row, inner, input_outer, input_inner));
  Vec<T, N> held[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at < vectors) held[v] = from[at];
  }
  Pack<W, N> scale[V];  // asked for before the sum is awaited
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at < vectors) scale[v].load(weight + at * N);
  }
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (threadIdx.x + v * blockDim.x >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) squares += to_float(held[v].at[i]) * to_float(held[v].at[i]);
  }
  const float inverse = rsqrtf(block_sum<false>(squares, shared) * inverse_hidden + eps);
  Vec<T, N>* to = reinterpret_cast<Vec<T, N>*>(out + row_start(row, inner, out_outer, out_inner));
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int at = threadIdx.x + v * blockDim.x;
    if (at >= vectors) break;
#pragma unroll
    for (int i = 0; i < N; ++i) held[v].at[i] = from_float<T>(to_float(held[v].at[i]) * inverse * scale[v].at(i));
    to[at] = held[v];
  }
}

// Whatever the kernel above does not take: any length, any alignment where N is 1, a weight of any floating dtype. The
// row is read twice, the second time from cache. Blocks as above.
template <class T, int N>
__global__ void __launch_bounds__(1024) rmsnorm_any_kernel(T* out, const T* input, AnyFloats weight, float eps,
                                                           float inverse_hidden, int hidden, i64 rows, i64 inner,
                                                           i64 input_outer, i64 input_inner, i64 out_outer,
                                                           i64 out_inner) {
  __shared__ float shared[32];
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const T* from = input + row_start(row, inner, input_outer, input_inner);
  T* to = out + row_start(row, inner, out_outer, out_inner);
  const int step = blockDim.x * N;
  float squares = 0.0f;
  for (int at = threadIdx.x * N; at < hidden; at += step) {
    float x[N];
    load_floats<N>(from + at, x);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += x[i] * x[i];
  }
  const float inverse = rsqrtf(block_sum<false>(squares, shared) * inverse_hidden + eps);
  for (int at = threadIdx.x * N; at < hidden; at += step) {
    float x[N], scale[N];
    load_floats<N>(from + at, x);
    weight.load<N>(at, scale);
    Vec<T, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) y.at[i] = from_float<T>(x[i] * inverse * scale[i]);
    *reinterpret_cast<Vec<T, N>*>(to + at) = y;
  }
}

}  // namespace rapid_llm

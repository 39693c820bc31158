// rope: query and key rotated in place by their positions, in fp32, rounded once.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

// (tokens, heads, head_dim) whose last dimension is dense; strides in elements. Written in place: no pointer here is
// __restrict__, and every thread loads what it needs before it stores.
template <class T>
struct Heads {
  T* data;
  i64 token, head;

  __device__ __forceinline__ T* at(i64 t, int h) const { return data + t * token + h * head; }
};

// Cosines, then sines, of `half` pairs for each of `rows` positions.
struct Angles {
  const float* table;
  const void* positions;  // int64 where `wide`, else int32
  i64 row, step, rows;
  int half;
  bool wide;

  // Null for a position outside the table, which must not be read beyond its end.
  __device__ __forceinline__ const float* of(i64 token) const {
    const i64 at = wide ? static_cast<const i64*>(positions)[token * step]
                        : static_cast<const int*>(positions)[token * step];
    return at >= 0 && at < rows ? table + at * row : nullptr;
  }
};

// N pairs of one head: 2 N consecutive elements where pairs are neighbours, else N and the N that lie `half` further on.
template <class T, int N, bool INTERLEAVED>
struct Pairs {
  Vec<T, N> part[2];

  static __device__ __forceinline__ int offset(int first, int p, int half) {
    return INTERLEAVED ? 2 * first + p * N : first + p * half;
  }

  __device__ __forceinline__ void load(const T* head, int first, int half) {
#pragma unroll
    for (int p = 0; p < 2; ++p) part[p] = *reinterpret_cast<const Vec<T, N>*>(head + offset(first, p, half));
  }
  __device__ __forceinline__ void store(T* head, int first, int half) const {
#pragma unroll
    for (int p = 0; p < 2; ++p) *reinterpret_cast<Vec<T, N>*>(head + offset(first, p, half)) = part[p];
  }

  // Pair i is elements 2 i and 2 i + 1 of the two parts in a row, or element i of each part.
  __device__ __forceinline__ T& element(int i, int which) {
    if constexpr (INTERLEAVED) return part[(2 * i + which) / N].at[(2 * i + which) % N];
    return part[which].at[i];
  }

  // By the angles at `cosines`; NaN where there are none, which makes the fault visible.
  __device__ __forceinline__ void rotate(const float* cosines, int half) {
    float cosine[N], sine[N];
    if (cosines != nullptr) {
      load_floats<N>(cosines, cosine);
      load_floats<N>(cosines + half, sine);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) cosine[i] = sine[i] = __int_as_float(0x7fffffff);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float a = to_float(element(i, 0)), b = to_float(element(i, 1));
      element(i, 0) = from_float<T>(a * cosine[i] - b * sine[i]);
      element(i, 1) = from_float<T>(b * cosine[i] + a * sine[i]);
    }
  }
};

// `blocks` blocks a token; its items are N pairs of each head of query, then of key. N is 1, or 16 bytes of elements,
// to which then every head and angle is aligned and of which `half` is a multiple.
template <class T, int N, bool INTERLEAVED>
__global__ void __launch_bounds__(128)
    rope_kernel(Heads<T> query, Heads<T> key, Angles angles, int query_heads, int heads, unsigned blocks) {
  const i64 token = blockIdx.x / blocks;
  const int item = static_cast<int>(blockIdx.x % blocks * blockDim.x + threadIdx.x);
  const int each = angles.half / N, head = item / each, first = item % each * N;
  if (head >= heads) return;
  T* data = head < query_heads ? query.at(token, head) : key.at(token, head - query_heads);
  Pairs<T, N, INTERLEAVED> pairs;
  pairs.load(data, first, angles.half);
  const float* cosines = angles.of(token);
  pairs.rotate(cosines == nullptr ? nullptr : cosines + first, angles.half);
  pairs.store(data, first, angles.half);
}

}  // namespace rapid_llm

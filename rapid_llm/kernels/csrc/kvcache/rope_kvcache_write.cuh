// rope_kvcache_write: rope, and the write of the rotated key and of value into the paged cache.
#pragma once

#include "rope/rope.cuh"

namespace rapid_llm {

// (pages, page_size, heads, head_dim) whose last dimension is dense; strides in elements.
template <class T>
struct Cache {
  T* data;
  i64 page, row, head;

  __device__ __forceinline__ T* at(i64 in_page, i64 in_row, int h) const {
    return data + in_page * page + in_row * row + h * head;
  }
};

struct Slots {
  const i64* data;
  i64 step, count, page_size;
};

// `blocks` blocks a token; its items are N pairs of each head of query, then of key; then N elements of each of value's
// heads, and of what of key's is not rotated. N is 1, or 16 bytes of elements, to which then every row is aligned and
// of which `half` and `dim` are multiples.
template <class T, int N, bool INTERLEAVED>
__global__ void __launch_bounds__(128)
    rope_kvcache_write_kernel(Heads<T> query, Heads<T> key, Heads<T> value, Cache<T> k_cache, Cache<T> v_cache,
                              Angles angles, Slots slots, int query_heads, int kv_heads, int dim, unsigned blocks) {
  using V = Vec<T, N>;
  const i64 token = blockIdx.x / blocks;
  int item = static_cast<int>(blockIdx.x % blocks * blockDim.x + threadIdx.x);
  const int half = angles.half, each = half / N, rotated = (query_heads + kv_heads) * each;
  const i64 slot = slots.data[token * slots.step];
  // Padding, and a slot beyond the cache, write nothing into it.
  const bool kept = slot >= 0 && slot < slots.count;
  if (item < rotated) {
    const int head = item / each, first = item % each * N;
    const bool of_query = head < query_heads;
    T* data = of_query ? query.at(token, head) : key.at(token, head - query_heads);
    Pairs<T, N, INTERLEAVED> pairs;
    pairs.load(data, first, half);
    const float* cosines = angles.of(token);
    pairs.rotate(cosines == nullptr ? nullptr : cosines + first, half);
    pairs.store(data, first, half);
    if (of_query || !kept) return;
    pairs.store(k_cache.at(slot / slots.page_size, slot % slots.page_size, head - query_heads), first, half);
    return;
  }
  if (!kept) return;
  item -= rotated;  // what moves unchanged
  const bool of_value = item < kv_heads * (dim / N);
  const int wide = of_value ? dim / N : (dim - 2 * half) / N;
  if (!of_value) item -= kv_heads * (dim / N);
  if (item >= kv_heads * wide) return;
  const int head = item / wide, at = item % wide * N + (of_value ? 0 : 2 * half);
  const T* from = (of_value ? value : key).at(token, head) + at;
  T* to = (of_value ? v_cache : k_cache).at(slot / slots.page_size, slot % slots.page_size, head) + at;
  *reinterpret_cast<V*>(to) = *reinterpret_cast<const V*>(from);
}

}  // namespace rapid_llm

// rope_kvcache_write of fp32 heads on a CPU: rotate, and store what was rotated, while it lies in the first-level cache.
//
// Why not PyTorch: in decode the two ops are a dozen tiny aten calls per layer; here they are one call.

#include <cstdint>
#include <cstring>

#include "overlap.h"

namespace {

using rapid_llm::Pieces;

// Strides in elements; the last dimension is dense. Filled by the wrapper, field by field, as 64-bit integers.
struct Call {
  float *query, *key;
  const float* value;
  float *k_cache, *v_cache;
  const std::int64_t* positions;
  const float* table;
  const std::int64_t* slots;
  std::int64_t tokens, query_heads, heads, dim, pages, page_size, rows, rotary, interleaved, threads;
  std::int64_t query_strides[3], key_strides[3], value_strides[3], k_cache_strides[4], v_cache_strides[4];
};
static_assert(sizeof(Call) == 35 * 8, "the wrapper packs 35 integers");

// `pair` is the distance of a pair's second element, `step` that of the next pair's first.
inline void rotate(float* x, const float* cosine, std::int64_t half, std::int64_t pair, std::int64_t step) {
  const float* sine = cosine + half;
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    float* a = x + i * step;
    const float first = a[0], second = a[pair];
    a[0] = first * cosine[i] - second * sine[i];
    a[pair] = second * cosine[i] + first * sine[i];
  }
}

// What is wrong with the call, as the wrapper numbers it, or 0.
int fault(const Call& c) {
  const std::int64_t query[3] = {c.tokens, c.query_heads, c.dim}, heads[3] = {c.tokens, c.heads, c.dim};
  const std::int64_t cache[4] = {c.pages, c.page_size, c.heads, c.dim};
  if (!rapid_llm::distinct_elements(3, query, c.query_strides)) return 1;
  if (!rapid_llm::distinct_elements(3, heads, c.key_strides)) return 2;
  if (!rapid_llm::distinct_elements(4, cache, c.k_cache_strides)) return 3;
  if (!rapid_llm::distinct_elements(4, cache, c.v_cache_strides)) return 4;
  const Pieces q(c.query, 3, query, c.query_strides, 4), k(c.key, 3, heads, c.key_strides, 4);
  const Pieces v(c.value, 3, heads, c.value_strides, 4);
  const Pieces keys(c.k_cache, 4, cache, c.k_cache_strides, 4), values(c.v_cache, 4, cache, c.v_cache_strides, 4);
  if (overlap(q, k)) return 5;
  if (overlap(q, v)) return 6;
  if (overlap(k, v)) return 7;
  if (overlap(keys, values)) return 8;
  return 0;
}

void one_token(const Call& c, std::int64_t t) {
  const std::int64_t half = c.rotary / 2, pair = c.interleaved ? 1 : half, step = c.interleaved ? 2 : 1;
  const float* cosine = c.table + c.positions[t] * c.rotary;
  for (std::int64_t h = 0; h < c.query_heads; ++h)
    rotate(c.query + t * c.query_strides[0] + h * c.query_strides[1], cosine, half, pair, step);
  float* key = c.key + t * c.key_strides[0];
  for (std::int64_t h = 0; h < c.heads; ++h) rotate(key + h * c.key_strides[1], cosine, half, pair, step);
  const std::int64_t slot = c.slots[t];
  if (slot < 0) return;
  const std::int64_t page = slot / c.page_size, row = slot % c.page_size, bytes = c.dim * 4;
  const std::int64_t *k = c.k_cache_strides, *v = c.v_cache_strides;
  const float* value = c.value + t * c.value_strides[0];
  for (std::int64_t h = 0; h < c.heads; ++h) {
    std::memcpy(c.k_cache + page * k[0] + row * k[1] + h * k[2], key + h * c.key_strides[1], bytes);
    std::memcpy(c.v_cache + page * v[0] + row * v[1] + h * v[2], value + h * c.value_strides[1], bytes);
  }
}

}  // namespace

// 0, or why nothing was written: a fault's number; 16 + 2 t for token t's position, 17 + 2 t for its slot.
extern "C" std::int64_t rope_kvcache_write(const void* packed) {
  Call c;
  std::memcpy(&c, packed, sizeof c);
  if (const int found = fault(c)) return found;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (c.positions[t] < 0 || c.positions[t] >= c.rows) return 16 + 2 * t;
    if (c.slots[t] >= c.pages * c.page_size) return 17 + 2 * t;
  }
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1 && c.tokens > 8) schedule(static)
  for (std::int64_t t = 0; t < c.tokens; ++t) one_token(c, t);
  return 0;
}

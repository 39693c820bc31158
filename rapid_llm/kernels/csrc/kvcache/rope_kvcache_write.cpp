// rope_kvcache_write of fp32 heads on a CPU: rotate, and store what was rotated, while it lies in the first-level cache.
//
// Why not PyTorch: in decode the two ops are a dozen tiny aten calls per layer; here they are one call.

#include <cstdint>
#include <cstring>
#include <string>

#include "../include/rapid_llm/tensor.h"

namespace {

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

rapid_llm::Tensor view(const float* data, int dim, const std::int64_t* sizes, const std::int64_t* strides) {
  rapid_llm::Tensor tensor;
  tensor.data = const_cast<float*>(data);
  tensor.dtype = rapid_llm::DType::float32;
  tensor.dim = dim;
  tensor.sizes = sizes;
  tensor.strides = strides;
  return tensor;
}

void check_memory(const Call& c) {
  using namespace rapid_llm;
  constexpr const char* op = "rope_kvcache_write";
  const std::int64_t query_sizes[3] = {c.tokens, c.query_heads, c.dim}, sizes[3] = {c.tokens, c.heads, c.dim};
  const std::int64_t cache_sizes[4] = {c.pages, c.page_size, c.heads, c.dim};
  const Tensor query = view(c.query, 3, query_sizes, c.query_strides), key = view(c.key, 3, sizes, c.key_strides);
  const Tensor value = view(c.value, 3, sizes, c.value_strides);
  const Tensor k_cache = view(c.k_cache, 4, cache_sizes, c.k_cache_strides);
  const Tensor v_cache = view(c.v_cache, 4, cache_sizes, c.v_cache_strides);
  check_written(op, "query", query);
  check_written(op, "key", key);
  check_written(op, "k_cache", k_cache);
  check_written(op, "v_cache", v_cache);
  check_disjoint(op, "query", query, "key", key);
  check_disjoint(op, "query", query, "value", value);
  check_disjoint(op, "key", key, "value", value);
  check_disjoint(op, "k_cache", k_cache, "v_cache", v_cache);
}

thread_local std::string fault;

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

// What was wrong with this thread's last call that returned 1.
extern "C" const char* rope_kvcache_write_fault() { return fault.c_str(); }

// 0; or nothing was written: 1 for memory that overlaps, 2 + 2 t for token t's position, 3 + 2 t for its slot.
extern "C" std::int64_t rope_kvcache_write(const void* packed) {
  Call c;
  std::memcpy(&c, packed, sizeof c);
  try {
    check_memory(c);
  } catch (const std::exception& error) {
    fault = error.what();
    return 1;
  }
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    if (c.positions[t] < 0 || c.positions[t] >= c.rows) return 2 + 2 * t;
    if (c.slots[t] >= c.pages * c.page_size) return 3 + 2 * t;
  }
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1 && c.tokens > 8) schedule(static)
  for (std::int64_t t = 0; t < c.tokens; ++t) one_token(c, t);
  return 0;
}

// What kvcache.write for the CPU shares with rope_kvcache_write: the checks, and where a slot's rows lie.
#pragma once

#include <cstring>

#include "rapid_llm/host.h"

namespace rapid_llm {

inline void check_cache_write(const char* op, const Tensor& key, const Tensor& value, const Tensor& k_cache,
                              const Tensor& v_cache, const Tensor& slots) {
  check_cpu(op, "key", key);
  check_cpu(op, "value", value, key.dtype);
  check_cpu(op, "k_cache", k_cache, key.dtype);
  check_cpu(op, "v_cache", v_cache, key.dtype);
  check_cpu(op, "slot_mapping", slots);
  RAPID_CHECK(key.dim == 3, op, ": key must be (tokens, kv_heads, head_dim), got ", key.shape());
  check_shape(op, "value", value, key);
  check_shape(op, "v_cache", v_cache, k_cache);
  RAPID_CHECK(k_cache.dim == 4 && k_cache.size(2) == key.size(1) && k_cache.size(3) == key.size(2), op,
              ": caches must have the same shape (pages, page_size, kv_heads, head_dim) as key in heads and width, ",
              key.shape(), ": got ", k_cache.shape());
  RAPID_CHECK(slots.dim == 1 && slots.size(0) == key.size(0) && slots.dtype == DType::int64, op,
              ": slot_mapping must be int64 of shape (", key.size(0), ",): got ", name_of(slots.dtype), " ",
              slots.shape());
  check_dense_rows(op, "key", key);
  check_dense_rows(op, "value", value);
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  check_written(op, "k_cache", k_cache);
  check_written(op, "v_cache", v_cache);
  check_disjoint(op, "k_cache", k_cache, "v_cache", v_cache);
}

// Before anything is written. Negative slots are padding.
inline void check_slots(const char* op, const Indices& slots, int64_t tokens, const Tensor& cache) {
  const int64_t pages = cache.size(0), page_size = cache.size(1);
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] >= pages * page_size) {
      fail<IndexError>(op, ": slot ", slots[t], " of token ", t, " is beyond ", pages, " pages of ", page_size);
    }
  }
}

// Rows of bytes, so that one function serves every dtype.
inline void store(const Tensor& cache, int64_t slot, const Tensor& from, int64_t token) {
  const int64_t size = size_of(from.dtype), page = slot / cache.size(1), row = slot % cache.size(1);
  char* to = cache.as<char>() + (page * cache.stride(0) + row * cache.stride(1)) * size;
  const char* source = from.as<const char>() + token * from.stride(0) * size;
  for (int64_t h = 0; h < from.size(1); ++h) {
    std::memcpy(to + h * cache.stride(2) * size, source + h * from.stride(1) * size, from.size(2) * size);
  }
}

}  // namespace rapid_llm

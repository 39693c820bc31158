// What rope for the CPU shares with rope_kvcache_write: the checks and one token's rotation.
#pragma once

#include "rapid_llm/host.h"

namespace rapid_llm {

inline void check_rotation(const char* op, const Tensor& query, const Tensor& key, const Tensor& positions,
                           const Tensor& table) {
  check_cpu(op, "query", query, DType::float32);
  check_cpu(op, "key", key, DType::float32);
  check_cpu(op, "cos_sin_cache", table);
  RAPID_CHECK(query.dim == 3 && key.dim == 3 && query.size(0) == key.size(0) && query.size(2) == key.size(2), op,
              ": query and key must have the same shape (tokens, heads, head_dim) but for their heads: got ",
              query.shape(), " and ", key.shape());
  RAPID_CHECK(positions.dim == 1 && positions.size(0) == query.size(0), op, ": positions must have shape (",
              query.size(0), ",): got ", positions.shape());
  const bool fits = table.dim == 2 && table.size(1) % 2 == 0 && table.size(1) <= query.size(2);
  RAPID_CHECK(fits && table.dtype == DType::float32, op,
              ": cos_sin_cache must be float32 (max_position, rotary_dim), rotary_dim even and at most head_dim ",
              query.size(2), ": got ", name_of(table.dtype), " ", table.shape());
  check_dense_rows(op, "query", query);
  check_dense_rows(op, "key", key);
  check_dense_rows(op, "cos_sin_cache", table);
  check_written(op, "query", query);
  check_written(op, "key", key);
  check_disjoint(op, "query", query, "key", key);
}

// Before anything is written.
inline void check_positions(const char* op, const Indices& positions, int64_t tokens, const Tensor& table) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= table.size(0)) {
      fail<IndexError>(op, ": position ", positions[t], " of token ", t, " is not in [0, ", table.size(0), ")");
    }
  }
}

// Heads of one token: `count` of them, `step` elements apart.
inline void rotate(float* heads, int64_t count, int64_t step, const float* cosine, int64_t half, bool interleaved) {
  const float* sine = cosine + half;
  // The distance of a pair's second element, and that of the next pair's first.
  const int64_t pair = interleaved ? 1 : half, next = interleaved ? 2 : 1;
  for (int64_t h = 0; h < count; ++h) {
    float* x = heads + h * step;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      float* a = x + i * next;
      const float first = a[0], second = a[pair];
      a[0] = first * cosine[i] - second * sine[i];
      a[pair] = second * cosine[i] + first * sine[i];
    }
  }
}

}  // namespace rapid_llm

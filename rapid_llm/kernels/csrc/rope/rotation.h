// What rope's launcher shares with rope_kvcache_write's: checks, the kernel's views of tensors, and the grid.
#pragma once

#include <initializer_list>

#include "rapid_llm/launch.h"
#include "rope/rope.cuh"

namespace rapid_llm {

inline void check_place(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_cuda(op, name, tensor);
  RAPID_CHECK(tensor.device == like.device, op, ": ", name, " must be on the same CUDA device, cuda:", like.device,
              ": got cuda:", tensor.device);
}

inline void check_rotation(const char* op, const Tensor& query, const Tensor& key, const Tensor& positions,
                           const Tensor& table) {
  check_cuda(op, "query", query);
  check_like(op, "key", key, query);
  check_place(op, "positions", positions, query);
  check_place(op, "cos_sin_cache", table, query);
  RAPID_CHECK(query.dim == 3 && key.dim == 3 && query.size(0) == key.size(0) && query.size(2) == key.size(2), op,
              ": query and key must have the same shape (tokens, heads, head_dim) but for their heads: got ",
              query.shape(), " and ", key.shape());
  RAPID_CHECK(positions.dim == 1 && positions.size(0) == query.size(0) &&
                  (positions.dtype == DType::int64 || positions.dtype == DType::int32),
              op, ": positions must be int32 or int64 of shape (", query.size(0), ",): got ", name_of(positions.dtype),
              " ", positions.shape());
  RAPID_CHECK(table.dim == 2 && table.dtype == DType::float32 && table.size(1) % 2 == 0 && table.size(1) <= query.size(2),
              op, ": cos_sin_cache must be float32 (max_position, rotary_dim), rotary_dim even and at most head_dim ",
              query.size(2), ": got ", name_of(table.dtype), " ", table.shape());
  check_dense_rows(op, "query", query);
  check_dense_rows(op, "key", key);
  check_dense_rows(op, "cos_sin_cache", table);
  check_written(op, "query", query);
  check_written(op, "key", key);
  check_disjoint(op, "query", query, "key", key);
}

template <class T>
Heads<T> heads_of(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.stride(0), tensor.stride(1)};
}

inline Angles angles_of(const Tensor& positions, const Tensor& table) {
  return {table.as<const float>(), positions.data,    table.stride(0), positions.stride(0),
          table.size(0),           static_cast<int>(table.size(1) / 2), positions.dtype == DType::int64};
}

// Whether every row along the last dimension begins on a 16-byte boundary.
inline bool aligned_rows(std::initializer_list<const Tensor*> tensors) {
  uint64_t bits = 0;
  for (const Tensor* tensor : tensors) {
    bits |= reinterpret_cast<uint64_t>(tensor->data);
    for (int at = 0; at + 1 < tensor->dim; ++at) {
      if (tensor->sizes[at] > 1) bits |= static_cast<uint64_t>(tensor->strides[at] * size_of(tensor->dtype));
    }
  }
  return bits % 16 == 0;
}

// Blocks for `items` of each of `tokens`, and how many of them a token has.
struct TokenBlocks {
  unsigned threads, each, all;

  TokenBlocks(const char* op, const Launch& launch, int64_t tokens, int64_t items) {
    RAPID_CHECK(items <= 0x7fffff00, op, ": a token's heads hold more than 2^31 elements");
    threads = static_cast<unsigned>(items < 128 ? (items + 31) / 32 * 32 : 128);
    each = static_cast<unsigned>((items + threads - 1) / threads);
    all = launch.blocks(tokens * each, 1);
  }
};

}  // namespace rapid_llm

// How tensors of one leading shape are seen by kernels that work on rows: as few counted dimensions as their strides
// allow.
#pragma once

#include <array>

#include "rapid_llm/tensor.h"

namespace rapid_llm {

// A launch's rows: `count` of them, each `inner` in a group. Row r of tensor k begins at element
// r / inner * outer_step[k] + r % inner * inner_step[k] from data[k]; `inner` is 1 where one dimension says it all.
template <int TENSORS>
struct Rows {
  int64_t count = 1, inner = 1;
  std::array<int64_t, TENSORS> outer_step{}, inner_step{};
  std::array<void*, TENSORS> data{};
};

namespace detail {

template <int TENSORS>
struct Dim {
  int64_t size;
  std::array<int64_t, TENSORS> step;
};

// Loops on the host over whatever dimensions are more than two; most calls launch once.
template <int TENSORS, class F>
void walk(const Dim<TENSORS>* dims, int count, Rows<TENSORS> rows, const std::array<int64_t, TENSORS>& sizes, F&& f) {
  if (count > 2) {
    for (int64_t at = 0; at < dims[0].size; ++at) {
      walk<TENSORS>(dims + 1, count - 1, rows, sizes, f);
      for (int k = 0; k < TENSORS; ++k) {
        rows.data[k] = static_cast<char*>(rows.data[k]) + dims[0].step[k] * sizes[k];
      }
    }
    return;
  }
  if (count > 0) rows.count = dims[0].size, rows.outer_step = dims[0].step;
  if (count > 1) rows.inner = dims[1].size, rows.count *= rows.inner, rows.inner_step = dims[1].step;
  f(rows);
}

}  // namespace detail

// Calls `f(rows)` once per launch needed to cover the rows, all dimensions but the last, of tensors of one leading
// shape.
template <int TENSORS, class F>
void for_each_rows(const char* op, const std::array<const Tensor*, TENSORS>& tensors, F&& f) {
  constexpr int most = 16;
  const int leading = tensors[0]->dim - 1;
  RAPID_CHECK(leading <= most, op, ": takes up to ", most + 1, " dimensions, got ", leading + 1);
  detail::Dim<TENSORS> dims[most + 1];
  int count = 0;
  for (int at = 0; at < leading; ++at) {
    detail::Dim<TENSORS> dim{tensors[0]->sizes[at], {}};
    if (dim.size == 1) continue;
    for (int k = 0; k < TENSORS; ++k) dim.step[k] = tensors[k]->strides[at];
    bool merges = count > 0;  // the dimension before steps evenly over this one, in every tensor
    for (int k = 0; merges && k < TENSORS; ++k) merges = dims[count - 1].step[k] == dim.size * dim.step[k];
    if (merges) {
      dim.size *= dims[count - 1].size;
      dims[count - 1] = dim;
    } else {
      dims[count++] = dim;
    }
  }
  Rows<TENSORS> rows;
  std::array<int64_t, TENSORS> sizes;
  for (int k = 0; k < TENSORS; ++k) rows.data[k] = tensors[k]->data, sizes[k] = size_of(tensors[k]->dtype);
  detail::walk<TENSORS>(dims, count, rows, sizes, f);
}

// Whether every row of tensor k begins on a 16-byte boundary.
template <int TENSORS>
bool aligned_rows(const Rows<TENSORS>& rows, int k, int64_t element_bytes) {
  const uint64_t steps = static_cast<uint64_t>(rows.outer_step[k] | rows.inner_step[k]) * element_bytes;
  return ((reinterpret_cast<uint64_t>(rows.data[k]) | steps) & 15) == 0;
}

}  // namespace rapid_llm

// What the launchers of the norms share: what they ask of a weight, and how many threads take a row.
#pragma once

#include "rapid_llm/launch.h"
#include "rapid_llm/rows.h"

namespace rapid_llm {

// One element for each column of `input`, on its device, of any floating dtype.
inline void check_weight(const char* op, const Tensor& weight, const Tensor& input) {
  check_cuda(op, "weight", weight);
  RAPID_CHECK(weight.device == input.device, op, ": weight must be on the same CUDA device, cuda:", input.device,
              ": got cuda:", weight.device);
  RAPID_CHECK(weight.dim == 1 && weight.size(0) == input.size(-1), op,
              ": weight must have the same shape as a row of input, (", input.size(-1), "): got ", weight.shape());
  check_dense_rows(op, "weight", weight);
  RAPID_CHECK(weight.dtype <= DType::float64, op, ": weight must have a floating dtype of at least 16 bits, got ",
              name_of(weight.dtype));
  RAPID_CHECK(input.size(-1) <= 0x7fff0000, op, ": rows of ", input.size(-1), " elements are too long for a kernel");
}

inline AnyFloats any_floats(const Tensor& weight) {
  static_assert(static_cast<int>(DType::float64) == 3 && static_cast<int>(DType::bfloat16) == 2);
  return {weight.data, static_cast<int>(weight.dtype)};
}

// `vectors` of a row over `threads` threads, `each` to a thread, and `rows` rows to a block.
struct RowBlock {
  int each;
  dim3 threads;
};

// The most threads that hold `elements` of a row each in registers; the kernels are bounded to as many.
constexpr int most_threads(int elements) { return elements > 16 ? 512 : 1024; }

// Few rows are a matter of latency: one vector of N a thread. Many are a matter of bandwidth: `most` loads in flight a
// thread, and a warp a row where that holds it, several warps a block. `each` is 0 where no block can hold the row.
template <int N>
RowBlock row_block(int64_t rows, int64_t vectors, int most) {
  constexpr int64_t few = 264;  // two blocks for each multiprocessor of today's GPUs
  const auto threads_for = [&](int each) { return ((vectors + each - 1) / each + 31) / 32 * 32; };
  int each = 1;
  while (each < most && (threads_for(each) > 1024 || (rows > few && threads_for(each) > 32))) each *= 2;
  const int64_t threads = threads_for(each);
  if (threads > most_threads(each * N)) return {0, dim3(1024)};
  if (threads > 32) return {each, dim3(static_cast<unsigned>(threads))};
  const int64_t together = rows <= few ? 1 : rows <= 4 * few ? 4 : 8;
  return {each, dim3(32, static_cast<unsigned>(together))};
}

// Calls `f(Type<W>{})` with the weight's type where a norm has kernels for it: the input's own or float32.
template <class T, class F>
void dispatch_weight(const Tensor& input, const Tensor& weight, F&& f) {
  if (weight.dtype == input.dtype) {
    f(Type<T>{});
  } else {
    f(Type<float>{});
  }
}

}  // namespace rapid_llm

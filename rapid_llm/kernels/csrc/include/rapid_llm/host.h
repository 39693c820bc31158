// What launchers for the CPU check of their tensors beside what tensor.h offers.
#pragma once

#include "rapid_llm/tensor.h"

namespace rapid_llm {

inline void check_cpu(const char* op, const char* name, const Tensor& tensor) {
  RAPID_CHECK(tensor.cpu, op, ": ", name, " must be on the same device, cpu: got one on another");
  RAPID_CHECK(tensor.data != nullptr || tensor.numel() == 0, op, ": needs plain tensors, and ", name,
              " has no memory (a functional or meta tensor)");
}

inline void check_cpu(const char* op, const char* name, const Tensor& tensor, DType dtype) {
  check_cpu(op, name, tensor);
  RAPID_CHECK(tensor.dtype == dtype, op, ": ", name, " must have dtype ", name_of(dtype), ", got ",
              name_of(tensor.dtype));
}

// Indices of either width and any stride, read in place.
class Indices {
 public:
  Indices(const char* op, const char* name, const Tensor& tensor)
      : data_(tensor.data), step_(tensor.dim > 0 ? tensor.stride(-1) : 0), wide_(tensor.dtype == DType::int64) {
    check_cpu(op, name, tensor);
    RAPID_CHECK(wide_ || tensor.dtype == DType::int32, op, ": ", name, " must be int32 or int64, got ",
                name_of(tensor.dtype));
  }

  int64_t operator[](int64_t at) const {
    return wide_ ? static_cast<const int64_t*>(data_)[at * step_] : static_cast<const int32_t*>(data_)[at * step_];
  }

  // Beginning `elements` of the tensor further on.
  Indices from(int64_t elements) const {
    Indices moved = *this;
    moved.data_ = static_cast<const char*>(data_) + elements * (wide_ ? 8 : 4);
    return moved;
  }

 private:
  const void* data_;
  int64_t step_;
  bool wide_;
};

}  // namespace rapid_llm

// What every launch needs: the tensor's device made current, torch's current stream on it, and a check afterwards.
#pragma once

#include <cuda_runtime.h>

#include "rapid_llm/device.cuh"
#include "rapid_llm/tensor.h"

namespace rapid_llm {

// Each door brings its own: torch's current stream on that device.
cudaStream_t current_stream(int device);

inline void check(const char* op, cudaError_t status) {
  RAPID_CHECK(status == cudaSuccess, op, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

// The launch itself, and whatever an earlier kernel of this context left behind.
inline void check_launch(const char* op) {
  const cudaError_t status = cudaGetLastError();
  RAPID_CHECK(status == cudaSuccess, op, ": the launch failed: ", cudaGetErrorName(status), ": ",
              cudaGetErrorString(status), " (an earlier kernel's fault can show here; CUDA_LAUNCH_BLOCKING=1 tells)");
}

// Makes the tensor's device current until the end of the scope; the stream is taken after that.
class Launch {
 public:
  Launch(const char* op, const Tensor& tensor) : op_(op) {
    check(op, cudaGetDevice(&previous_));
    if (previous_ != tensor.device) check(op, cudaSetDevice(tensor.device));
    current_ = tensor.device;
    stream_ = current_stream(tensor.device);
  }
  ~Launch() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  cudaStream_t stream() const { return stream_; }
  int device() const { return current_; }

  // Blocks for `items` with `per_block` in each; a grid's first dimension ends at 2^31 - 1.
  unsigned blocks(int64_t items, int64_t per_block) const {
    const int64_t count = (items + per_block - 1) / per_block;
    RAPID_CHECK(count <= 0x7fffffff, op_, ": ", items, " elements need more blocks than a grid can have");
    return static_cast<unsigned>(count);
  }

 private:
  const char* op_;
  int previous_ = -1;
  int current_ = -1;
  cudaStream_t stream_ = nullptr;
};

template <class T>
struct Type {
  using type = T;
};

// Calls `f(Type<float>{})`, `f(Type<half_t>{})` or `f(Type<bfloat16_t>{})`.
template <class F>
void dispatch_floating(const char* op, const Tensor& tensor, F&& f) {
  switch (tensor.dtype) {
    case DType::float32: return f(Type<float>{});
    case DType::float16: return f(Type<half_t>{});
    case DType::bfloat16: return f(Type<bfloat16_t>{});
    default:
      fail(op, ": ", name_of(tensor.dtype), " is not a dtype of this kernel; use float32, float16 or bfloat16");
  }
}

// The largest number of elements, a power of two and at most 16 bytes, that every pointer is aligned to and `count` is
// a multiple of (pass 0 where a tail is handled apart).
template <class T, class... Pointers>
int vector_width(int64_t count, const Pointers*... pointers) {
  uint64_t bits = 16 | static_cast<uint64_t>(count) * sizeof(T);
  ((bits |= reinterpret_cast<uint64_t>(pointers)), ...);
  const uint64_t bytes = bits & (~bits + 1);
  return static_cast<int>((bytes > 16 ? 16 : bytes) / sizeof(T));
}

}  // namespace rapid_llm

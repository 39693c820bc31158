// scale's launcher: checks, then the widest vectors that both pointers are aligned to.
#pragma once

#include "elementwise/scale.cuh"
#include "rapid_llm/launch.h"

namespace rapid_llm {

template <class T, int N>
void launch_scale(const Launch& launch, Tensor& out, const Tensor& input, float factor) {
  const int64_t count = input.numel(), vectors = count / N;
  T* to = out.as<T>();
  const T* from = input.as<T>();
  // Small tensors want many blocks, big ones several loads in flight in each thread.
  if (vectors < 256 * 1024) {
    scale_kernel<T, N, 1><<<launch.blocks(vectors + 1, 256), 256, 0, launch.stream()>>>(to, from, factor, vectors, count);
  } else {
    const unsigned blocks = launch.blocks(vectors + 1, 256 * 4);
    scale_kernel<T, N, 4><<<blocks, 256, 0, launch.stream()>>>(to, from, factor, vectors, count);
  }
}

inline void scale(Tensor& out, const Tensor& input, double factor) {
  check_cuda("scale", "input", input);
  check_like("scale", "out", out, input);
  check_shape("scale", "out", out, input);
  check_contiguous("scale", "input", input);
  check_contiguous("scale", "out", out);
  check_alias("scale", out, "input", input);
  if (input.numel() == 0) return;
  const Launch launch("scale", input);
  const float f = static_cast<float>(factor);
  dispatch_floating("scale", input, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int whole = 16 / sizeof(T);
    if (vector_width<T>(0, out.data, input.data) == whole) {
      launch_scale<T, whole>(launch, out, input, f);
    } else {
      launch_scale<T, 1>(launch, out, input, f);
    }
  });
  check_launch("scale");
}

}  // namespace rapid_llm

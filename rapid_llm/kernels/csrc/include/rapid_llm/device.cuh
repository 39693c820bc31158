// Device helpers with no header behind them, so that nvcc and NVRTC compile the same kernels.
//
// Conversions are single PTX instructions, rounding to nearest even; sm_80 and newer.
#pragma once

namespace rapid_llm {

using i64 = long long;
using u64 = unsigned long long;
using u32 = unsigned int;

struct half_t {
  unsigned short bits;
};
struct bfloat16_t {
  unsigned short bits;
};

// N elements that move in one instruction where N * sizeof(T) is 16, 8 or 4 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

#ifdef __CUDACC__

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float to_float(bfloat16_t x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half_t from_float<half_t>(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ bfloat16_t from_float<bfloat16_t>(float x) {
  bfloat16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over a block of whole warps, in every thread. `shared` holds 32 floats; safe to call again with the same.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return x;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0.0f);
}

// Programmatic dependent launch: wait for the kernel before this one, and let the one after begin its prologue. Both
// do nothing where the launch did not ask for it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace rapid_llm

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
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }
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

// N consecutive elements in loads of at most 16 bytes each, kept as they are stored until they are used.
template <class T, int N>
struct Pack {
  static constexpr int most = 16 / sizeof(T), step = N < most ? N : most;
  Vec<T, step> part[N / step];

  // `from` is aligned to one such load.
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int p = 0; p < N / step; ++p) part[p] = reinterpret_cast<const Vec<T, step>*>(from)[p];
  }
  __device__ __forceinline__ float at(int i) const { return to_float(part[i / step].at[i % step]); }
};

template <int N, class T>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[N]) {
  Pack<T, N> pack;
  pack.load(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = pack.at(i);
}

// Floats of a dtype known only at run time, read-only while the kernel runs.
struct AnyFloats {
  const void* data;
  int kind;  // 0 float32, 1 float16, 2 bfloat16, 3 float64

  // N elements from `at` on, which is aligned to a 16-byte load where N is more than 1.
  template <int N>
  __device__ __forceinline__ void load(int at, float (&to)[N]) const {
    switch (kind) {
      case 0: return load_floats<N>(static_cast<const float*>(data) + at, to);
      case 1: return load_floats<N>(static_cast<const half_t*>(data) + at, to);
      case 2: return load_floats<N>(static_cast<const bfloat16_t*>(data) + at, to);
      default: return load_floats<N>(static_cast<const double*>(data) + at, to);
    }
  }
};

// Where row `row` begins. Rows are counted over one dimension (inner == 1), or over an outer and an inner one.
__device__ __forceinline__ i64 row_start(i64 row, i64 inner, i64 outer_step, i64 inner_step) {
  if (inner == 1) return row * outer_step;
  return row / inner * outer_step + row % inner * inner_step;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over the whole warps of one row of a block (blockDim.x), in every thread. A row of one warp touches no shared
// memory, so a block may then hold several rows along y. `shared` holds 32 floats; with REUSED it is safe to call again
// with the same, without it one barrier is saved.
template <bool REUSED = true>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return x;
  if (REUSED) __syncthreads();
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

// Stands in for the package's device.cuh where device code runs on the CPU: a C++ thread for each thread of a block, one
// block at a time. Shared memory is therefore static.
#pragma once

#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

struct Index {
  unsigned x;
};
inline thread_local Index thread, block;
inline Index grid;
inline std::unique_ptr<std::barrier<>> all;
inline std::vector<std::unique_ptr<std::barrier<>>> warps;

// Runs `kernel()` in every thread of every block.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel kernel) {
  grid.x = blocks;
  for (unsigned b = 0; b < blocks; ++b) {
    all = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (unsigned w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([=] {
        thread.x = t;
        block.x = b;
        kernel();
      });
    }
    for (std::thread& one : running) one.join();
  }
}

inline void sync_warp() { warps[thread.x / 32]->arrive_and_wait(); }

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define gridDim emulation::grid

inline void __syncthreads() { emulation::all->arrive_and_wait(); }

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

template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

inline float to_float(half_t x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(1024.0f + fraction, exponent - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return x.bits >> 15 ? -value : value;
}

inline float to_float(bfloat16_t x) {
  const u32 bits = static_cast<u32>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class T>
T from_float(float x);

// Rounds to nearest even; NaN does not occur.
template <>
inline bfloat16_t from_float(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float warp_sum(float x) {
  static float held[32][32];
  const int warp = threadIdx.x / 32;
  held[warp][threadIdx.x % 32] = x;
  emulation::sync_warp();
  float sum = 0.0f;
  for (const float one : held[warp]) sum += one;
  emulation::sync_warp();
  return sum;
}

inline void wait_for_previous() {}
inline void allow_next() {}

}  // namespace rapid_llm

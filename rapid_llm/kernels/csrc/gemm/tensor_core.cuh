// The PTX of the small products: loads with a cache policy, and operands and products of the tensor cores.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

#ifdef __CUDACC__

struct Piece {  // 8 elements of 2 bytes
  u32 at[4];
};

// `wide` has L2 fetch 256 bytes around what is asked for.
enum class Cache { stream, stream_wide, normal };

// A weight is read once: it takes no room in L1. Zero where `inside` is false.
template <Cache CACHE>
__device__ __forceinline__ Piece load_weight(const void* from, bool inside) {
  Piece p;
#define RAPID_LLM_LOAD(how)                                                                           \
  asm volatile(                                                                                       \
      "{ .reg .pred inside; setp.ne.b32 inside, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; " \
      "mov.b32 %3, 0; @inside ld.global" how ".v4.b32 {%0, %1, %2, %3}, [%4]; }"                      \
      : "=&r"(p.at[0]), "=&r"(p.at[1]), "=&r"(p.at[2]), "=&r"(p.at[3])                                \
      : "l"(from), "r"(static_cast<int>(inside)))
  if constexpr (CACHE == Cache::stream) {
    RAPID_LLM_LOAD(".L1::no_allocate");
  } else if constexpr (CACHE == Cache::stream_wide) {
    RAPID_LLM_LOAD(".L1::no_allocate.L2::256B");
  } else {
    RAPID_LLM_LOAD("");
  }
#undef RAPID_LLM_LOAD
  return p;
}

// sum (16 x 8) += a (16 x 16) * b (16 x 8). Of a, a0 and a2 belong to row lane / 4, a1 and a3 to the row 8 further on; of
// sum, the first two and the last two elements.
template <class T>
__device__ __forceinline__ void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma<bfloat16_t>(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<half_t>(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first half of a piece.
__device__ __forceinline__ Piece load_half_weight(const void* from, bool inside) {
  Piece p;
  asm volatile(
      "{ .reg .pred inside; setp.ne.b32 inside, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; "
      "@inside ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2]; }"
      : "=&r"(p.at[0]), "=&r"(p.at[1])
      : "l"(from), "r"(static_cast<int>(inside)));
  return p;
}

// One instruction each: (x & mask) | raise and (x & mask) ^ raise.
__device__ __forceinline__ u32 masked_or(u32 x, u32 mask, u32 raise) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(raise));
  return y;
}
__device__ __forceinline__ u32 masked_xor(u32 x, u32 mask, u32 raise) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(raise));
  return y;
}

// Pairs of small integers in the dtype: `raised` has them added to a power of two, `down` takes that away again.
template <class T>
__device__ __forceinline__ u32 lowered(u32 raised, u32 down);
template <>
__device__ __forceinline__ u32 lowered<half_t>(u32 raised, u32 down) {
  u32 pair;
  asm("add.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(raised), "r"(down));
  return pair;
}
template <>
__device__ __forceinline__ u32 lowered<bfloat16_t>(u32 raised, u32 down) {
  u32 pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(raised), "r"(0x3f803f80), "r"(down));
  return pair;
}

#endif  // __CUDACC__

}  // namespace rapid_llm

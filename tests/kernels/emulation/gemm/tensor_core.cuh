// Stands in for the package's tensor_core.cuh: what its PTX does, with an mma's operands where the PTX manual puts them.
#pragma once

#include "rapid_llm/device.cuh"

namespace rapid_llm {

struct Piece {
  u32 at[4];
};

enum class Cache { stream, stream_wide, normal };

template <Cache CACHE>
Piece load_weight(const void* from, bool inside) {
  Piece p{};
  if (inside) std::memcpy(&p, from, 16);
  return p;
}

inline Piece load_half_weight(const void* from, bool inside) {
  Piece p{};
  if (inside) std::memcpy(&p, from, 8);
  return p;
}

inline u32 mma_a[32][32][4], mma_b[32][32][2];  // by warp and lane

template <class T>
float mma_element(u32 pair, int half) {
  return to_float(T{static_cast<unsigned short>(pair >> (16 * half))});
}

template <class T>
void mma(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  std::memcpy(mma_a[warp][lane], a, sizeof a);
  std::memcpy(mma_b[warp][lane], b, sizeof b);
  emulation::sync_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int quarter = k % 8 / 2;
      const u32 left = mma_a[warp][row % 8 * 4 + quarter][row / 8 + 2 * (k / 8)];
      const u32 right = mma_b[warp][column * 4 + quarter][k / 8];
      sum[i] += mma_element<T>(left, k % 2) * mma_element<T>(right, k % 2);
    }
  }
  emulation::sync_warp();
}

inline u32 masked_or(u32 x, u32 mask, u32 raise) { return (x & mask) | raise; }
inline u32 masked_xor(u32 x, u32 mask, u32 raise) { return (x & mask) ^ raise; }

template <class T>
u32 lowered(u32 raised, u32 down) {
  u32 pair = 0;
  for (int half = 0; half < 2; ++half) {
    const T sum = from_float<T>(mma_element<T>(raised, half) + mma_element<T>(down, half));
    pair |= static_cast<u32>(sum.bits) << (16 * half);
  }
  return pair;
}

}  // namespace rapid_llm

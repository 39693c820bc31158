// Stands in for the instructions of a GPU that the kernels name: PTX after its manual, and CUDA's intrinsics.
//
// Functions take an asm statement's outputs, then its inputs; translate.py says which text is which function.
#pragma once

#include "threads.h"

namespace emulation {

using u16 = unsigned short;
using u32 = unsigned int;

inline float float_of(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline u32 bits_of(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline void float_of_half(float& to, u16 from) {
  const u32 magnitude = (from & 0x7fffu) << 13;
  to = (from & 0x7c00) == 0x7c00 ? float_of(magnitude | 0x7f800000) : float_of(magnitude) * 0x1p112f;
  if (from >> 15) to = -to;
}

inline void half_of_float(u16& to, float from) {
  const u32 bits = bits_of(from), sign = bits >> 16 & 0x8000;
  u32 magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    to = 0x7fff;
  } else if (magnitude < 0x38800000) {  // below the smallest normal number
    to = static_cast<u16>(sign | static_cast<u32>(std::nearbyint(float_of(magnitude) * 0x1p24f)));
  } else {
    magnitude = (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    to = static_cast<u16>(sign | (magnitude > 0x7c00 ? 0x7c00 : magnitude));
  }
}

inline void bfloat16_of_float(u16& to, float from) {
  const u32 bits = bits_of(from);
  to = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float half_at(u32 pair, int which) {
  float value;
  float_of_half(value, static_cast<u16>(pair >> (16 * which)));
  return value;
}

inline float bfloat16_at(u32 pair, int which) { return float_of(pair >> (16 * which) << 16); }

inline void reciprocal(float& to, float from) { to = 1.0f / from; }

inline void wait_for_previous() {}
inline void allow_next() {}

// A thread loads where its predicate is true; a GPU faults where an address is no multiple of what is loaded.
template <int BYTES>
void load(void* to, const void* from, int inside) {
  std::memset(to, 0, BYTES);
  if (!inside) return;
  if (reinterpret_cast<std::uintptr_t>(from) % BYTES != 0) return report("a load from a misaligned address");
  std::memcpy(to, from, BYTES);
}

inline void load_16_bytes(u32& a, u32& b, u32& c, u32& d, const void* from, int inside) {
  u32 held[4];
  load<16>(held, from, inside);
  a = held[0], b = held[1], c = held[2], d = held[3];
}

inline void load_8_bytes(u32& a, u32& b, const void* from, int inside) {
  u32 held[2];
  load<8>(held, from, inside);
  a = held[0], b = held[1];
}

inline void and_or(u32& to, u32 a, u32 b, u32 c) { to = (a & b) | c; }
inline void and_xor(u32& to, u32 a, u32 b, u32 c) { to = (a & b) ^ c; }

inline void add_halves(u32& to, u32 a, u32 b) {
  u16 sum[2];
  for (int i = 0; i < 2; ++i) half_of_float(sum[i], half_at(a, i) + half_at(b, i));
  to = sum[0] | static_cast<u32>(sum[1]) << 16;
}

inline void fma_bfloat16s(u32& to, u32 a, u32 b, u32 c) {
  u16 sum[2];
  for (int i = 0; i < 2; ++i) {
    bfloat16_of_float(sum[i], std::fma(bfloat16_at(a, i), bfloat16_at(b, i), bfloat16_at(c, i)));
  }
  to = sum[0] | static_cast<u32>(sum[1]) << 16;
}

// What the lanes of a warp show each other: two sets in turn, so that one barrier is enough.
struct Lane {
  float a[8], b[4], value;
};
inline Lane shown[32][2][32];

inline Lane* mine(unsigned& turn) {
  turn = running->turn++ % 2;
  return &shown[warp()][turn][lane()];
}

// mma.m16n8k16: row g of A is in registers 0 and 2 of lanes 4 g to 4 g + 3, row g + 8 in 1 and 3; each register is two
// neighbours of k, of its first or last eight. B is by column in the same way.
template <class Element>
void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], Element element) {
  unsigned turn;
  Lane* own = mine(turn);
  for (int i = 0; i < 8; ++i) own->a[i] = element(a[i / 2], i % 2);
  for (int i = 0; i < 4; ++i) own->b[i] = element(b[i / 2], i % 2);
  sync_warp();
  const Lane* lanes = shown[warp()][turn];
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned group = lane() / 4, below = i / 2, column = lane() % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned quarter = k % 8 / 2, upper = k / 8;
      sum[i] += lanes[group * 4 + quarter].a[2 * (below + 2 * upper) + k % 2] *
                lanes[column * 4 + quarter].b[2 * upper + k % 2];
    }
  }
}

#define EMULATION_MMA(name, element)                                                                       \
  inline void name(float& s0, float& s1, float& s2, float& s3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    float sum[4] = {s0, s1, s2, s3};                                                                       \
    multiply(sum, {a0, a1, a2, a3}, {b0, b1}, element);                                                    \
    s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3];                                                    \
  }
EMULATION_MMA(mma_halves, half_at)
EMULATION_MMA(mma_bfloat16s, bfloat16_at)
#undef EMULATION_MMA

}  // namespace emulation

inline float __uint_as_float(unsigned bits) { return emulation::float_of(bits); }
inline float __int_as_float(int bits) { return emulation::float_of(static_cast<unsigned>(bits)); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline float __shfl_xor_sync(unsigned mask, float x, int step) {
  if (mask != 0xffffffffu) emulation::report("a shuffle of part of a warp, which the emulator does not know");
  unsigned turn;
  emulation::mine(turn)->value = x;
  emulation::sync_warp();
  return emulation::shown[emulation::warp()][turn][emulation::lane() ^ static_cast<unsigned>(step)].value;
}

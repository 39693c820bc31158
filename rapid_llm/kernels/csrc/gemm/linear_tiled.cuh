// linear for up to 8 rows of input over block-quantised weights in tiles: see linear_gemv.cuh for the walk.
//
// A record holds 8 outputs times one group of blocks (2 of q8_0, 4 of q4_0 or q4_1): for each lane of a warp the 16
// bytes of codes that it feeds to the tensor cores, then the blocks' scales. So a warp reads it as one run of bytes.
// Codes are small integers, exact in the input's dtype: a block's sum of products is made of them, and scaled in fp32.
#pragma once

#include "gemm/linear_gemv.cuh"

namespace rapid_llm {

enum class Blocks { q8_0, q4_0, q4_1 };

template <Blocks FORMAT>
struct Tiled {
  static constexpr int GROUP = FORMAT == Blocks::q8_0 ? 2 : 4;                     // blocks of 32 features
  static constexpr int WORDS = FORMAT == Blocks::q4_1 ? 2 * GROUP : GROUP;         // of a thread's scales, 2 in each
  static constexpr int RECORD = 512 + 4 * WORDS * 4;                               // bytes
};

#ifdef __CUDACC__

__device__ __forceinline__ float low_half(u32 pair) { return to_float(half_t{static_cast<unsigned short>(pair)}); }
__device__ __forceinline__ float high_half(u32 pair) { return low_half(pair >> 16); }

// 8 codes of a block as 4 pairs, in the order of the features.
template <class T, Blocks FORMAT>
struct Codes;

template <Blocks FORMAT>
struct Codes<half_t, FORMAT> {
  static __device__ __forceinline__ void read(const Piece& p, int block, u32 (&pair)[4]) {
    if constexpr (FORMAT == Blocks::q8_0) {  // bytes 0 and 2 of a word are one pair, 1 and 3 the next
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bytes = p.at[2 * block + i / 2] >> (i % 2 * 8);
        pair[i] = lowered<half_t>(masked_xor(bytes, 0x00ff00ff, 0x64806480), 0xe480e480);  // 1024 + 128 + code
      }
    } else {  // nibbles i and i + 4 are a pair
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 raised = masked_or(p.at[block] >> (4 * i), 0x000f000f, 0x64006400);  // 1024 + code
        pair[i] = lowered<half_t>(raised, FORMAT == Blocks::q4_0 ? 0xe408e408 : 0xe400e400);
      }
    }
  }
};

template <Blocks FORMAT>
struct Codes<bfloat16_t, FORMAT> {
  static __device__ __forceinline__ void read(const Piece& p, int block, u32 (&pair)[4]) {
    if constexpr (FORMAT == Blocks::q8_0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bytes = p.at[2 * block + i / 2] >> (i % 2 * 8);
        // 128 + 7 bits, less 128, or less 256 where the sign bit is set.
        pair[i] = lowered<bfloat16_t>(masked_or(bytes, 0x007f007f, 0x43004300), masked_or(bytes, 0x00800080, 0xc300c300));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 raised = masked_or(p.at[block] >> (4 * i), 0x000f000f, 0x43004300);  // 128 + code
        pair[i] = lowered<bfloat16_t>(raised, FORMAT == Blocks::q4_0 ? 0xc308c308 : 0xc300c300);
      }
    }
  }
};

template <class T>
constexpr u32 ONES = 0x3f803f80;
template <>
constexpr u32 ONES<half_t> = 0x3c003c00;

// One warp's share of a block's tiles: groups WARPS apart, DEPTH of them in flight. `a.weight` is the records, tile by
// tile.
template <class T, Blocks FORMAT, int WARPS, int TILES, int DEPTH>
struct TiledWarp {
  using F = Tiled<FORMAT>;
  static constexpr int warps = WARPS, tiles = TILES, depth = DEPTH;

  const char* weight[TILES];
  const unsigned short* input;
  int features, chunks, k0;
  bool has_input;
  Piece codes[DEPTH][TILES];
  Piece scales[DEPTH][TILES][(F::WORDS + 3) / 4];
  Piece inputs[DEPTH][F::GROUP];
  float sums[TILES][2];

  __device__ __forceinline__ TiledWarp(const GemvArguments& a) {
    const int lane = threadIdx.x % 32;
    features = a.features;
    chunks = (a.features + 32 * F::GROUP - 1) / (32 * F::GROUP);
    k0 = lane % 4 * 8;
    has_input = lane / 4 < a.rows;
    input = static_cast<const unsigned short*>(a.input) + (has_input ? a.input_at[lane / 4] : 0);
  }

  // Tiles past the last read the last one; their sums are not stored.
  __device__ __forceinline__ void point(const GemvArguments& a, i64 first) {
    const i64 last = (a.outputs - 1) / GEMV_OUTPUTS;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      i64 at = first / GEMV_OUTPUTS + tile;
      if (at > last) at = last;
      weight[tile] = static_cast<const char*>(a.weight) + at * chunks * F::RECORD;
    }
  }

  __device__ __forceinline__ void load_weights(int at, int chunk) {
    const bool inside = chunk < chunks;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const char* record = weight[tile] + static_cast<i64>(chunk) * F::RECORD;
      codes[at][tile] = load_weight<Cache::stream>(record + lane * 16, inside);
      const char* mine = record + 512 + lane % 4 * F::WORDS * 4;
      if constexpr (F::WORDS == 2) {
        scales[at][tile][0] = load_half_weight(mine, inside);
      } else {
#pragma unroll
        for (int i = 0; i < F::WORDS / 4; ++i) {
          scales[at][tile][i] = load_weight<Cache::stream>(mine + i * 16, inside);
        }
      }
    }
  }

  __device__ __forceinline__ void load_inputs(int at, int chunk) {
#pragma unroll
    for (int block = 0; block < F::GROUP; ++block) {
      const int k = (chunk * F::GROUP + block) * 32 + k0;
      inputs[at][block] = load_weight<Cache::normal>(input + k, has_input && k < features);
    }
  }

  __device__ __forceinline__ void multiply(int at) {
#pragma unroll
    for (int block = 0; block < F::GROUP; ++block) {
      const Piece& x = inputs[at][block];
      float total = 0.0f;  // of the block's inputs, which q4_1's minimum multiplies
      if constexpr (FORMAT == Blocks::q4_1) {
        float halves[4] = {};
        mma<T>(halves, x.at[0], x.at[1], x.at[2], x.at[3], ONES<T>, ONES<T>);
        total = halves[0] + halves[2];
      }
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        u32 pair[4];
        Codes<T, FORMAT>::read(codes[at][tile], block, pair);
        float even[4] = {}, odd[4] = {};  // of pairs 0 and 2 the first half counts, of 1 and 3 the second
        mma<T>(even, x.at[0], x.at[1], x.at[2], x.at[3], pair[0], pair[2]);
        mma<T>(odd, x.at[0], x.at[1], x.at[2], x.at[3], pair[1], pair[3]);
        const u32 scale = scales[at][tile][block / 4].at[block % 4];
        sums[tile][0] += low_half(scale) * (even[0] + odd[2]);
        sums[tile][1] += high_half(scale) * (even[1] + odd[3]);
        if constexpr (FORMAT == Blocks::q4_1) {
          const u32 least = scales[at][tile][1].at[block];
          sums[tile][0] += low_half(least) * total;
          sums[tile][1] += high_half(least) * total;
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) sums[tile][0] = sums[tile][1] = 0.0f;
  }

  __device__ __forceinline__ float sum(int tile, int i) const { return sums[tile][i]; }
};

// Every row of the input begins at a multiple of 16 bytes.
template <class T, Blocks FORMAT, int WARPS, int TILES, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32) linear_tiled_kernel(const __grid_constant__ GemvArguments a) {
  __shared__ __align__(16) float partial[WARPS * GEMV_ROWS * GEMV_PITCH<TILES * GEMV_OUTPUTS>];
  TiledWarp<T, FORMAT, WARPS, TILES, DEPTH> my(a);
  gemv<T>(a, my, partial);
}

#endif  // __CUDACC__

}  // namespace rapid_llm

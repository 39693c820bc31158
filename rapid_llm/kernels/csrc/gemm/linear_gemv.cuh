// linear for up to 8 rows of input in fp16 or bf16: the weight streams once through the tensor cores.
//
// Each warp multiplies all rows of the input by 8 rows of the weight (per tile) with mma.m16n8k16. So the cost does not
// depend on the number of rows, and neither does a result: every element of a product is summed in the same order
// whatever stands in the other rows. The order of k within an mma is free as long as both operands share it; it is
// chosen so that a thread's operands are 16 consecutive bytes of a row, used where they were loaded.
// The 16 rows of an mma are the 8 of the input twice, with other features: the first 8 are meant for one pair of the
// weight's registers, the last 8 for the other, and the half of each result that met the wrong pair is not looked at.
// Sums are fp32 in a fixed order, rounded once: warps divide k among them and meet in shared memory.
#pragma once

#include "gemm/tensor_core.cuh"
#include "rapid_llm/device.cuh"

namespace rapid_llm {

constexpr int GEMV_ROWS = 8;     // of input, at most
constexpr int GEMV_OUTPUTS = 8;  // per tile: the columns of an mma

// Strides and offsets count elements. `features` is below 2^30; every row of input and result has its own offset, so
// they may lie anywhere.
struct GemvArguments {
  const void* weight;
  const void* input;
  const void* bias;  // may be null
  void* out;
  i64 weight_stride, bias_stride, out_stride;
  i64 input_at[GEMV_ROWS], out_at[GEMV_ROWS];
  i64 outputs;
  int features, rows;
  // Reads the first weights before the previous kernel ends, which must not be writing them.
  bool early;
};

#ifdef __CUDACC__

// 8 elements one by one, for rows that are not aligned or end within them.
__device__ __forceinline__ Piece load_elements(const unsigned short* row, int k, int features) {
  Piece p;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = k + 2 * i < features ? row[k + 2 * i] : 0;
    const u32 high = k + 2 * i + 1 < features ? row[k + 2 * i + 1] : 0;
    p.at[i] = low | high << 16;
  }
  return p;
}

// One warp's share of a block's tiles: chunks of PIECES * 32 features, WARPS chunks apart, DEPTH of them in flight.
template <class T, int WARPS, int TILES, int PIECES, int DEPTH, bool WHOLE, Cache CACHE>
struct GemvWarp {
  static constexpr int CHUNK = 32 * PIECES;
  static constexpr int warps = WARPS, tiles = TILES, depth = DEPTH;

  const unsigned short* weight[TILES];
  const unsigned short* input;
  int features, chunks, k0;
  bool has_input;
  Piece weights[DEPTH][PIECES][TILES];
  Piece inputs[DEPTH][PIECES];
  float sums[TILES][2][4];

  __device__ __forceinline__ GemvWarp(const GemvArguments& a) {
    const int lane = threadIdx.x % 32;
    features = a.features;
    chunks = (a.features + CHUNK - 1) / CHUNK;
    k0 = lane % 4 * 8;
    has_input = lane / 4 < a.rows;
    input = static_cast<const unsigned short*>(a.input) + (has_input ? a.input_at[lane / 4] : 0);
  }

  // Outputs past the last read the last one's weights; their sums are not stored.
  __device__ __forceinline__ void point(const GemvArguments& a, i64 first) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      i64 row = first + tile * GEMV_OUTPUTS + threadIdx.x % 32 / 4;
      if (row >= a.outputs) row = a.outputs - 1;
      weight[tile] = static_cast<const unsigned short*>(a.weight) + row * a.weight_stride;
    }
  }

  __device__ __forceinline__ void load_weights(int at, int chunk) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const int k = chunk * CHUNK + p * 32 + k0;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        if constexpr (WHOLE) {
          weights[at][p][tile] = load_weight<CACHE>(weight[tile] + k, k < features);
        } else {
          weights[at][p][tile] = load_elements(weight[tile], k, features);
        }
      }
    }
  }

  // The input is read by every block: it stays in L1.
  __device__ __forceinline__ void load_inputs(int at, int chunk) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const int k = chunk * CHUNK + p * 32 + k0;
      if constexpr (WHOLE) {
        inputs[at][p] = load_weight<Cache::normal>(input + k, has_input && k < features);
      } else {
        inputs[at][p] = load_elements(input, k, has_input ? features : 0);
      }
    }
  }

  __device__ __forceinline__ void multiply(int at) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      const Piece& x = inputs[at][p];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const Piece& w = weights[at][p][tile];
        mma<T>(sums[tile][0], x.at[0], x.at[2], x.at[1], x.at[3], w.at[0], w.at[1]);
        mma<T>(sums[tile][1], x.at[0], x.at[2], x.at[1], x.at[3], w.at[2], w.at[3]);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][0][i] = sums[tile][1][i] = 0.0f;
    }
  }

  // The thread's `i`-th output of the tile.
  __device__ __forceinline__ float sum(int tile, int i) const { return sums[tile][0][i] + sums[tile][1][i + 2]; }
};

// Sums of a block lie in shared memory as [warp][row of input][output], rows this far apart: a warp meets all banks.
template <int OUTPUTS>
constexpr int GEMV_PITCH = OUTPUTS % 32 == 8 ? OUTPUTS : OUTPUTS + 8;

// Of an mma's result a thread has two neighbours in one row.
template <int OUTPUTS>
__device__ __forceinline__ void put_sums(float* partial, int tile, float first, float second) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * GEMV_ROWS + lane / 4;
  const Vec<float, 2> pair{{first, second}};
  const int at = row * GEMV_PITCH<OUTPUTS> + tile * GEMV_OUTPUTS + lane % 4 * 2;
  *reinterpret_cast<Vec<float, 2>*>(partial + at) = pair;
}

// Adds up the warps' sums in their order, adds the bias and rounds once.
template <class T, int WARPS, int OUTPUTS>
__device__ __forceinline__ void store_sums(const GemvArguments& a, const float* partial, i64 first) {
  constexpr int PITCH = GEMV_PITCH<OUTPUTS>;
  for (int at = threadIdx.x; at < a.rows * OUTPUTS; at += WARPS * 32) {
    const int row = at / OUTPUTS, column = at % OUTPUTS;
    const i64 output = first + column;
    if (output >= a.outputs) continue;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += partial[(w * GEMV_ROWS + row) * PITCH + column];
    if (a.bias != nullptr) sum += to_float(static_cast<const T*>(a.bias)[output * a.bias_stride]);
    static_cast<T*>(a.out)[a.out_at[row] + output * a.out_stride] = from_float<T>(sum);
  }
}

// A warp's chunks in turn: as soon as one is used, the one DEPTH further on is asked for in its registers.
template <class Warp>
__device__ __forceinline__ void multiply_all(Warp& my, int warp) {
  for (int chunk = warp; chunk < my.chunks; chunk += Warp::warps * Warp::depth) {
#pragma unroll
    for (int at = 0; at < Warp::depth; ++at) {
      // This branch also keeps the compiler from gathering every multiplication before the first new load.
      if (chunk + at * Warp::warps >= my.chunks) return;
      my.multiply(at);
      my.load_weights(at, chunk + (at + Warp::depth) * Warp::warps);
      my.load_inputs(at, chunk + (at + Warp::depth) * Warp::warps);
    }
  }
}

// A block takes TILES * 8 outputs at a time, every gridDim.x-th of them; `my` is a warp's share of each.
template <class T, class Warp>
__device__ __forceinline__ void gemv(const GemvArguments& a, Warp& my, float* partial) {
  constexpr int WARPS = Warp::warps, DEPTH = Warp::depth, OUTPUTS = Warp::tiles * GEMV_OUTPUTS;
  const int warp = threadIdx.x / 32;
  const auto load_weights = [&] {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_weights(at, warp + at * WARPS);
  };
  const auto load_inputs = [&] {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_inputs(at, warp + at * WARPS);
  };
  i64 first = static_cast<i64>(blockIdx.x) * OUTPUTS;
  allow_next();
  my.point(a, first);
  if (a.early) load_weights();
  // Every block waits, so that this kernel's end implies the previous one's, and before it writes: out may be in use.
  wait_for_previous();
  if (!a.early) load_weights();
  load_inputs();
  while (true) {
    my.clear();
    multiply_all(my, warp);
    const i64 next = first + static_cast<i64>(gridDim.x) * OUTPUTS;
    if (next < a.outputs) {  // the next weights are on their way while this block's warps meet
      my.point(a, next);
      load_weights();
      load_inputs();
    }
    if (my.has_input) {
#pragma unroll
      for (int tile = 0; tile < Warp::tiles; ++tile) put_sums<OUTPUTS>(partial, tile, my.sum(tile, 0), my.sum(tile, 1));
    }
    __syncthreads();
    store_sums<T, WARPS, OUTPUTS>(a, partial, first);
    if (next >= a.outputs) break;
    first = next;
    __syncthreads();
  }
}

// WHOLE: features is a multiple of 8 and every row of weight and input begins at a multiple of 16 bytes.
template <class T, int WARPS, int TILES, int PIECES, int DEPTH, bool WHOLE, Cache CACHE>
__global__ void __launch_bounds__(WARPS * 32) linear_gemv_kernel(const __grid_constant__ GemvArguments a) {
  __shared__ __align__(16) float partial[WARPS * GEMV_ROWS * GEMV_PITCH<TILES * GEMV_OUTPUTS>];
  GemvWarp<T, WARPS, TILES, PIECES, DEPTH, WHOLE, CACHE> my(a);
  gemv<T>(a, my, partial);
}

#endif  // __CUDACC__

}  // namespace rapid_llm

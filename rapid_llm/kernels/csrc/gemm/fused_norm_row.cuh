// One row of input, normalised, times a weight in fp16 or bf16; and silu(gate) * up of two such products.
//
// The inverse root of the mean square is one number for the whole row, so it multiplies the finished sums: a warp adds
// up squares beside its products, and nobody waits for a norm. The normalised row is never rounded. Sums are fp32 in a
// fixed order: SHARE warps divide k among them and meet in shared memory, where their squares meet too.
#pragma once

#include "activation/silu_and_mul.cuh"
#include "gemm/linear_row.cuh"

namespace rapid_llm {

struct NormArguments {
  GemvArguments linear;  // with as many `outputs` as results; gate's rows of the weight come first, then up's
  const void* scale;     // the norm's weight
  float eps, inverse_features;
};

#ifdef __CUDACC__

// One warp's ROWS results over its steps of 256 features, SHARE steps apart, DEPTH of them in flight; a result is made
// of a row of each of PARTS parts of the weight. W: the type of the norm's weight, T or float.
template <class T, class W, int PARTS, int SHARE, int ROWS, int DEPTH>
struct NormRowWarp {
  static constexpr int SUMS = PARTS * ROWS, SCALES = sizeof(W) / 2;

  const unsigned short* weight[SUMS];
  const unsigned short* input;
  const W* scale;
  int features, steps, k0;
  Piece weights[DEPTH][SUMS];
  Piece inputs[DEPTH], scales[DEPTH][SCALES];
  float sums[SUMS], squares;

  // Results past the last read the last one's weights; their sums are not stored.
  __device__ __forceinline__ NormRowWarp(const NormArguments& a, i64 first) {
    features = a.linear.features;
    steps = (features + 255) / 256;
    k0 = threadIdx.x % 32 * 8;
    input = static_cast<const unsigned short*>(a.linear.input) + a.linear.input_at[0];
    scale = static_cast<const W*>(a.scale);
    squares = 0.0f;
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
      const i64 output = first + sum % ROWS < a.linear.outputs ? first + sum % ROWS : a.linear.outputs - 1;
      const i64 row = sum / ROWS * a.linear.outputs + output;
      weight[sum] = static_cast<const unsigned short*>(a.linear.weight) + row * a.linear.weight_stride;
      sums[sum] = 0.0f;
    }
  }

  __device__ __forceinline__ void load_weights(int at, int step) {
    const int k = step * 256 + k0;
#pragma unroll
    for (int sum = 0; sum < SUMS; ++sum) {
      weights[at][sum] = load_weight<Cache::stream>(weight[sum] + k, k < features);
    }
  }

  // Input and norm's weight are read by every block.
  __device__ __forceinline__ void load_inputs(int at, int step) {
    const int k = step * 256 + k0;
    inputs[at] = load_weight<Cache::normal>(input + k, k < features);
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
      scales[at][i] = load_weight<Cache::normal>(scale + k + i * 8 / SCALES, k < features);
    }
  }

  template <class U>
  static __device__ __forceinline__ float element(const Piece* pieces, int i) {
    if constexpr (sizeof(U) == 4) {
      return __uint_as_float(pieces[i / 4].at[i % 4]);
    } else {
      return to_float(U{static_cast<unsigned short>(pieces[0].at[i / 2] >> (16 * (i % 2)))});
    }
  }

  __device__ __forceinline__ void multiply(int at) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = element<T>(&inputs[at], i);
      const float scaled = x * element<W>(scales[at], i);
      squares += x * x;
#pragma unroll
      for (int sum = 0; sum < SUMS; ++sum) sums[sum] += element<T>(&weights[at][sum], i) * scaled;
    }
  }

  __device__ __forceinline__ void multiply_all(int share) {
    for (int step = share; step < steps; step += SHARE * DEPTH) {
#pragma unroll
      for (int at = 0; at < DEPTH; ++at) {
        if (step + at * SHARE >= steps) return;
        multiply(at);
        load_weights(at, step + (at + DEPTH) * SHARE);
        load_inputs(at, step + (at + DEPTH) * SHARE);
      }
    }
  }
};

// Features are a multiple of 8; input, norm's weight and every row of the weight begin at a multiple of 16 bytes.
template <class T, class W, int PARTS, int WARPS, int SHARE, int ROWS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32) norm_row_kernel(const __grid_constant__ NormArguments a) {
  static_assert(WARPS % SHARE == 0 && ROWS <= 32 && (PARTS == 1 || PARTS == 2));
  constexpr int OUTPUTS = WARPS / SHARE * ROWS, PITCH = PARTS * ROWS + 1;
  __shared__ float partial[WARPS * PITCH];  // of each warp its sums, then its squares
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % SHARE;
  const i64 block = static_cast<i64>(blockIdx.x) * OUTPUTS;
  allow_next();
  NormRowWarp<T, W, PARTS, SHARE, ROWS, DEPTH> my(a, block + warp / SHARE * ROWS);
  if (a.linear.early) {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_weights(at, share + at * SHARE);
  }
  // Every block waits, so that this kernel's end implies the previous one's, and before it writes: out may be in use.
  wait_for_previous();
  if (!a.linear.early) {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_weights(at, share + at * SHARE);
  }
#pragma unroll
  for (int at = 0; at < DEPTH; ++at) my.load_inputs(at, share + at * SHARE);
  my.multiply_all(share);
#pragma unroll
  for (int at = 0; at < PITCH; ++at) {
    const float sum = warp_sum(at < PARTS * ROWS ? my.sums[at] : my.squares);
    if (lane == 0) partial[warp * PITCH + at] = sum;
  }
  __syncthreads();
  const i64 output = block + threadIdx.x;
  if (threadIdx.x >= OUTPUTS || output >= a.linear.outputs) return;
  float sums[PARTS] = {}, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) {
    const float* from = partial + (threadIdx.x / ROWS * SHARE + i) * PITCH;
    squares += from[PITCH - 1];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sums[part] += from[part * ROWS + threadIdx.x % ROWS];
  }
  const float inverse = rsqrtf(squares * a.inverse_features + a.eps);
  float result = sums[0] * inverse;
  if constexpr (PARTS == 2) {
    result = silu_times(result, sums[1] * inverse);
  } else if (a.linear.bias != nullptr) {
    result += to_float(static_cast<const T*>(a.linear.bias)[output * a.linear.bias_stride]);
  }
  static_cast<T*>(a.linear.out)[a.linear.out_at[0] + output * a.linear.out_stride] = from_float<T>(result);
}

#endif  // __CUDACC__

}  // namespace rapid_llm

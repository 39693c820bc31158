// linear for one row of input in fp16 or bf16: each load of a warp is 512 consecutive bytes of a row of the weight, which
// memory serves faster than the pieces of eight rows that tensor cores want (8.4 against 9.5 us for 4096 x 4096).
//
// Sums are fp32 in a fixed order, rounded once: SHARE warps divide k among them and meet in shared memory.
#pragma once

#include "gemm/linear_gemv.cuh"

namespace rapid_llm {

#ifdef __CUDACC__

// One warp's ROWS outputs over its steps of 256 features, SHARE steps apart, DEPTH of them in flight.
template <class T, int SHARE, int ROWS, int DEPTH>
struct RowWarp {
  const unsigned short* weight[ROWS];
  const unsigned short* input;
  int features, steps, k0;
  Piece weights[DEPTH][ROWS];
  Piece inputs[DEPTH];
  float sums[ROWS];

  // Outputs past the last read the last one's weights; their sums are not stored.
  __device__ __forceinline__ RowWarp(const GemvArguments& a, i64 first) {
    features = a.features;
    steps = (a.features + 255) / 256;
    k0 = threadIdx.x % 32 * 8;
    input = static_cast<const unsigned short*>(a.input) + a.input_at[0];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const i64 output = first + row < a.outputs ? first + row : a.outputs - 1;
      weight[row] = static_cast<const unsigned short*>(a.weight) + output * a.weight_stride;
      sums[row] = 0.0f;
    }
  }

  __device__ __forceinline__ void load_weights(int at, int step) {
    const int k = step * 256 + k0;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      weights[at][row] = load_weight<Cache::stream>(weight[row] + k, k < features);
    }
  }

  __device__ __forceinline__ void load_inputs(int at, int step) {
    const int k = step * 256 + k0;
    inputs[at] = load_weight<Cache::normal>(input + k, k < features);
  }

  static __device__ __forceinline__ float element(u32 pair, int half) {
    return to_float(T{static_cast<unsigned short>(pair >> (16 * half))});
  }

  __device__ __forceinline__ void multiply(int at) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = element(inputs[at].at[i / 2], i % 2);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) sums[row] += element(weights[at][row].at[i / 2], i % 2) * x;
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

// Features are a multiple of 8; input and every row of the weight begin at a multiple of 16 bytes.
template <class T, int WARPS, int SHARE, int ROWS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32) linear_row_kernel(const __grid_constant__ GemvArguments a) {
  static_assert(WARPS % SHARE == 0 && ROWS <= 32);
  constexpr int OUTPUTS = WARPS / SHARE * ROWS;
  __shared__ float partial[WARPS * ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % SHARE;
  const i64 block = static_cast<i64>(blockIdx.x) * OUTPUTS;
  allow_next();
  RowWarp<T, SHARE, ROWS, DEPTH> my(a, block + warp / SHARE * ROWS);
  if (a.early) {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_weights(at, share + at * SHARE);
  }
  // Every block waits, so that this kernel's end implies the previous one's, and before it writes: out may be in use.
  wait_for_previous();
  if (!a.early) {
#pragma unroll
    for (int at = 0; at < DEPTH; ++at) my.load_weights(at, share + at * SHARE);
  }
#pragma unroll
  for (int at = 0; at < DEPTH; ++at) my.load_inputs(at, share + at * SHARE);
  my.multiply_all(share);
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float sum = warp_sum(my.sums[row]);
    if (lane == 0) partial[warp * ROWS + row] = sum;
  }
  __syncthreads();
  const i64 output = block + threadIdx.x;
  if (threadIdx.x >= OUTPUTS || output >= a.outputs) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < SHARE; ++i) sum += partial[(threadIdx.x / ROWS * SHARE + i) * ROWS + threadIdx.x % ROWS];
  if (a.bias != nullptr) sum += to_float(static_cast<const T*>(a.bias)[output * a.bias_stride]);
  static_cast<T*>(a.out)[a.out_at[0] + output * a.out_stride] = from_float<T>(sum);
}

#endif  // __CUDACC__

}  // namespace rapid_llm

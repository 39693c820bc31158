// The kernels of linear for few rows, run on the CPU for bf16.
#include "gemm/linear_gemv.cuh"
#include "gemm/linear_row.cuh"
#include "gemm/linear_tiled.cuh"

using namespace rapid_llm;

namespace {

GemvArguments arguments(const void* weight, const void* input, const void* bias, void* out, int outputs, int features,
                        int rows) {
  GemvArguments a = {};
  a.weight = weight, a.input = input, a.bias = bias, a.out = out;
  a.weight_stride = features, a.bias_stride = 1, a.out_stride = 1;
  a.outputs = outputs, a.features = features, a.rows = rows;
  for (int row = 0; row < rows; ++row) {
    a.input_at[row] = static_cast<i64>(row) * features;
    a.out_at[row] = static_cast<i64>(row) * outputs;
  }
  return a;
}

template <int WARPS, int TILES, int PIECES, int DEPTH, bool WHOLE>
void dense(const GemvArguments& a, int blocks) {
  emulation::launch_each(blocks, WARPS * 32, [&] {
    linear_gemv_kernel<bfloat16_t, WARPS, TILES, PIECES, DEPTH, WHOLE, Cache::stream>(a);
  });
}

template <Blocks FORMAT>
void tiled(const GemvArguments& a, int blocks) {
  emulation::launch_each(blocks, 64, [&] { linear_tiled_kernel<bfloat16_t, FORMAT, 2, 2, 2>(a); });
}

}  // namespace

// kind 0: rows that are whole; 1: one tile a block, deep; 2: any rows; 3, 4, 5: records of q8_0, q4_0, q4_1; 6, 7: one
// row of input, 6 and 2 outputs a block.
// Blocks walk over several tiles where `blocks` is fewer than these.
extern "C" __attribute__((visibility("default"))) void linear_emulated(int kind, int blocks, const void* weight,
                                                                       const void* input, const void* bias, void* out,
                                                                       int outputs, int features, int rows, int early) {
  GemvArguments a = arguments(weight, input, bias, out, outputs, features, rows);
  a.early = early != 0;
  switch (kind) {
    case 0: return dense<2, 2, 2, 2, true>(a, blocks);
    case 1: return dense<4, 1, 1, 4, true>(a, blocks);
    case 2: return dense<2, 1, 1, 1, false>(a, blocks);
    case 3: return tiled<Blocks::q8_0>(a, blocks);
    case 4: return tiled<Blocks::q4_0>(a, blocks);
    case 6: return emulation::launch_each(blocks, 128, [&] { linear_row_kernel<bfloat16_t, 4, 2, 3, 2>(a); });
    case 7: return emulation::launch_each(blocks, 64, [&] { linear_row_kernel<bfloat16_t, 2, 1, 1, 4>(a); });
    case 5: return tiled<Blocks::q4_1>(a, blocks);
  }
}

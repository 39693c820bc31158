// The launcher of linear over tiled blocks; see linear_tiled.cuh for what a record holds.
#pragma once

#include "gemm/linear_gemv_launch.h"
#include "gemm/linear_tiled.cuh"

namespace rapid_llm {

template <class T, Blocks FORMAT>
void launch_tiled(const Launch& launch, const GemvArguments& arguments) {
  constexpr int WARPS = 8, TILES = 2, DEPTH = FORMAT == Blocks::q8_0 ? 2 : 1;
  launch_gemv(launch, arguments, linear_tiled_kernel<T, FORMAT, WARPS, TILES, DEPTH>, TILES * GEMV_OUTPUTS,
              WARPS * 32);
}

template <Blocks FORMAT>
void run_tiled(Tensor& out, const Tensor& input, const Tensor& records, const Tensor* bias) {
  using F = Tiled<FORMAT>;
  const int64_t outputs = out.size(-1), features = input.size(-1), group = 32 * F::GROUP;
  const int64_t tiles = (outputs + GEMV_OUTPUTS - 1) / GEMV_OUTPUTS, groups = (features + group - 1) / group;
  RAPID_CHECK(features % 32 == 0, "linear: a quantised weight takes a multiple of 32 features, got ", features);
  RAPID_CHECK(records.dim == 3 && records.size(0) == tiles && records.size(1) == groups && records.size(2) == F::RECORD,
              "linear: input ", input.shape(), " and out ", out.shape(), " take records of the same shape as (", tiles,
              ", ", groups, ", ", F::RECORD, "), got ", records.shape());
  check_contiguous("linear", "records", records);
  if (out.numel() == 0) return;
  GemvArguments arguments = gemv_arguments(out, input, records, bias);
  arguments.early = true;
  RAPID_CHECK(aligned_input(arguments) && reinterpret_cast<uint64_t>(records.data) % 16 == 0,
              "linear: every row of input must begin at a multiple of 16 bytes; call .clone() first");
  const Launch launch("linear", input);
  if (input.dtype == DType::float16) {
    launch_tiled<half_t, FORMAT>(launch, arguments);
  } else {
    launch_tiled<bfloat16_t, FORMAT>(launch, arguments);
  }
  check_launch("linear");
}

// `format` counts q8_0, q4_0, q4_1. No kernel still running writes the records.
inline void linear_tiled(Tensor& out, const Tensor& input, const Tensor& records, const Tensor* bias, int64_t format) {
  RAPID_CHECK(out.dim > 0 && input.dim > 0, "linear: input and out must have a last dimension");
  check_cuda("linear", "records", records);
  RAPID_CHECK(records.device == input.device && records.dtype == DType::uint8,
              "linear: records must be uint8 on the same CUDA device, cuda:", input.device, ": got ",
              name_of(records.dtype), " on cuda:", records.device);
  check_linear(out, input, records, bias, out.size(-1));
  switch (format) {
    case 0: return run_tiled<Blocks::q8_0>(out, input, records, bias);
    case 1: return run_tiled<Blocks::q4_0>(out, input, records, bias);
    case 2: return run_tiled<Blocks::q4_1>(out, input, records, bias);
    default: fail("linear: format ", format, " is none of 0 (q8_0), 1 (q4_0) and 2 (q4_1)");
  }
}

}  // namespace rapid_llm

// linear's launcher for up to 8 rows of input: checks, then the kernel whose blocks fit the shape of the weight.
#pragma once

#include "gemm/linear_gemv.cuh"
#include "gemm/linear_row.cuh"
#include "rapid_llm/launch.h"

namespace rapid_llm {

// The kernel before this one may still be running when this one starts, where the GPU can do that (Hopper and later):
// every block waits for its end before it reads the input or writes.
inline void launch_gemv(const Launch& launch, const GemvArguments& arguments, void (*kernel)(GemvArguments),
                        int block_outputs, unsigned threads) {
  int major = 0;
  check("linear", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, launch.device()));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(launch.blocks(arguments.outputs, block_outputs));
  config.blockDim = dim3(threads);
  config.stream = launch.stream();
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  check("linear", cudaLaunchKernelEx(&config, kernel, arguments));
}

template <class T, int WARPS, int TILES, int PIECES, int DEPTH, bool WHOLE>
void launch_dense(const Launch& launch, const GemvArguments& arguments) {
  launch_gemv(launch, arguments, linear_gemv_kernel<T, WARPS, TILES, PIECES, DEPTH, WHOLE, Cache::stream_wide>,
              TILES * GEMV_OUTPUTS, WARPS * 32);
}

template <class T, int WARPS, int SHARE, int ROWS, int DEPTH>
void launch_row(const Launch& launch, const GemvArguments& arguments) {
  launch_gemv(launch, arguments, linear_row_kernel<T, WARPS, SHARE, ROWS, DEPTH>, WARPS / SHARE * ROWS, WARPS * 32);
}

// How much of the GPU is busy, on average, while `blocks` run of which `slots` run at a time.
inline double filled(int64_t blocks, int64_t slots) {
  return static_cast<double>(blocks) / static_cast<double>((blocks + slots - 1) / slots * slots);
}

// Which kernel takes which weight, measured on an H200. For two rows of input and more it must not depend on how many
// they are: a row's result would, too.
template <class T>
void plan_gemv(const Launch& launch, const GemvArguments& arguments, bool whole) {
  if (!whole) return launch_dense<T, 8, 1, 1, 1, false>(launch, arguments);
  if (arguments.rows > 1) return launch_dense<T, 8, 2, 2, 2, true>(launch, arguments);
  const int64_t outputs = arguments.outputs;
  if (arguments.features < 1024) return launch_row<T, 4, 1, 1, 4>(launch, arguments);
  if (outputs <= 1024 || arguments.features >= 4 * outputs) return launch_row<T, 8, 8, 2, 2>(launch, arguments);
  int multiprocessors = 0;
  check("linear", cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device()));
  // Registers let a multiprocessor hold 4 blocks of the one and 6 of the other.
  if (filled((outputs + 7) / 8, 4 * multiprocessors) >= filled((outputs + 3) / 4, 6 * multiprocessors)) {
    return launch_row<T, 8, 2, 2, 2>(launch, arguments);
  }
  launch_row<T, 4, 4, 4, 2>(launch, arguments);
}

// Where row `row` of a tensor begins: rows are counted over all dimensions but the last.
inline int64_t row_offset(const Tensor& tensor, int64_t row) {
  int64_t offset = 0;
  for (int at = tensor.dim - 2; at >= 0; --at) {
    offset += row % tensor.sizes[at] * tensor.strides[at];
    row /= tensor.sizes[at];
  }
  return offset;
}

// What is asked of everything but the weight, which has `outputs` rows.
inline void check_linear(const Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias,
                         int64_t outputs) {
  check_cuda("linear", "input", input);
  check_like("linear", "out", out, input);
  RAPID_CHECK(input.dtype == DType::float16 || input.dtype == DType::bfloat16, "linear: ", name_of(input.dtype),
              " is not a dtype of this kernel; use float16 or bfloat16");
  check_dense_rows("linear", "input", input);
  bool fits = out.dim == input.dim && out.size(-1) == outputs;
  for (int at = 0; fits && at < input.dim - 1; ++at) fits = out.sizes[at] == input.sizes[at];
  RAPID_CHECK(fits, "linear: out must have the same shape as input, with ", outputs, " columns: input ",
              input.shape(), ", out ", out.shape());
  check_written("linear", "out", out);
  check_disjoint("linear", "out", out, "input", input);
  check_disjoint("linear", "out", out, "weight", weight);
  if (bias != nullptr) {
    check_like("linear", "bias", *bias, input);
    RAPID_CHECK(bias->dim == 1 && bias->size(0) == outputs, "linear: bias must have the same shape as a row of the "
                "result, (", outputs, "): got ", bias->shape());
    check_disjoint("linear", "out", out, "bias", *bias);
  }
  const int64_t rows = out.numel() == 0 ? 0 : out.numel() / outputs;
  RAPID_CHECK(rows <= GEMV_ROWS, "linear: this kernel takes up to ", GEMV_ROWS, " rows of input, got ", rows);
  RAPID_CHECK(input.size(-1) < 1 << 30, "linear: this kernel takes fewer than 2^30 features, got ", input.size(-1));
}

// Of tensors that have been checked and are not empty.
inline GemvArguments gemv_arguments(const Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias) {
  GemvArguments arguments = {};
  arguments.weight = weight.data;
  arguments.input = input.data;
  arguments.bias = bias != nullptr ? bias->data : nullptr;
  arguments.out = out.data;
  arguments.bias_stride = bias != nullptr ? bias->stride(0) : 0;
  arguments.out_stride = out.stride(-1);
  arguments.outputs = out.size(-1);
  arguments.features = static_cast<int>(input.size(-1));
  arguments.rows = static_cast<int>(out.numel() / out.size(-1));
  for (int row = 0; row < arguments.rows; ++row) {
    arguments.input_at[row] = row_offset(input, row);
    arguments.out_at[row] = row_offset(out, row);
  }
  return arguments;
}

// Every row of the input begins at a multiple of 16 bytes.
inline bool aligned_input(const GemvArguments& arguments) {
  uint64_t bits = reinterpret_cast<uint64_t>(arguments.input);
  for (int row = 0; row < arguments.rows; ++row) bits |= 2 * static_cast<uint64_t>(arguments.input_at[row]);
  return bits % 16 == 0;
}

// With `settled` the caller promises that no kernel still running writes the weight: the first of it is then read while
// the previous kernel ends.
inline void linear(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, bool settled) {
  check_cuda("linear", "input", input);
  check_like("linear", "weight", weight, input);
  RAPID_CHECK(input.dim > 0 && weight.dim == 2 && weight.size(1) == input.size(-1),
              "linear: weight and input do not meet in the same shape: input ", input.shape(), ", weight ",
              weight.shape());
  check_dense_rows("linear", "weight", weight);
  check_linear(out, input, weight, bias, weight.size(0));
  if (out.numel() == 0) return;
  GemvArguments arguments = gemv_arguments(out, input, weight, bias);
  arguments.weight_stride = weight.stride(0);
  arguments.early = settled;
  const int64_t step = weight.size(0) > 1 ? weight.stride(0) : 0;
  const bool whole = aligned_input(arguments) && reinterpret_cast<uint64_t>(weight.data) % 16 == 0 &&
                     (arguments.features | step) % 8 == 0;
  const Launch launch("linear", input);
  if (input.dtype == DType::float16) {
    plan_gemv<half_t>(launch, arguments, whole);
  } else {
    plan_gemv<bfloat16_t>(launch, arguments, whole);
  }
  check_launch("linear");
}

}  // namespace rapid_llm

// What the launchers of a linear layer fused with its neighbours share: what they ask for, and how they launch.
#pragma once

#include "gemm/linear_gemv_launch.h"
#include "rapid_llm/launch.h"

namespace rapid_llm {

// One row of input times a dense weight of `outputs` rows for each `parts` of it; `name` is the tensor that is written.
inline void check_fused(const char* op, const char* name, const Tensor& written, const Tensor& input,
                        const Tensor& weight, int64_t parts) {
  check_cuda(op, "input", input);
  check_like(op, "weight", weight, input);
  check_like(op, name, written, input);
  RAPID_CHECK(input.dtype == DType::float16 || input.dtype == DType::bfloat16, op, ": ", name_of(input.dtype),
              " is not a dtype of this kernel; use float16 or bfloat16");
  RAPID_CHECK(input.dim > 0 && weight.dim == 2 && weight.size(1) == input.size(-1), op,
              ": weight and input do not meet in the same shape: input ", input.shape(), ", weight ", weight.shape());
  RAPID_CHECK(weight.size(0) % parts == 0, op, ": weight must have as many rows for each of its ", parts,
              " parts, got ", weight.shape());
  check_dense_rows(op, "input", input);
  check_dense_rows(op, "weight", weight);
  bool fits = written.dim == input.dim && written.size(-1) == weight.size(0) / parts;
  for (int at = 0; fits && at < input.dim - 1; ++at) fits = written.sizes[at] == input.sizes[at];
  RAPID_CHECK(fits, op, ": ", name, " must have the same shape as input, with ", weight.size(0) / parts,
              " columns: input ", input.shape(), ", ", name, " ", written.shape());
  check_written(op, name, written);
  check_disjoint(op, name, written, "input", input);
  check_disjoint(op, name, written, "weight", weight);
  const int64_t rows = written.numel() == 0 ? 0 : written.numel() / written.size(-1);
  RAPID_CHECK(rows <= 1, op, ": this kernel takes one row of input, got ", rows);
  RAPID_CHECK(input.size(-1) < 1 << 30, op, ": this kernel takes fewer than 2^30 features, got ", input.size(-1));
}

// Whether rows of input and weight are whole vectors of 16 bytes.
inline bool whole_rows(const GemvArguments& arguments, const Tensor& weight) {
  const int64_t step = weight.size(0) > 1 ? weight.stride(0) : 0;
  return aligned_input(arguments) && reinterpret_cast<uint64_t>(weight.data) % 16 == 0 &&
         (arguments.features | step) % 8 == 0;
}

// `launch_gemv` for a kernel with arguments of its own: it may start while the kernel before it still runs.
template <class Arguments>
void launch_early(const char* op, const Launch& launch, const Arguments& arguments, void (*kernel)(Arguments),
                  unsigned blocks, unsigned threads) {
  int major = 0;
  check(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, launch.device()));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = launch.stream();
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  check(op, cudaLaunchKernelEx(&config, kernel, arguments));
}

}  // namespace rapid_llm

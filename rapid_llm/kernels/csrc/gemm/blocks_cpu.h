// What linear over GGUF blocks for the CPU checks of its tensors, and what it then needs of them.
#pragma once

#include "rapid_llm/host.h"

namespace rapid_llm {

constexpr int kBlock = 32;

// Strides of input and out in elements, of weight in bytes; the last dimension of each is dense.
struct Product {
  const uint8_t* weight;
  int64_t weight_stride;
  const float* input;
  int64_t input_stride, tokens, features, outputs;
  const float* bias;
  float* out;
  int64_t out_stride;
};

// A row of the weight holds `features` weights, a multiple of `block`, in `row_bytes` bytes.
inline void check_rows(const char* op, const Tensor& weight, int64_t block, int64_t row_bytes, int64_t features) {
  check_cpu(op, "weight", weight, DType::uint8);
  RAPID_CHECK(weight.dim == 2 && features >= 0 && features % block == 0 && weight.size(1) == row_bytes, op,
              ": a weight of shape ", weight.shape(), " does not fit ", features, " features, which are ", row_bytes,
              " bytes a row in blocks of ", block);
  check_dense_rows(op, "weight", weight);
}

inline Product product_of_rows(const char* op, Tensor& out, const Tensor& input, const Tensor& weight,
                               const Tensor* bias, int64_t block, int64_t row_bytes) {
  check_cpu(op, "input", input, DType::float32);
  check_cpu(op, "out", out, DType::float32);
  RAPID_CHECK(input.dim == 2, op, ": needs rows of input, got ", input.shape());
  check_rows(op, weight, block, row_bytes, input.size(1));
  const int64_t tokens = input.size(0), outputs = weight.size(0);
  RAPID_CHECK(out.dim == 2 && out.size(0) == tokens && out.size(1) == outputs, op, ": out must have the same shape, (",
              tokens, ", ", outputs, "): got ", out.shape());
  check_dense_rows(op, "input", input);
  check_dense_rows(op, "out", out);
  check_written(op, "out", out);
  check_disjoint(op, "out", out, "input", input);
  check_disjoint(op, "out", out, "weight", weight);
  if (bias != nullptr) {
    check_cpu(op, "bias", *bias, DType::float32);
    RAPID_CHECK(bias->dim == 1 && bias->size(0) == outputs, op, ": bias must be (", outputs, ",), got ", bias->shape());
    check_contiguous(op, "bias", *bias);
    check_disjoint(op, "out", out, "bias", *bias);
  }
  return {weight.as<const uint8_t>(), weight.stride(0),
          input.as<const float>(),    input.stride(0),
          tokens,                     input.size(1),
          outputs,                    bias == nullptr ? nullptr : bias->as<const float>(),
          out.as<float>(),            out.stride(0)};
}

}  // namespace rapid_llm

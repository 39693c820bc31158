// The AOT extension's declarations: each op by its two doors, over the launcher that just-in-time builds call too.
//
// rapid_llm::ext::<op> is what torch.ops.rapid_llm.<op> runs, rapid_llm::thin::<op> is the module's own function. Only
// torch's stable ABI is used, so that one library serves every torch from RAPID_LLM_TORCH_TARGET on.
#pragma once

#include <optional>

#include "rapid_llm/tensor.h"

// Device code needs nothing of torch; leaving its headers out of those passes makes five architectures affordable.
#ifndef __CUDA_ARCH__
#include <torch/csrc/stable/tensor.h>

namespace rapid_llm::ext {

using StableTensor = torch::stable::Tensor;
using OptionalTensor = std::optional<torch::stable::Tensor>;

inline DType dtype_of(const StableTensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::float32;
    case ScalarType::Half: return DType::float16;
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Float8_e4m3fn: return DType::float8_e4m3;
    case ScalarType::Char: return DType::int8;
    case ScalarType::Byte: return DType::uint8;
    case ScalarType::Int: return DType::int32;
    case ScalarType::Long: return DType::int64;
    case ScalarType::Bool: return DType::boolean;
    default: return DType::other;
  }
}

// What a launcher knows of `tensor`, which must outlive the view.
inline Tensor view(const StableTensor& tensor) {
  Tensor seen;
  seen.data = tensor.data_ptr();
  seen.dtype = dtype_of(tensor);
  seen.cuda = tensor.is_cuda();
  seen.cpu = tensor.is_cpu();
  seen.device = tensor.get_device_index();
  seen.dim = static_cast<int>(tensor.dim());
  seen.sizes = tensor.sizes().data();
  seen.strides = tensor.strides().data();
  return seen;
}

void fused_add_rmsnorm(StableTensor& input, StableTensor& residual, const StableTensor& weight, double eps);
void linear(StableTensor& out, const StableTensor& input, const StableTensor& weight, const OptionalTensor& bias,
            bool settled);
void rmsnorm(StableTensor& out, const StableTensor& input, const StableTensor& weight, double eps);
void rope(StableTensor& query, StableTensor& key, const StableTensor& positions, const StableTensor& cos_sin_cache,
          bool interleaved);
void rope_kvcache_write(StableTensor& query, StableTensor& key, const StableTensor& value, StableTensor& k_cache,
                        StableTensor& v_cache, const StableTensor& positions, const StableTensor& cos_sin_cache,
                        const StableTensor& slot_mapping, bool interleaved);
void scale(StableTensor& out, const StableTensor& input, double factor);
void silu_and_mul(StableTensor& out, const StableTensor& input);

}  // namespace rapid_llm::ext
#endif  // __CUDA_ARCH__

namespace rapid_llm::thin {

void fused_add_rmsnorm(Tensor& input, Tensor& residual, const Tensor& weight, double eps);
void linear(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, bool settled);
void rmsnorm(Tensor& out, const Tensor& input, const Tensor& weight, double eps);
void rope(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved);
void rope_kvcache_write(Tensor& query, Tensor& key, const Tensor& value, Tensor& k_cache, Tensor& v_cache,
                        const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slot_mapping,
                        bool interleaved);
void scale(Tensor& out, const Tensor& input, double factor);
void silu_and_mul(Tensor& out, const Tensor& input);

}  // namespace rapid_llm::thin

#ifdef __CUDACC__
#include "rapid_llm/launch.h"

// For a launcher of this extension alone: runs the statements once, with `scalar_t` the device type of tensor's dtype.
#define RAPID_LLM_DISPATCH_FLOATING(op, tensor, ...)                    \
  ::rapid_llm::dispatch_floating(op, tensor, [&](auto rapid_llm_type) { \
    using scalar_t = typename decltype(rapid_llm_type)::type;           \
    __VA_ARGS__                                                         \
  })
#endif

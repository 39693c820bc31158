// Linear layers over quantised weights that a CPU decodes in registers: everything but the formats.
//
// A format decodes 32 weights at a time: `decode(row, b, blocks, w)` gives weights 32 b to 32 b + 31 of a row of 32
// `blocks`, as kVecs vectors. kWeights: what a row is a multiple of. bytes(features): of a row. kStep: of 32 weights,
// about, for prefetching.
#pragma once

#include <omp.h>

#include <cstring>

#include "gemm/blocks_cpu.h"
#include "gemm/vectors_cpu.h"
#include "rapid_llm/module.h"

namespace rapid_llm {
namespace {

#if defined(__AVX512F__)
// Widen 16 bytes to one vector.
inline void from_u8(__m128i bytes, Vec* out) { out[0] = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
inline void from_s8(__m128i bytes, Vec* out) { out[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
#else
// Widen 16 bytes to two vectors.
inline void from_u8(__m128i bytes, Vec* out) {
  out[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  out[1] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
}
inline void from_s8(__m128i bytes, Vec* out) {
  out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
}
#endif

constexpr int kVecs = kBlock / kLanes;

inline __m128 halves(const uint8_t* p, int count) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, 2 * count);
  return _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
}

inline void nibbles(const uint8_t* p, Vec* w) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i q = bytes16(p);
  from_u8(_mm_and_si128(q, mask), w);
  from_u8(_mm_and_si128(_mm_srli_epi16(q, 4), mask), w + kVecs / 2);
}

// What formats of blocks of 32 weights, one after another, have in common.
template <int kBytes>
struct Blocks {
  static constexpr int kStep = kBytes, kWeights = kBlock;
  static int64_t bytes(int64_t features) { return features / kBlock * kBytes; }
};

// Rows of the weight x rows of the input at once; each result has two accumulators to hide the latency of fma.
template <class Format, int kRows, int kTokens>
inline void tile(const uint8_t* weight, int64_t weight_stride, const float* input, int64_t input_stride,
                 int64_t blocks, const float* bias, float* out, int64_t out_stride) {
  Vec acc[kRows][kTokens][2];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) acc[r][t][0] = acc[r][t][1] = zero();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int r = 0; r < kRows; ++r) {
      Vec w[kVecs];
      const uint8_t* row = weight + r * weight_stride;
      _mm_prefetch(reinterpret_cast<const char*>(row + b * Format::kStep + kAhead), _MM_HINT_T0);
      Format::decode(row, b, blocks, w);
      for (int t = 0; t < kTokens; ++t) {
        const float* x = input + t * input_stride + b * kBlock;
        for (int i = 0; i < kVecs; ++i) acc[r][t][i & 1] = fma(w[i], load(x + i * kLanes), acc[r][t][i & 1]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t)
      out[t * out_stride + r] = sum(acc[r][t][0], acc[r][t][1]) + (bias == nullptr ? 0.0f : bias[r]);
}

template <class Format>
void rows(const uint8_t* weight, int64_t weight_stride, const float* input, int64_t input_stride,
          int64_t tokens, int64_t blocks, const float* bias, float* out, int64_t out_stride,
          int64_t first, int64_t last) {
  for (int64_t n = first; n < last;) {
    const bool two = n + 2 <= last;
    const uint8_t* w = weight + n * weight_stride;
    const float* c = bias == nullptr ? nullptr : bias + n;
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
      const float* x = input + t * input_stride;
      tile<Format, 1, 4>(w, weight_stride, x, input_stride, blocks, c, out + t * out_stride + n, out_stride);
      if (two)
        tile<Format, 1, 4>(w + weight_stride, weight_stride, x, input_stride, blocks, c == nullptr ? c : c + 1,
                           out + t * out_stride + n + 1, out_stride);
    }
    for (; t < tokens; ++t) {
      const float* x = input + t * input_stride;
      float* y = out + t * out_stride + n;
      if (two)
        tile<Format, 2, 1>(w, weight_stride, x, input_stride, blocks, c, y, out_stride);
      else
        tile<Format, 1, 1>(w, weight_stride, x, input_stride, blocks, c, y, out_stride);
    }
    n += two ? 2 : 1;
  }
}

template <class Format>
void multiply(const uint8_t* weight, int64_t weight_stride, const float* input, int64_t input_stride,
              int64_t tokens, int64_t features, int64_t outputs, const float* bias, float* out,
              int64_t out_stride, int64_t threads) {
  const int64_t blocks = features / kBlock;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    // Whole 64-byte lines of the output per thread, so that no two threads write one line.
    const int64_t share = ((outputs + parts - 1) / parts + 15) / 16 * 16;
    const int64_t first = part * share < outputs ? part * share : outputs;
    const int64_t last = first + share < outputs ? first + share : outputs;
    rows<Format>(weight, weight_stride, input, input_stride, tokens, blocks, bias, out, out_stride, first, last);
  }
}

using ::rapid_llm::store;

// Round to bfloat16, ties to even. The weights are finite: fp16 scales times small integers.
inline void store(uint16_t* p, Vec v) {
  float values[kLanes];
  store(values, v);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    p[i] = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

template <class Format, class Out>
void dequantise(const uint8_t* weight, int64_t weight_stride, int64_t outputs, int64_t features,
                Out* out, int64_t threads) {
  const int64_t blocks = features / kBlock;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t n = 0; n < outputs; ++n) {
    for (int64_t b = 0; b < blocks; ++b) {
      Vec w[kVecs];
      Format::decode(weight + n * weight_stride, b, blocks, w);
      for (int i = 0; i < kVecs; ++i) store(out + n * features + b * kBlock + i * kLanes, w[i]);
    }
  }
}

}  // namespace

template <class Format>
Product product_of(const char* op, Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias) {
  const int64_t features = input.dim == 2 ? input.size(1) : 0;
  return product_of_rows(op, out, input, weight, bias, Format::kWeights, Format::bytes(features));
}

// Rows of input and out, blocks of weight; `bias` may be absent.
#define RAPID_LLM_LINEAR(name, Format)                                                                       \
  void name(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, int64_t threads) {   \
    const Product p = product_of<Format>("linear", out, input, weight, bias);                                \
    const door::Unlocked unlocked(p.tokens * p.features * p.outputs);                                        \
    multiply<Format>(p.weight, p.weight_stride, p.input, p.input_stride, p.tokens, p.features, p.outputs,    \
                     p.bias, p.out, p.out_stride, threads);                                                  \
  }

// Dense rows, (outputs, features), from outputs `first` on of the weight: as many as `out`, fp32 or bfloat16, has.
template <class Format>
void rows_from(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {
  constexpr const char* op = "linear";
  check_rows(op, weight, Format::kWeights, out.dim == 2 ? Format::bytes(out.size(1)) : -1,
             out.dim == 2 ? out.size(1) : -1);
  check_cpu(op, "scratch", out);
  check_contiguous(op, "scratch", out);
  check_disjoint(op, "scratch", out, "weight", weight);
  const int64_t outputs = out.size(0), features = out.size(1);
  RAPID_CHECK(first >= 0 && first + outputs <= weight.size(0), op, ": rows ", first, " to ", first + outputs,
              " are not in the weight of ", weight.size(0));
  const uint8_t* blocks = weight.as<uint8_t>() + first * weight.stride(0);
  const door::Unlocked unlocked(outputs * features);
  if (out.dtype == DType::float32) {
    dequantise<Format>(blocks, weight.stride(0), outputs, features, out.as<float>(), threads);
  } else {
    RAPID_CHECK(out.dtype == DType::bfloat16, op, ": scratch must be float32 or bfloat16, got ", name_of(out.dtype));
    dequantise<Format>(blocks, weight.stride(0), outputs, features, out.as<uint16_t>(), threads);
  }
}

#define RAPID_LLM_DEQUANTISE(name, Format)                                           \
  void name(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {     \
    rows_from<Format>(out, weight, first, threads);                                  \
  }

}  // namespace rapid_llm

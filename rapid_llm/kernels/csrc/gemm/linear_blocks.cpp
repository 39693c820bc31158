// Linear layers over GGUF block-quantised weights for x86 CPUs, fp32 input and output.
//
// Why not Triton or plain PyTorch: there is no Triton on CPU, and PyTorch would write the dequantised weight to memory
// and read it again, which costs several times the bytes of the weight itself. Here a block of 32 weights is decoded in
// registers, with the same rounding as dequantising it in fp32, and used at once for up to four rows of the input. For
// many rows a GEMM over a dequantised piece of the weight is faster; writing it is the second half of this file.
//
// Formats (block_formats.py has the numbers): q8_0 is fp16 d, 32 int8 q, w = d*q. q4_0 is fp16 d, 16 bytes,
// w = d*(q - 8). q4_1 is fp16 d, fp16 m, 16 bytes, w = d*q + m. Low nibbles are weights 0..15, high nibbles 16..31.

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

struct Q8_0 {
  static constexpr int kBytes = 34;
  static void decode(const uint8_t* p, Vec* w) {
    const Vec d = all(halves(p, 1));
    from_s8(bytes16(p + 2), w);
    from_s8(bytes16(p + 18), w + kVecs / 2);
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, w[i]);
  }
};

struct Q4_0 {
  static constexpr int kBytes = 18;
  static void decode(const uint8_t* p, Vec* w) {
    const __m128 d = halves(p, 1);
    // d*(q - 8) is exact in fp32, and so is d*q - 8*d evaluated by one fused operation.
    const Vec scale = all(d), shift = all(_mm_mul_ss(d, _mm_set_ss(-8.0f)));
    nibbles(p + 2, w);
    for (int i = 0; i < kVecs; ++i) w[i] = fma(scale, w[i], shift);
  }
};

struct Q4_1 {
  static constexpr int kBytes = 20;
  static void decode(const uint8_t* p, Vec* w) {
    const __m128 dm = halves(p, 2);
    const Vec scale = all(dm), shift = all(_mm_movehdup_ps(dm));
    nibbles(p + 4, w);
    // d*q is exact in fp32, so the fused operation rounds d*q + m once, as dequantising does.
    for (int i = 0; i < kVecs; ++i) w[i] = fma(scale, w[i], shift);
  }
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
      const uint8_t* block = weight + r * weight_stride + b * Format::kBytes;
      _mm_prefetch(reinterpret_cast<const char*>(block + kAhead), _MM_HINT_T0);
      Format::decode(block, w);
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
void linear(const uint8_t* weight, int64_t weight_stride, const float* input, int64_t input_stride,
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
      Format::decode(weight + n * weight_stride + b * Format::kBytes, w);
      for (int i = 0; i < kVecs; ++i) store(out + n * features + b * kBlock + i * kLanes, w[i]);
    }
  }
}

}  // namespace

// Rows of input and out, blocks of weight; `bias` may be absent.
#define RAPID_LLM_LINEAR(name, Format)                                                                             \
  void name(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, int64_t threads) {         \
    const Product p = product_of("linear", out, input, weight, bias, Format::kBytes);                              \
    const door::Unlocked unlocked(p.tokens * p.features * p.outputs);                                              \
    linear<Format>(p.weight, p.weight_stride, p.input, p.input_stride, p.tokens, p.features, p.outputs, p.bias, p.out, \
                   p.out_stride, threads);                                                                         \
  }

RAPID_LLM_LINEAR(linear_q8_0, Q8_0)
RAPID_LLM_LINEAR(linear_q4_0, Q4_0)
RAPID_LLM_LINEAR(linear_q4_1, Q4_1)

// Dense rows, (outputs, features), from outputs `first` on of the weight: as many as `out`, fp32 or bfloat16, has.
template <class Format>
void rows_from(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {
  constexpr const char* op = "linear";
  check_blocks(op, weight, Format::kBytes, out.dim == 2 ? out.size(1) : -1);
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

void dequantise_q8_0(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {
  rows_from<Q8_0>(out, weight, first, threads);
}
void dequantise_q4_0(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {
  rows_from<Q4_0>(out, weight, first, threads);
}
void dequantise_q4_1(Tensor& out, const Tensor& weight, int64_t first, int64_t threads) {
  rows_from<Q4_1>(out, weight, first, threads);
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_q8_0), RAPID_LLM_FUNCTION(linear_q4_0), RAPID_LLM_FUNCTION(linear_q4_1),
                 RAPID_LLM_FUNCTION(dequantise_q8_0), RAPID_LLM_FUNCTION(dequantise_q4_0),
                 RAPID_LLM_FUNCTION(dequantise_q4_1))

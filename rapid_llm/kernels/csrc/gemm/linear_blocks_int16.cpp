// Linear layers over GGUF block-quantised weights for x86 CPUs, with the input rounded to 16-bit integers per block.
//
// Why not Triton or plain PyTorch: see linear_blocks.cpp. Its decoding to fp32 is what bounds that kernel, not memory.
// Here each block of 32 inputs becomes x = s*q with s = max|x| / 32767, so that a block's products are integers and one
// multiply-add instruction takes two of them; a block's sum is exact. The rounding of x is 2^-16 of its block's largest
// value, far below bf16's.
//
// With weights w = d*c + m (c the stored integer, m = 0 for q8_0, -8*d for q4_0), a row gives
// sum over blocks of d*s*(c . q) + m*s*sum(q).

#include <immintrin.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gemm/blocks_cpu.h"
#include "rapid_llm/module.h"

namespace rapid_llm {
namespace {

// Bytes ahead of the block in use; the hardware's own prefetcher stops at every page.
constexpr int kAhead = 2048;

// The input of one call: integers, and per block the scale s and s times the sum of the integers.
struct Rounded {
  std::vector<int16_t> q;
  std::vector<float> scale, total;
};

#if defined(__AVX512BW__)
struct Codes {
  __m512i all;
};
using Acc = __m512;
inline Acc zero() { return _mm512_setzero_ps(); }
inline Acc add_block(const Codes& c, const int16_t* q, float scale, Acc acc) {
  const __m512i dot = _mm512_madd_epi16(c.all, _mm512_loadu_si512(q));
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(scale), acc);
}
inline float sum(Acc a) { return _mm512_reduce_add_ps(a); }
inline Codes widen_u8(__m128i low, __m128i high) { return {_mm512_cvtepu8_epi16(_mm256_set_m128i(high, low))}; }
inline Codes widen_s8(__m128i low, __m128i high) { return {_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low))}; }
#else
struct Codes {
  __m256i low, high;
};
using Acc = __m256;
inline Acc zero() { return _mm256_setzero_ps(); }
inline Acc add_block(const Codes& c, const int16_t* q, float scale, Acc acc) {
  const auto* at = reinterpret_cast<const __m256i*>(q);
  const __m256i low = _mm256_madd_epi16(c.low, _mm256_loadu_si256(at));
  const __m256i high = _mm256_madd_epi16(c.high, _mm256_loadu_si256(at + 1));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(low, high)), _mm256_set1_ps(scale), acc);
}
inline float sum(Acc v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline Codes widen_u8(__m128i low, __m128i high) { return {_mm256_cvtepu8_epi16(low), _mm256_cvtepu8_epi16(high)}; }
inline Codes widen_s8(__m128i low, __m128i high) { return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)}; }
#endif

inline __m128i bytes16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

inline float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

inline Codes nibbles(const uint8_t* p) {
  const __m128i mask = _mm_set1_epi8(15), q = bytes16(p);
  return widen_u8(_mm_and_si128(q, mask), _mm_and_si128(_mm_srli_epi16(q, 4), mask));
}

struct Q8_0 {
  static constexpr int kBytes = 34;
  static Codes decode(const uint8_t* p, float* d, float* m) {
    *d = half(p);
    *m = 0.0f;
    return widen_s8(bytes16(p + 2), bytes16(p + 18));
  }
};

struct Q4_0 {
  static constexpr int kBytes = 18;
  static Codes decode(const uint8_t* p, float* d, float* m) {
    *d = half(p);
    *m = -8.0f * *d;
    return nibbles(p + 2);
  }
};

struct Q4_1 {
  static constexpr int kBytes = 20;
  static Codes decode(const uint8_t* p, float* d, float* m) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
    *d = _mm_cvtss_f32(both);
    *m = _mm_cvtss_f32(_mm_movehdup_ps(both));
    return nibbles(p + 4);
  }
};

// Rounds a block; false if it holds NaN or an infinity, which integers cannot carry.
inline bool round_block(const float* x, int16_t* q, float* scale, float* total) {
  float largest = 0.0f, poison = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
  for (int i = 0; i < kBlock; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest ? magnitude : largest;
    poison += x[i] * 0.0f;  // NaN for NaN and for infinities
  }
  // Below this the quotient would overflow; such a block is 0 to fp32's last bit beside any other.
  const float inverse = largest > 1e-30f ? 32767.0f / largest : 0.0f;
  int32_t added = 0;
#pragma omp simd reduction(+ : added)
  for (int i = 0; i < kBlock; ++i) {
    const int32_t rounded = static_cast<int32_t>(std::nearbyint(x[i] * inverse));
    q[i] = static_cast<int16_t>(rounded);
    added += rounded;
  }
  *scale = largest > 1e-30f ? largest / 32767.0f : 0.0f;
  *total = *scale * static_cast<float>(added);
  return poison == 0.0f;
}

template <class Format, int kTokens>
inline void row(const uint8_t* weight, const int16_t* q, const float* scale, const float* total,
                int64_t features, float bias, float* out, int64_t out_stride) {
  const int64_t blocks = features / kBlock;
  Acc acc[kTokens];
  float rest[kTokens];
  for (int t = 0; t < kTokens; ++t) {
    acc[t] = zero();
    rest[t] = 0.0f;
  }
  for (int64_t b = 0; b < blocks; ++b) {
    float d, m;
    _mm_prefetch(reinterpret_cast<const char*>(weight + b * Format::kBytes + kAhead), _MM_HINT_T0);
    const Codes codes = Format::decode(weight + b * Format::kBytes, &d, &m);
    for (int t = 0; t < kTokens; ++t) {
      acc[t] = add_block(codes, q + t * features + b * kBlock, d * scale[t * blocks + b], acc[t]);
      rest[t] += m * total[t * blocks + b];
    }
  }
  for (int t = 0; t < kTokens; ++t) out[t * out_stride] = sum(acc[t]) + rest[t] + bias;
}

template <class Format>
bool linear(const uint8_t* weight, int64_t weight_stride, const float* input, int64_t input_stride,
           int64_t tokens, int64_t features, int64_t outputs, const float* bias, float* out,
           int64_t out_stride, int64_t threads) {
  const int64_t blocks = features / kBlock;
  static thread_local Rounded x;
  x.q.resize(tokens * features);
  x.scale.resize(tokens * blocks);
  x.total.resize(tokens * blocks);
  bool finite = true;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t b = 0; b < blocks; ++b)
      finite &= round_block(input + t * input_stride + b * kBlock, &x.q[t * features + b * kBlock],
                            &x.scale[t * blocks + b], &x.total[t * blocks + b]);
  if (!finite) return false;
  const int16_t* q = x.q.data();
  const float *scale = x.scale.data(), *total = x.total.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    // Whole 64-byte lines of the output per thread, so that no two threads write one line.
    const int64_t share = ((outputs + parts - 1) / parts + 15) / 16 * 16;
    const int64_t first = part * share < outputs ? part * share : outputs;
    const int64_t last = first + share < outputs ? first + share : outputs;
    for (int64_t n = first; n < last; ++n) {
      const uint8_t* w = weight + n * weight_stride;
      const float c = bias == nullptr ? 0.0f : bias[n];
      int64_t t = 0;
      for (; t + 4 <= tokens; t += 4)
        row<Format, 4>(w, q + t * features, scale + t * blocks, total + t * blocks, features, c,
                       out + t * out_stride + n, out_stride);
      for (; t < tokens; ++t)
        row<Format, 1>(w, q + t * features, scale + t * blocks, total + t * blocks, features, c,
                       out + t * out_stride + n, out_stride);
    }
  }
  return true;
}

}  // namespace

// Rows of input and out, blocks of weight; `bias` may be absent. False, with nothing written, for a non-finite input.
#define RAPID_LLM_LINEAR(name, Format)                                                                             \
  bool name(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, int64_t threads) {         \
    const int64_t row = input.dim == 2 ? input.size(1) / kBlock * Format::kBytes : 0;                              \
    const Product p = product_of_rows("linear", out, input, weight, bias, kBlock, row);                            \
    const door::Unlocked unlocked(p.tokens * p.features * p.outputs);                                              \
    return linear<Format>(p.weight, p.weight_stride, p.input, p.input_stride, p.tokens, p.features, p.outputs,     \
                          p.bias, p.out, p.out_stride, threads);                                                   \
  }

RAPID_LLM_LINEAR(linear_int16_q8_0, Q8_0)
RAPID_LLM_LINEAR(linear_int16_q4_0, Q4_0)
RAPID_LLM_LINEAR(linear_int16_q4_1, Q4_1)

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_int16_q8_0), RAPID_LLM_FUNCTION(linear_int16_q4_0),
                 RAPID_LLM_FUNCTION(linear_int16_q4_1))

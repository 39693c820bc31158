// Linear layers over the younger quantised formats for x86 CPUs, fp32 input and output. Why C++: see linear_blocks.cpp.
//
// Each format's bytes are described in ops/gemm/gguf_blocks.py and ops/gemm/scaled_rows.py. A weight is rounded as it is
// there: products of scales and codes are exact in fp32, and what is added to them is fused, so that the sum is rounded
// once; e4m3 and int8 codes are rounded once, by the product with their fp32 scale.

#include "gemm/decoded_cpu.h"

namespace rapid_llm {
namespace {

inline Vec all(float v) { return rapid_llm::all(_mm_set_ss(v)); }
inline float half(const uint8_t* p) { return _mm_cvtss_f32(halves(p, 1)); }

// The bits of each byte from `shift` on that `mask` keeps.
inline __m128i bits(__m128i bytes, int shift, int mask) {
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(shift)), _mm_set1_epi8(static_cast<char>(mask)));
}

inline __m128i with_high(__m128i low, __m128i high) { return _mm_or_si128(low, _mm_slli_epi16(high, 4)); }

// 16 codes at w: scale * q + shift.
inline void sixteen(__m128i codes, float scale, float shift, Vec* w) {
  from_u8(codes, w);
  const Vec s = all(scale), c = all(shift);
  for (int i = 0; i < kVecs / 2; ++i) w[i] = fma(s, w[i], c);
}

// Low nibbles of 16 bytes, then high ones, with a fifth bit from 4 bytes.
struct FiveBits {
  __m128i q[2];
  FiveBits(const uint8_t* low, const uint8_t* high) {
    uint32_t word;
    std::memcpy(&word, high, 4);
    const __m256i bytes = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i one = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(word)), bytes);
    const __m256i set = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, one), one), _mm256_set1_epi8(16));
    const __m128i both = bytes16(low);
    q[0] = _mm_or_si128(bits(both, 0, 15), _mm256_castsi256_si128(set));
    q[1] = _mm_or_si128(bits(both, 4, 15), _mm256_extracti128_si256(set, 1));
  }
};

struct Q5_0 : Blocks<22> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const FiveBits codes(p + 6, p + 2);
    const float d = half(p);
    for (int i = 0; i < 2; ++i) sixteen(codes.q[i], d, -16.0f * d, w + i * kVecs / 2);
  }
};

struct Q5_1 : Blocks<24> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const FiveBits codes(p + 8, p + 4);
    for (int i = 0; i < 2; ++i) sixteen(codes.q[i], half(p), half(p + 2), w + i * kVecs / 2);
  }
};

struct IQ4_NL : Blocks<18> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const __m128i table = _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113);
    const __m128i both = bytes16(p + 2);
    from_s8(_mm_shuffle_epi8(table, bits(both, 0, 15)), w);
    from_s8(_mm_shuffle_epi8(table, bits(both, 4, 15)), w + kVecs / 2);
    const Vec d = all(half(p));
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, w[i]);
  }
};

// Blocks of 256, of which b counts eighths.
template <int kBytes>
struct Super {
  static constexpr int kStep = kBytes / 8, kWeights = 256;
  static int64_t bytes(int64_t features) { return features / kWeights * kBytes; }
  static const uint8_t* at(const uint8_t* row, int64_t b) { return row + b / 8 * kBytes; }
};

struct Q2_K : Super<84> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = at(row, b);
    const int j = static_cast<int>(b % 8);
    const float d = half(p + 80), least = half(p + 82);
    for (int i = 0; i < 2; ++i) {
      const int scale = p[2 * j + i];
      const __m128i q = bits(bytes16(p + 16 + j / 4 * 32 + 16 * i), j % 4 * 2, 3);
      sixteen(q, d * static_cast<float>(scale & 15), -(least * static_cast<float>(scale >> 4)), w + i * kVecs / 2);
    }
  }
};

struct Q3_K : Super<110> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = at(row, b);
    const int j = static_cast<int>(b % 8);
    const float d = half(p + 108);
    for (int i = 0; i < 2; ++i) {
      const int g = 2 * j + i;
      const int scale = ((p[96 + g % 8] >> (g / 8 * 4)) & 15) | (((p[104 + g % 4] >> (g / 4 * 2)) & 3) << 4);
      const __m128i low = bits(bytes16(p + 32 + j / 4 * 32 + 16 * i), j % 4 * 2, 3);
      const __m128i high = bits(bytes16(p + 16 * i), j, 1);
      const float s = d * static_cast<float>(scale - 32);
      sixteen(_mm_or_si128(low, _mm_slli_epi16(high, 2)), s, -4.0f * s, w + i * kVecs / 2);
    }
  }
};

// A scale and a minimum of 6 bits of group j, out of 12 bytes; times d and dmin, which come before those.
struct SixBits {
  float scale, shift;
  SixBits(const uint8_t* p, int j) {
    const uint8_t* s = p + 4;
    const int a = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4);
    const int m = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4);
    scale = half(p) * static_cast<float>(a);
    shift = -(half(p + 2) * static_cast<float>(m));
  }
};

struct Q4_K : Super<144> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = at(row, b);
    const int j = static_cast<int>(b % 8);
    const SixBits g(p, j);
    for (int i = 0; i < 2; ++i) {
      const __m128i q = bits(bytes16(p + 16 + j / 2 * 32 + 16 * i), j % 2 * 4, 15);
      sixteen(q, g.scale, g.shift, w + i * kVecs / 2);
    }
  }
};

struct Q5_K : Super<176> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = at(row, b);
    const int j = static_cast<int>(b % 8);
    const SixBits g(p, j);
    for (int i = 0; i < 2; ++i) {
      const __m128i low = bits(bytes16(p + 48 + j / 2 * 32 + 16 * i), j % 2 * 4, 15);
      const __m128i high = bits(bytes16(p + 16 + 16 * i), j, 1);
      sixteen(with_high(low, high), g.scale, g.shift, w + i * kVecs / 2);
    }
  }
};

struct Q6_K : Super<210> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = at(row, b);
    const int j = static_cast<int>(b % 8), part = j / 4, c = j % 4;
    const float d = half(p + 208);
    for (int i = 0; i < 2; ++i) {
      const __m128i low = bits(bytes16(p + part * 64 + c % 2 * 32 + 16 * i), c / 2 * 4, 15);
      const __m128i high = bits(bytes16(p + 128 + part * 32 + 16 * i), c * 2, 3);
      const float s = d * static_cast<float>(static_cast<int8_t>(p[192 + 2 * j + i]));
      sixteen(with_high(low, high), s, -32.0f * s, w + i * kVecs / 2);
    }
  }
};

// A byte a weight, then an fp32 scale.
struct Channel {
  static constexpr int kStep = 32, kWeights = 32;
  static int64_t bytes(int64_t features) { return features / 16 * 16 + 16; }
  static Vec scale(const uint8_t* row, int64_t blocks) {
    float d;
    std::memcpy(&d, row + blocks * kBlock, 4);
    return all(d);
  }
};

struct INT8_CHANNEL : Channel {
  static void decode(const uint8_t* row, int64_t b, int64_t blocks, Vec* w) {
    const Vec d = scale(row, blocks);
    for (int i = 0; i < 2; ++i) from_s8(bytes16(row + b * kBlock + 16 * i), w + i * kVecs / 2);
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, w[i]);
  }
};

// 16 e4m3 codes: moved to where fp16 has exponent and fraction they are 256 times too small, subnormals included.
inline void from_e4m3(__m128i bytes, Vec* out) {
  const __m256i code = _mm256_cvtepu8_epi16(bytes), low = _mm256_and_si256(code, _mm256_set1_epi16(127));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(128)), 8);
  const __m256i nan = _mm256_cmpeq_epi16(low, _mm256_set1_epi16(127));
  const __m256i number = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(low, 7), sign), nan);
  const Vec up = all(256.0f);
#if defined(__AVX512F__)
  out[0] = mul(up, _mm512_cvtph_ps(number));
#else
  out[0] = mul(up, _mm256_cvtph_ps(_mm256_castsi256_si128(number)));
  out[1] = mul(up, _mm256_cvtph_ps(_mm256_extracti128_si256(number, 1)));
#endif
}

struct FP8_CHANNEL : Channel {
  static void decode(const uint8_t* row, int64_t b, int64_t blocks, Vec* w) {
    const Vec d = scale(row, blocks);
    for (int i = 0; i < 2; ++i) from_e4m3(bytes16(row + b * kBlock + 16 * i), w + i * kVecs / 2);
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, w[i]);
  }
};

// Two weights a byte, the first in the low nibble, then for each group an fp16 scale and zero point.
template <int kGroup>
struct INT4 {
  static constexpr int kStep = 16, kWeights = kGroup;
  static int64_t bytes(int64_t features) { return (features / 2 + features / kGroup * 4 + 15) / 16 * 16; }
  static void decode(const uint8_t* row, int64_t b, int64_t blocks, Vec* w) {
    const uint8_t* pair = row + blocks * 16 + b * kBlock / kGroup * 4;
    const __m128i both = bytes16(row + b * 16), low = bits(both, 0, 15), high = bits(both, 4, 15);
    from_u8(_mm_unpacklo_epi8(low, high), w);
    from_u8(_mm_unpackhi_epi8(low, high), w + kVecs / 2);
    const Vec d = all(half(pair)), zero = all(-half(pair + 2)), one = all(1.0f);
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, fma(one, w[i], zero));
  }
};

using INT4_32 = INT4<32>;
using INT4_64 = INT4<64>;
using INT4_128 = INT4<128>;

}  // namespace

#define RAPID_LLM_FORMAT(name, Format)     \
  RAPID_LLM_LINEAR(linear_##name, Format)  \
  RAPID_LLM_DEQUANTISE(dequantise_##name, Format)

RAPID_LLM_FORMAT(q5_0, Q5_0)
RAPID_LLM_FORMAT(q5_1, Q5_1)
RAPID_LLM_FORMAT(q2_k, Q2_K)
RAPID_LLM_FORMAT(q3_k, Q3_K)
RAPID_LLM_FORMAT(q4_k, Q4_K)
RAPID_LLM_FORMAT(q5_k, Q5_K)
RAPID_LLM_FORMAT(q6_k, Q6_K)
RAPID_LLM_FORMAT(iq4_nl, IQ4_NL)
RAPID_LLM_FORMAT(fp8_channel, FP8_CHANNEL)
RAPID_LLM_FORMAT(int8_channel, INT8_CHANNEL)
RAPID_LLM_FORMAT(int4_group32, INT4_32)
RAPID_LLM_FORMAT(int4_group64, INT4_64)
RAPID_LLM_FORMAT(int4_group128, INT4_128)

}  // namespace rapid_llm

#define RAPID_LLM_BOTH(name) RAPID_LLM_FUNCTION(linear_##name), RAPID_LLM_FUNCTION(dequantise_##name)

RAPID_LLM_MODULE(RAPID_LLM_BOTH(q5_0), RAPID_LLM_BOTH(q5_1), RAPID_LLM_BOTH(q2_k), RAPID_LLM_BOTH(q3_k),
                 RAPID_LLM_BOTH(q4_k), RAPID_LLM_BOTH(q5_k), RAPID_LLM_BOTH(q6_k), RAPID_LLM_BOTH(iq4_nl),
                 RAPID_LLM_BOTH(fp8_channel), RAPID_LLM_BOTH(int8_channel), RAPID_LLM_BOTH(int4_group32),
                 RAPID_LLM_BOTH(int4_group64), RAPID_LLM_BOTH(int4_group128))

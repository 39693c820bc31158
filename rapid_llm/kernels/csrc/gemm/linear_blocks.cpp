// Linear layers over GGUF block-quantised weights for x86 CPUs, fp32 input and output.
//
// Why not Triton or plain PyTorch: there is no Triton on CPU, and PyTorch would write the dequantised weight to memory
// and read it again, which costs several times the bytes of the weight itself. Here a block of 32 weights is decoded in
// registers, with the same rounding as dequantising it in fp32, and used at once for up to four rows of the input. For
// many rows a GEMM over a dequantised piece of the weight is faster, which the other functions write.
//
// Formats (block_formats.py has the numbers): q8_0 is fp16 d, 32 int8 q, w = d*q. q4_0 is fp16 d, 16 bytes,
// w = d*(q - 8). q4_1 is fp16 d, fp16 m, 16 bytes, w = d*q + m. Low nibbles are weights 0..15, high nibbles 16..31.

#include "gemm/decoded_cpu.h"

namespace rapid_llm {
namespace {

struct Q8_0 : Blocks<34> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const Vec d = all(halves(p, 1));
    from_s8(bytes16(p + 2), w);
    from_s8(bytes16(p + 18), w + kVecs / 2);
    for (int i = 0; i < kVecs; ++i) w[i] = mul(d, w[i]);
  }
};

struct Q4_0 : Blocks<18> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const __m128 d = halves(p, 1);
    // d*(q - 8) is exact in fp32, and so is d*q - 8*d evaluated by one fused operation.
    const Vec scale = all(d), shift = all(_mm_mul_ss(d, _mm_set_ss(-8.0f)));
    nibbles(p + 2, w);
    for (int i = 0; i < kVecs; ++i) w[i] = fma(scale, w[i], shift);
  }
};

struct Q4_1 : Blocks<20> {
  static void decode(const uint8_t* row, int64_t b, int64_t, Vec* w) {
    const uint8_t* p = row + b * kStep;
    const __m128 dm = halves(p, 2);
    const Vec scale = all(dm), shift = all(_mm_movehdup_ps(dm));
    nibbles(p + 4, w);
    // d*q is exact in fp32, so the fused operation rounds d*q + m once, as dequantising does.
    for (int i = 0; i < kVecs; ++i) w[i] = fma(scale, w[i], shift);
  }
};

}  // namespace

RAPID_LLM_LINEAR(linear_q8_0, Q8_0)
RAPID_LLM_LINEAR(linear_q4_0, Q4_0)
RAPID_LLM_LINEAR(linear_q4_1, Q4_1)

RAPID_LLM_DEQUANTISE(dequantise_q8_0, Q8_0)
RAPID_LLM_DEQUANTISE(dequantise_q4_0, Q4_0)
RAPID_LLM_DEQUANTISE(dequantise_q4_1, Q4_1)

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_q8_0), RAPID_LLM_FUNCTION(linear_q4_0), RAPID_LLM_FUNCTION(linear_q4_1),
                 RAPID_LLM_FUNCTION(dequantise_q8_0), RAPID_LLM_FUNCTION(dequantise_q4_0),
                 RAPID_LLM_FUNCTION(dequantise_q4_1))

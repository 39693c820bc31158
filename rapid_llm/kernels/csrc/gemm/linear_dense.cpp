// Linear layers over bf16 and fp16 weights for x86 CPUs, for few rows of input; sums in fp32.
//
// Why not PyTorch: for one row of bf16 its library takes longer to start than the product takes, and fp16 it multiplies
// one row at a time. Here every weight is read once for up to four rows of input and converted, exactly, in registers,
// or multiplied by the CPU's own bf16 product. That takes subnormal operands for zeros: where one comes up, products
// are formed again without it.

#include <omp.h>

#include <cstring>
#include <vector>

#include "gemm/vectors_cpu.h"
#include "rapid_llm/host.h"
#include "rapid_llm/module.h"

namespace rapid_llm {
namespace {

constexpr int kBlock = 32, kVecs = kBlock / kLanes;
// Accumulators a result: enough of them to hide the latency of fma, not more than there are registers.
constexpr int kSums = kLanes == 16 ? 2 : 1;

// Loops over accumulators: those that are indexed at run time would live in memory, not in registers.
#define RAPID_LLM_UNROLL _Pragma("GCC unroll 8")

struct BFloat16 {
  static float read(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  static uint16_t write(float value) {  // ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  // Of a vector's pairs the low halves come first, then the high ones: two cheap operations, no shuffle.
  static void decode(const uint16_t* p, Vec* w) {
    for (int i = 0; i < kVecs; i += 2, p += 2 * kLanes) {
#if defined(__AVX512F__)
      const __m512i both = _mm512_loadu_si512(p);
      w[i] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      w[i + 1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
#else
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      w[i] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      w[i + 1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)));
#endif
    }
  }
};

struct Float16 {
  static float read(uint16_t value) { return _cvtsh_ss(value); }
  static uint16_t write(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
  static void decode(const uint16_t* p, Vec* w) {
    for (int i = 0; i < kVecs; ++i, p += kLanes) {
#if defined(__AVX512F__)
      w[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
      w[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
    }
  }
};

// Strides in elements. input: fp32, in `decode`'s order, whole blocks a row, the last one filled up with zeros. pairs:
// the same as bf16 in its own order, rows of zeros after the last up to a multiple of 4; null where not to be used.
struct Call {
  const uint16_t* weight;
  int64_t weight_stride;
  const float* input;
  const uint16_t* pairs;
  int64_t input_stride, tokens, features, outputs;
  const uint16_t* bias;
  uint16_t* out;
  int64_t out_stride;
};

template <class Format, int kTokens>
inline void add_block(const Vec* w, const float* x, int64_t stride, Vec (*acc)[kSums]) {
  RAPID_LLM_UNROLL
  for (int t = 0; t < kTokens; ++t)
    RAPID_LLM_UNROLL
    for (int i = 0; i < kVecs; ++i)
      acc[t][i % kSums] = fma(w[i], load(x + t * stride + i * kLanes), acc[t][i % kSums]);
}

// Bytes ahead of the block in use: the same place in the rows that come next where these are short.
inline int64_t distance(const Call& c, int rows) {
  const int64_t next = 2 * rows * c.weight_stride;
  return next < 4 * kAhead ? next : kAhead;
}

template <class Format>
inline void finish(const Call& c, int64_t n, int64_t t, float total) {
  c.out[t * c.out_stride + n] = Format::write(total + (c.bias == nullptr ? 0.0f : Format::read(c.bias[n])));
}

// Rows n to n + kRows of the weight times rows t to t + kTokens of the input.
template <class Format, int kRows, int kTokens>
inline void tile(const Call& c, int64_t n, int64_t t) {
  Vec acc[kRows][kTokens][kSums], w[kVecs];
  RAPID_LLM_UNROLL
  for (int r = 0; r < kRows; ++r)
    RAPID_LLM_UNROLL
    for (int i = 0; i < kTokens * kSums; ++i) acc[r][i / kSums][i % kSums] = zero();
  const uint16_t* weight = c.weight + n * c.weight_stride;
  const float* x = c.input + t * c.input_stride;
  const int64_t ahead = distance(c, kRows);
  const int64_t whole = c.features / kBlock * kBlock;
  for (int64_t k = 0; k < whole; k += kBlock) {
    RAPID_LLM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint16_t* block = weight + r * c.weight_stride + k;
      _mm_prefetch(reinterpret_cast<const char*>(block) + ahead, _MM_HINT_T0);
      Format::decode(block, w);
      add_block<Format, kTokens>(w, x + k, c.input_stride, acc[r]);
    }
  }
  if (whole < c.features) {
    RAPID_LLM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      uint16_t block[kBlock] = {};
      std::memcpy(block, weight + r * c.weight_stride + whole, 2 * (c.features - whole));
      Format::decode(block, w);
      add_block<Format, kTokens>(w, x + whole, c.input_stride, acc[r]);
    }
  }
  float totals[kRows][kTokens];
  RAPID_LLM_UNROLL
  for (int r = 0; r < kRows; ++r)
    RAPID_LLM_UNROLL
    for (int i = 0; i < kTokens; ++i) totals[r][i] = sum(acc[r][i][0], kSums == 2 ? acc[r][i][1] : zero());
  for (int i = 0; i < kTokens; ++i)
    for (int r = 0; r < kRows; ++r) finish<Format>(c, n + r, t + i, totals[r][i]);
}

#if defined(__AVX512BF16__)
// The same for four rows of the input, the last of which may be filling; false, with nothing written, where the weights
// hold a subnormal number.
template <int kRows>
inline bool tile_of_pairs(const Call& c, int64_t n, int64_t t) {
  __m512 acc[kRows][4];
  RAPID_LLM_UNROLL
  for (int r = 0; r < kRows; ++r)
    RAPID_LLM_UNROLL
    for (int i = 0; i < 4; ++i) acc[r][i] = zero();
  const uint16_t* weight = c.weight + n * c.weight_stride;
  const uint16_t* x = c.pairs + t * c.input_stride;
  const int64_t ahead = distance(c, kRows);
  // Without its sign and less one, a subnormal number is below 0xfe and a zero above all others.
  __m512i least = _mm512_set1_epi16(-1);
  for (int64_t k = 0; k < c.features; k += kBlock) {
    const int64_t left = c.features - k;
    const __mmask32 inside = left < kBlock ? (1u << left) - 1 : 0xffffffffu;
    __m512bh pairs[4];
    RAPID_LLM_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = (__m512bh)_mm512_loadu_si512(x + i * c.input_stride + k);
    RAPID_LLM_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint16_t* block = weight + r * c.weight_stride + k;
      _mm_prefetch(reinterpret_cast<const char*>(block) + ahead, _MM_HINT_T0);
      const __m512i w = _mm512_maskz_loadu_epi16(inside, block);
      least = _mm512_min_epu16(least, _mm512_add_epi16(_mm512_add_epi16(w, w), _mm512_set1_epi16(-1)));
      RAPID_LLM_UNROLL
      for (int i = 0; i < 4; ++i) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], (__m512bh)w, pairs[i]);
    }
  }
  if (_mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(0xfe)) != 0) return false;
  float totals[kRows][4];
  RAPID_LLM_UNROLL
  for (int r = 0; r < kRows; ++r)
    RAPID_LLM_UNROLL
    for (int i = 0; i < 4; ++i) totals[r][i] = _mm512_reduce_add_ps(acc[r][i]);
  for (int i = 0; i < 4 && t + i < c.tokens; ++i)
    for (int r = 0; r < kRows; ++r) finish<BFloat16>(c, n + r, t + i, totals[r][i]);
  return true;
}
#endif

template <class Format, int kRows>
inline void rows(const Call& c, int64_t n) {
  int64_t t = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Format, BFloat16>) {
    if (c.pairs != nullptr)
      while (t < c.tokens && tile_of_pairs<kRows>(c, n, t)) t += 4;
    if (t >= c.tokens) return;
  }
#endif
  for (; t + 4 <= c.tokens; t += 4) {
    if constexpr (kRows == 4) {  // more results at once than there are registers
      tile<Format, 2, 4>(c, n, t);
      tile<Format, 2, 4>(c, n + 2, t);
    } else {
      tile<Format, kRows, 4>(c, n, t);
    }
  }
  for (; t + 2 <= c.tokens; t += 2) tile<Format, kRows, 2>(c, n, t);
  if (t < c.tokens) tile<Format, kRows, 1>(c, n, t);
}

template <class Format>
void convert(const Tensor& input, float* to, int64_t stride) {
  const int64_t features = input.size(1);
  for (int64_t t = 0; t < input.size(0); ++t) {
    const uint16_t* x = input.as<const uint16_t>() + t * input.stride(0);
    for (int64_t k = 0; k < features; k += kBlock) {
      uint16_t last[kBlock] = {};
      if (features - k < kBlock) std::memcpy(last, x + k, 2 * (features - k));
      Vec decoded[kVecs];
      Format::decode(features - k < kBlock ? last : x + k, decoded);
      for (int i = 0; i < kVecs; ++i) store(to + t * stride + k + i * kLanes, decoded[i]);
    }
  }
}

// `to` has rows for a multiple of 4. False where the input holds a subnormal number.
bool copy(const Tensor& input, uint16_t* to, int64_t rows, int64_t stride) {
  const int64_t features = input.size(1), tokens = input.size(0);
  std::memset(to, 0, 2 * rows * stride);
  for (int64_t t = 0; t < tokens; ++t)
    std::memcpy(to + t * stride, input.as<const uint16_t>() + t * input.stride(0), 2 * features);
  uint16_t least = 0xffff;  // as in tile_of_pairs
#pragma omp simd reduction(min : least)
  for (int64_t k = 0; k < tokens * stride; ++k) {
    const uint16_t value = static_cast<uint16_t>(2 * to[k] - 1);
    least = value < least ? value : least;
  }
  return least >= 0xfe;
}

// From so many rows of the input on the CPU's own product is faster.
constexpr int64_t kPairsFrom = 3;

template <class Format>
void product(Call c, const Tensor& input, int64_t threads) {
  static thread_local std::vector<float> converted;
  static thread_local std::vector<uint16_t> pairs;
  c.input_stride = (c.features + kBlock - 1) / kBlock * kBlock;
  converted.resize(c.tokens * c.input_stride);
  convert<Format>(input, converted.data(), c.input_stride);
  c.input = converted.data();
#if defined(__AVX512BF16__)
  if (std::is_same_v<Format, BFloat16> && c.tokens >= kPairsFrom) {
    const int64_t padded = (c.tokens + 3) / 4 * 4;
    pairs.resize(padded * c.input_stride);
    if (copy(input, pairs.data(), padded, c.input_stride)) c.pairs = pairs.data();
  }
#endif
#pragma omp parallel num_threads(threads) if (threads > 1 && c.tokens * c.features * c.outputs > (1 << 14))
  {
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    // Whole 64-byte lines of the output per thread, so that no two threads write one line.
    const int64_t share = ((c.outputs + parts - 1) / parts + 31) / 32 * 32;
    const int64_t first = part * share < c.outputs ? part * share : c.outputs;
    const int64_t last = first + share < c.outputs ? first + share : c.outputs;
    int64_t n = first;
    for (; n + 4 <= last; n += 4) rows<Format, 4>(c, n);
    for (; n < last; ++n) rows<Format, 1>(c, n);
  }
}

Call check(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias) {
  constexpr const char* op = "linear";
  check_cpu(op, "input", input);
  RAPID_CHECK(input.dtype == DType::bfloat16 || input.dtype == DType::float16, op,
              ": input must be bfloat16 or float16, got ", name_of(input.dtype));
  check_cpu(op, "weight", weight, input.dtype);
  check_cpu(op, "out", out, input.dtype);
  RAPID_CHECK(input.dim == 2 && weight.dim == 2 && input.size(1) == weight.size(1), op,
              ": needs rows of input and a weight (out_features, in_features): got ", input.shape(), " and ",
              weight.shape());
  const int64_t tokens = input.size(0), outputs = weight.size(0);
  RAPID_CHECK(out.dim == 2 && out.size(0) == tokens && out.size(1) == outputs, op, ": out must have the same shape, (",
              tokens, ", ", outputs, "): got ", out.shape());
  check_dense_rows(op, "input", input);
  check_dense_rows(op, "weight", weight);
  check_contiguous(op, "out", out);
  check_disjoint(op, "out", out, "input", input);
  check_disjoint(op, "out", out, "weight", weight);
  if (bias != nullptr) {
    check_cpu(op, "bias", *bias, input.dtype);
    RAPID_CHECK(bias->dim == 1 && bias->size(0) == outputs, op, ": bias must be (", outputs, ",), got ", bias->shape());
    check_contiguous(op, "bias", *bias);
    check_disjoint(op, "out", out, "bias", *bias);
  }
  Call call{};
  call.weight = weight.as<const uint16_t>(), call.weight_stride = weight.stride(0);
  call.tokens = tokens, call.features = input.size(1), call.outputs = outputs;
  call.bias = bias == nullptr ? nullptr : bias->as<const uint16_t>();
  call.out = out.as<uint16_t>(), call.out_stride = outputs;
  return call;
}

}  // namespace

void linear_dense(Tensor& out, const Tensor& input, const Tensor& weight, const Tensor* bias, int64_t threads) {
  const Call call = check(out, input, weight, bias);
  const door::Unlocked unlocked(call.tokens * call.features * call.outputs);
  if (input.dtype == DType::bfloat16) {
    product<BFloat16>(call, input, threads);
  } else {
    product<Float16>(call, input, threads);
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(linear_dense))

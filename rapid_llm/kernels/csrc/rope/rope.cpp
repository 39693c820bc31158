// rope in place on fp32 heads on a CPU.
//
// Why not PyTorch: rotating halves in place takes a gather and three aten calls each for query and key, all tiny in decode.

#include <cstdint>

namespace {

// `pair` is the distance of a pair's second element, `step` that of the next pair's first.
inline void rotate(float* x, const float* cosine, std::int64_t half, std::int64_t pair, std::int64_t step) {
  const float* sine = cosine + half;
#pragma omp simd
  for (std::int64_t i = 0; i < half; ++i) {
    float* a = x + i * step;
    const float first = a[0], second = a[pair];
    a[0] = first * cosine[i] - second * sine[i];
    a[pair] = second * cosine[i] + first * sine[i];
  }
}

}  // namespace

// Strides in elements. Returns the first token whose position is not a row of the table, or -1; nothing is written then.
extern "C" std::int64_t rope(float* query, std::int64_t query_token, std::int64_t query_head, std::int64_t query_heads,
                             float* key, std::int64_t key_token, std::int64_t key_head, std::int64_t key_heads,
                             const std::int64_t* positions, std::int64_t tokens, const float* table,
                             std::int64_t table_rows, std::int64_t rotary, int interleaved, int threads) {
  for (std::int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= table_rows) return t;
  const std::int64_t half = rotary / 2, pair = interleaved ? 1 : half, step = interleaved ? 2 : 1;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8) schedule(static)
  for (std::int64_t t = 0; t < tokens; ++t) {
    const float* cosine = table + positions[t] * rotary;
    for (std::int64_t h = 0; h < query_heads; ++h)
      rotate(query + t * query_token + h * query_head, cosine, half, pair, step);
    for (std::int64_t h = 0; h < key_heads; ++h) rotate(key + t * key_token + h * key_head, cosine, half, pair, step);
  }
  return -1;
}

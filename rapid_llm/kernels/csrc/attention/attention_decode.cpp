// attention.decode over a paged fp32 cache on a CPU.
//
// Why not PyTorch: it would gather the pages into a dense copy, or pay a handful of aten calls per layer and sequence for
// work of a few microseconds. Here each query head walks the pages in place: scores, softmax, weighted sum.

#include <omp.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../include/exp.h"

namespace {

struct Cache {
  const float* data;
  std::int64_t page, row, head;
};

// One query head of one sequence. `dim` is a constant where the caller passes one, so that the loops unroll.
inline void attend(const float* q, std::int64_t dim, Cache k, Cache v, const std::int32_t* table, std::int64_t page_size,
                   std::int64_t keys, float scale, float* scores, float* out) {
  float top = -std::numeric_limits<float>::infinity();
  bool ordered = true;
  for (std::int64_t first = 0; first < keys; first += page_size) {
    const float* page = k.data + table[first / page_size] * k.page;
    const std::int64_t count = keys - first < page_size ? keys - first : page_size;
    for (std::int64_t j = 0; j < count; ++j) {
      const float* key = page + j * k.row;
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (std::int64_t d = 0; d < dim; ++d) dot += q[d] * key[d];
      const float score = dot * scale;
      scores[first + j] = score;
      ordered &= score == score;
      top = score > top ? score : top;
    }
  }
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (std::int64_t j = 0; j < keys; ++j) {
    scores[j] = rapid_llm::exp(scores[j] - top);
    total += scores[j];
  }
  // A NaN score poisons its row, as does a row of nothing but -inf or one that holds +inf: inf - inf above.
  if (!ordered) total = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  for (std::int64_t first = 0; first < keys; first += page_size) {
    const float* page = v.data + table[first / page_size] * v.page;
    const std::int64_t count = keys - first < page_size ? keys - first : page_size;
    for (std::int64_t j = 0; j < count; ++j) {
      const float* value = page + j * v.row;
      const float p = scores[first + j];
#pragma omp simd
      for (std::int64_t d = 0; d < dim; ++d) out[d] += p * value[d];
    }
  }
  const float inverse = keys > 0 ? 1.0f / total : 0.0f;
  for (std::int64_t d = 0; d < dim; ++d) out[d] *= inverse;
}

}  // namespace

// Strides in elements; the last dimension of every tensor is dense, `out` wholly. Returns the first sequence that is longer
// than its block table or names a page outside the cache, or -1; nothing is written then.
extern "C" std::int64_t attention_decode(const float* query, std::int64_t query_sequence, std::int64_t query_head,
                                 std::int64_t sequences, std::int64_t query_heads, std::int64_t kv_heads,
                                 std::int64_t dim, const float* k_cache, std::int64_t k_page, std::int64_t k_row,
                                 std::int64_t k_head, const float* v_cache, std::int64_t v_page, std::int64_t v_row,
                                 std::int64_t v_head, std::int64_t pages, std::int64_t page_size, const std::int32_t* seq_lens,
                                 const std::int32_t* block_table, std::int64_t table_stride, std::int64_t table_width,
                                 float scale, float* out, int threads) {
  std::int64_t longest = 0, all = 0;
  for (std::int64_t s = 0; s < sequences; ++s) {
    longest = seq_lens[s] > longest ? seq_lens[s] : longest;
    all += seq_lens[s];
    const std::int64_t used = (seq_lens[s] + page_size - 1) / page_size;
    if (used > table_width) return s;
    for (std::int64_t b = 0; b < used; ++b) {
      const std::int32_t page = block_table[s * table_stride + b];
      if (page < 0 || page >= pages) return s;
    }
  }
  const std::int64_t group = query_heads / kv_heads, work = sequences * query_heads;
#pragma omp parallel num_threads(threads) if (threads > 1 && all * query_heads * dim > (1 << 15))
  {
    std::vector<float> scores(longest);
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t i = 0; i < work; ++i) {
      const std::int64_t s = i / query_heads, h = i % query_heads, g = h / group;
      const Cache k{k_cache + g * k_head, k_page, k_row, k_head}, v{v_cache + g * v_head, v_page, v_row, v_head};
      const float* q = query + s * query_sequence + h * query_head;
      const std::int32_t* table = block_table + s * table_stride;
      float* o = out + i * dim;
      if (dim == 64)
        attend(q, 64, k, v, table, page_size, seq_lens[s], scale, scores.data(), o);
      else if (dim == 128)
        attend(q, 128, k, v, table, page_size, seq_lens[s], scale, scores.data(), o);
      else
        attend(q, dim, k, v, table, page_size, seq_lens[s], scale, scores.data(), o);
    }
  }
  return -1;
}

// attention.decode over a paged fp32 cache on a CPU.
//
// Why not PyTorch: it would gather the pages into a dense copy, or pay a handful of aten calls per layer and sequence for
// work of a few microseconds. Here the pages are read in place, once for all query heads of a kv head.
//
// The unit of work is a chunk of one sequence's keys for one kv head, so that a single long sequence keeps every thread busy;
// each chunk leaves its softmax's maximum, sum and weighted values, which are then joined in order (Milakov and
// Gimelshein 2018, as in split-KV decoding). Chunks depend on the length alone, never on the number of threads.

#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "../include/exp.h"

namespace {

constexpr std::int64_t kChunk = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Cache {
  const float* data;
  std::int64_t page, row, head;
};

// What one chunk leaves for one query head: [maximum, sum, values...].
struct Part {
  float* data;
  float& top() const { return data[0]; }
  float& total() const { return data[1]; }
  float* values() const { return data + 2; }
};

struct Chunk {
  const std::int32_t* table;
  std::int64_t first, last, page_size;

  template <class Visit>
  void rows(Cache cache, Visit visit) const {
    for (std::int64_t j = first; j < last;) {
      const std::int64_t in_page = j % page_size;
      const float* row = cache.data + table[j / page_size] * cache.page + in_page * cache.row;
      const std::int64_t end = j + page_size - in_page < last ? j + page_size - in_page : last;
      for (; j < end; ++j, row += cache.row) visit(j - first, row);
    }
  }
};

// q . key. With a constant size the query stays in registers and four sums hide the latency of fma.
template <int kDim>
inline float dot(const float* q, const float* key, std::int64_t size) {
  if (kDim != 0) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int d = 0; d < kDim; d += 32)
      for (int i = 0; i < 4; ++i)
        sums[i] = _mm256_fmadd_ps(_mm256_loadu_ps(q + d + 8 * i), _mm256_loadu_ps(key + d + 8 * i), sums[i]);
    const __m256 v = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t d = 0; d < size; ++d) sum += q[d] * key[d];
  return sum;
}

// sums = sum over the chunk of scores[j] * value; with a constant size the sums stay in registers, 64 at a time.
template <int kDim>
inline void weigh(Cache v, const Chunk& chunk, const float* scores, std::int64_t size, float* sums) {
  for (int part = 0; part < kDim; part += 64) {
    __m256 acc[8];
    for (auto& a : acc) a = _mm256_setzero_ps();
    chunk.rows(v, [&](std::int64_t j, const float* value) {
      const __m256 p = _mm256_set1_ps(scores[j]);
      for (int i = 0; i < 8; ++i) acc[i] = _mm256_fmadd_ps(p, _mm256_loadu_ps(value + part + 8 * i), acc[i]);
    });
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(sums + part + 8 * i, acc[i]);
  }
  if (kDim != 0) return;
  for (std::int64_t d = 0; d < size; ++d) sums[d] = 0.0f;
  chunk.rows(v, [&](std::int64_t j, const float* value) {
    const float p = scores[j];
#pragma omp simd
    for (std::int64_t d = 0; d < size; ++d) sums[d] += p * value[d];
  });
}

// One query head over one chunk. kDim is the head's size where it is a constant, else 0.
template <int kDim>
inline void attend(const float* q, std::int64_t size, Cache k, Cache v, const Chunk& chunk, float scale, float* scores,
                   Part part) {
  float top = -kInfinity;
  bool ordered = true;
  chunk.rows(k, [&](std::int64_t j, const float* key) {
    const float score = dot<kDim>(q, key, size) * scale;
    scores[j] = score;
    ordered &= score == score;
    top = score > top ? score : top;
  });
  float total = 0.0f;
  const std::int64_t keys = chunk.last - chunk.first;
  // Keys that are all at -inf weigh nothing beside another chunk's. A NaN poisons the sum, as does +inf by inf - inf.
  const float from = top == -kInfinity ? 0.0f : top;
#pragma omp simd reduction(+ : total)
  for (std::int64_t j = 0; j < keys; ++j) {
    scores[j] = rapid_llm::exp(scores[j] - from);
    total += scores[j];
  }
  part.top() = top;
  part.total() = ordered ? total : std::numeric_limits<float>::quiet_NaN();
  weigh<kDim>(v, chunk, scores, size, part.values());
}

// Joins the parts of one query head, `step` floats apart. No key at all gives zeros, nothing but -inf gives NaN.
inline void join(Part part, std::int64_t parts, std::int64_t step, std::int64_t dim, float* out) {
  for (std::int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
  if (parts == 0) return;
  float top = -kInfinity, total = 0.0f;
  for (std::int64_t c = 0; c < parts; ++c) top = part.data[c * step] > top ? part.data[c * step] : top;
  for (std::int64_t c = 0; c < parts; ++c) {
    const Part one{part.data + c * step};
    const float weight = rapid_llm::exp(one.top() - top);
    total += weight * one.total();
    for (std::int64_t d = 0; d < dim; ++d) out[d] += weight * one.values()[d];
  }
  const float inverse = 1.0f / total;
  for (std::int64_t d = 0; d < dim; ++d) out[d] *= inverse;
}

}  // namespace

// Strides in elements; the last dimension of every tensor is dense, `out` wholly. Returns the first sequence that is longer
// than its block table or names a page outside the cache, or -1; nothing is written then.
extern "C" std::int64_t attention_decode(const float* query, std::int64_t query_sequence, std::int64_t query_head,
                                         std::int64_t sequences, std::int64_t query_heads, std::int64_t kv_heads,
                                         std::int64_t dim, const float* k_cache, std::int64_t k_page,
                                         std::int64_t k_row, std::int64_t k_head, const float* v_cache,
                                         std::int64_t v_page, std::int64_t v_row, std::int64_t v_head,
                                         std::int64_t pages, std::int64_t page_size, const std::int32_t* seq_lens,
                                         const std::int32_t* block_table, std::int64_t table_stride,
                                         std::int64_t table_width, float scale, float* out, int threads) {
  static thread_local std::vector<std::int64_t> starts;  // the first chunk of each sequence
  static thread_local std::vector<float> workspace;
  starts.assign(1, 0);
  std::int64_t all = 0;
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t keys = seq_lens[s] > 0 ? seq_lens[s] : 0, used = (keys + page_size - 1) / page_size;
    if (used > table_width) return s;
    for (std::int64_t b = 0; b < used; ++b) {
      const std::int32_t page = block_table[s * table_stride + b];
      if (page < 0 || page >= pages) return s;
    }
    all += keys;
    starts.push_back(starts.back() + (keys + kChunk - 1) / kChunk);
  }
  const std::int64_t group = query_heads / kv_heads, step = dim + 2, units = starts.back() * kv_heads;
  workspace.resize(units * group * step);
  float* parts = workspace.data();
  const std::int64_t* first_chunk = starts.data();
#pragma omp parallel num_threads(threads) if (threads > 1 && all * query_heads * dim > (1 << 15))
  {
    float scores[kChunk];
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t u = 0; u < units; ++u) {
      const std::int64_t c = u / kv_heads, g = u % kv_heads;
      std::int64_t s = 0;
      while (first_chunk[s + 1] <= c) ++s;
      const std::int64_t first = (c - first_chunk[s]) * kChunk, end = first + kChunk;
      const Chunk chunk{block_table + s * table_stride, first, end < seq_lens[s] ? end : seq_lens[s], page_size};
      const Cache k{k_cache + g * k_head, k_page, k_row, k_head}, v{v_cache + g * v_head, v_page, v_row, v_head};
      for (std::int64_t i = 0; i < group; ++i) {
        const float* q = query + s * query_sequence + (g * group + i) * query_head;
        const Part part{parts + (u * group + i) * step};
        if (dim == 64)
          attend<64>(q, dim, k, v, chunk, scale, scores, part);
        else if (dim == 128)
          attend<128>(q, dim, k, v, chunk, scale, scores, part);
        else
          attend<0>(q, dim, k, v, chunk, scale, scores, part);
      }
    }
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < sequences * query_heads; ++i) {
      const std::int64_t s = i / query_heads, h = i % query_heads;
      const std::int64_t unit = first_chunk[s] * kv_heads + h / group;
      join(Part{parts + (unit * group + h % group) * step}, first_chunk[s + 1] - first_chunk[s], kv_heads * group * step, dim,
           out + i * dim);
    }
  }
  return -1;
}

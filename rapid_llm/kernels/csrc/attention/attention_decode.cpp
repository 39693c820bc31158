// attention.decode over a paged fp32 cache on a CPU.
//
// Why not PyTorch: it would gather the pages into a dense copy, or pay a handful of aten calls per layer and sequence
// for work of a few microseconds. Here the pages are read in place, once for all query heads of a kv head.
//
// The unit of work is a chunk of one sequence's keys for one kv head, so that a single long sequence keeps every thread
// busy; each chunk leaves its softmax's maximum, sum and weighted values, which are then joined in order (Milakov and
// Gimelshein 2018, as in split-KV decoding). Chunks depend on the length alone, never on the number of threads.

#include <immintrin.h>
#include <omp.h>

#include <limits>
#include <vector>

#include "include/exp.h"
#include "rapid_llm/host.h"
#include "rapid_llm/module.h"

namespace rapid_llm {
namespace {

constexpr int64_t kChunk = 128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Cache {
  const float* data;
  int64_t page, row;
};

// What one chunk leaves for one query head: [maximum, sum, values...].
struct Part {
  float* data;
  float& top() const { return data[0]; }
  float& total() const { return data[1]; }
  float* values() const { return data + 2; }
};

struct Chunk {
  Indices table;
  int64_t first, last, page_size;

  template <class Visit>
  void rows(Cache cache, Visit visit) const {
    for (int64_t j = first; j < last;) {
      const int64_t in_page = j % page_size;
      const float* row = cache.data + table[j / page_size] * cache.page + in_page * cache.row;
      const int64_t end = j + page_size - in_page < last ? j + page_size - in_page : last;
      for (; j < end; ++j, row += cache.row) visit(j - first, row);
    }
  }
};

// q . key. With a constant size the query stays in registers and four sums hide the latency of fma.
template <int kDim>
inline float dot(const float* q, const float* key, int64_t size) {
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
  for (int64_t d = 0; d < size; ++d) sum += q[d] * key[d];
  return sum;
}

// sums = sum over the chunk of scores[j] * value; with a constant size the sums stay in registers, 64 at a time.
template <int kDim>
inline void weigh(Cache v, const Chunk& chunk, const float* scores, int64_t size, float* sums) {
  for (int part = 0; part < kDim; part += 64) {
    __m256 acc[8];
    for (auto& a : acc) a = _mm256_setzero_ps();
    chunk.rows(v, [&](int64_t j, const float* value) {
      const __m256 p = _mm256_set1_ps(scores[j]);
      for (int i = 0; i < 8; ++i) acc[i] = _mm256_fmadd_ps(p, _mm256_loadu_ps(value + part + 8 * i), acc[i]);
    });
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(sums + part + 8 * i, acc[i]);
  }
  if (kDim != 0) return;
  for (int64_t d = 0; d < size; ++d) sums[d] = 0.0f;
  chunk.rows(v, [&](int64_t j, const float* value) {
    const float p = scores[j];
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) sums[d] += p * value[d];
  });
}

// One query head over one chunk. kDim is the head's size where it is a constant, else 0.
template <int kDim>
inline void attend(const float* q, int64_t size, Cache k, Cache v, const Chunk& chunk, float scale, float* scores,
                   Part part) {
  float top = -kInfinity;
  bool ordered = true;
  chunk.rows(k, [&](int64_t j, const float* key) {
    const float score = dot<kDim>(q, key, size) * scale;
    scores[j] = score;
    ordered &= score == score;
    top = score > top ? score : top;
  });
  float total = 0.0f;
  const int64_t keys = chunk.last - chunk.first;
  // Keys that are all at -inf weigh nothing beside another chunk's. A NaN poisons the sum, as does +inf by inf - inf.
  const float from = top == -kInfinity ? 0.0f : top;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < keys; ++j) {
    scores[j] = rapid_llm::exp(scores[j] - from);
    total += scores[j];
  }
  part.top() = top;
  part.total() = ordered ? total : std::numeric_limits<float>::quiet_NaN();
  weigh<kDim>(v, chunk, scores, size, part.values());
}

// Joins the parts of one query head, `step` floats apart, in the first of them. No key at all gives zeros, nothing but
// -inf gives NaN.
inline void join(Part part, int64_t parts, int64_t step, int64_t dim, float* out, int64_t out_step) {
  if (parts == 0) {
    for (int64_t d = 0; d < dim; ++d) out[d * out_step] = 0.0f;
    return;
  }
  float top = -kInfinity, total = 0.0f;
  for (int64_t c = 0; c < parts; ++c) top = part.data[c * step] > top ? part.data[c * step] : top;
  float* sums = part.values();
  for (int64_t c = 0; c < parts; ++c) {
    const Part one{part.data + c * step};
    const float weight = rapid_llm::exp(one.top() - top);
    total += weight * one.total();
    if (c == 0) {
      for (int64_t d = 0; d < dim; ++d) sums[d] *= weight;
    } else {
      for (int64_t d = 0; d < dim; ++d) sums[d] += weight * one.values()[d];
    }
  }
  const float inverse = 1.0f / total;
  if (out_step == 1) {
    for (int64_t d = 0; d < dim; ++d) out[d] = sums[d] * inverse;
  } else {
    for (int64_t d = 0; d < dim; ++d) out[d * out_step] = sums[d] * inverse;
  }
}

void check_attention(const char* op, const Tensor& out, const Tensor& query, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& seq_lens, const Tensor& block_table) {
  check_cpu(op, "query", query, DType::float32);
  check_cpu(op, "k_cache", k_cache, DType::float32);
  check_cpu(op, "v_cache", v_cache, DType::float32);
  check_cpu(op, "out", out, DType::float32);
  RAPID_CHECK(query.dim == 3 && k_cache.dim == 4, op,
              ": query must be (sequences, heads, head_dim) and caches (pages, page_size, kv_heads, head_dim), got ",
              query.shape(), " and ", k_cache.shape());
  RAPID_CHECK(k_cache.size(1) > 0, op, ": pages hold no rows: caches are ", k_cache.shape(),
              "; use a page_size of at least 1");
  check_shape(op, "v_cache", v_cache, k_cache);
  RAPID_CHECK(query.size(2) == k_cache.size(3) && k_cache.size(2) > 0 && query.size(1) % k_cache.size(2) == 0, op,
              ": query ", query.shape(), " does not fit caches ", k_cache.shape(),
              ": head_dim must be equal and the query heads a multiple of the kv heads");
  RAPID_CHECK(seq_lens.dim == 1 && block_table.dim == 2 && seq_lens.size(0) == query.size(0) &&
                  block_table.size(0) == query.size(0),
              op, ": seq_lens must be (sequences,) and block_table (sequences, max_pages), one row a query: got ",
              seq_lens.shape(), " and ", block_table.shape(), " for ", query.size(0));
  check_dense_rows(op, "query", query);
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  check_shape(op, "out", out, query);
  check_written(op, "out", out);
  check_disjoint(op, "out", out, "query", query);
  check_disjoint(op, "out", out, "k_cache", k_cache);
  check_disjoint(op, "out", out, "v_cache", v_cache);
}

// Fills in the first chunk of each sequence, and one past the last; returns the number of keys. Raises where a sequence
// is longer than its block table or names a page outside the cache.
int64_t plan(const char* op, const Indices& lengths, const Indices& table, const Tensor& block_table,
             const Tensor& cache, std::vector<int64_t>& starts) {
  const int64_t sequences = block_table.size(0), width = block_table.size(1);
  const int64_t pages = cache.size(0), page_size = cache.size(1);
  int64_t all = 0;
  starts.assign(1, 0);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t keys = lengths[s] > 0 ? lengths[s] : 0, used = keys / page_size + (keys % page_size != 0);
    RAPID_CHECK(used <= width, op, ": sequence ", s, " has ", keys, " keys in pages of ", page_size,
                "; its block table of ", width, " pages is too short for them");
    const Indices row = table.from(s * block_table.stride(0));
    for (int64_t b = 0; b < used; ++b) {
      RAPID_CHECK(row[b] >= 0 && row[b] < pages, op, ": sequence ", s, " has ", keys, " keys; its block table names "
                  "page ", row[b], ", outside the cache's ", pages);
    }
    all += keys;
    starts.push_back(starts.back() + (keys + kChunk - 1) / kChunk);
  }
  return all;
}

}  // namespace

void attention_decode(Tensor& out, const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& seq_lens, const Tensor& block_table, double scale, int64_t threads) {
  constexpr const char* op = "attention.decode";
  static thread_local std::vector<int64_t> starts;
  static thread_local std::vector<float> workspace;
  check_attention(op, out, query, k_cache, v_cache, seq_lens, block_table);
  const Indices lengths(op, "seq_lens", seq_lens), table(op, "block_table", block_table);
  const int64_t keys = plan(op, lengths, table, block_table, k_cache, starts);
  const int64_t sequences = query.size(0), query_heads = query.size(1), dim = query.size(2);
  const int64_t kv_heads = k_cache.size(2), page_size = k_cache.size(1), group = query_heads / kv_heads, step = dim + 2;
  const int64_t units = starts.back() * kv_heads, work = keys * query_heads * dim;
  workspace.resize(units * group * step);
  float* parts = workspace.data();
  const int64_t* first_chunk = starts.data();
  const door::Unlocked unlocked(2 * work);
#pragma omp parallel num_threads(threads) if (threads > 1 && work > (1 << 15))
  {
    float scores[kChunk];
#pragma omp for schedule(dynamic, 1)
    for (int64_t u = 0; u < units; ++u) {
      const int64_t c = u / kv_heads, g = u % kv_heads;
      int64_t s = 0;
      while (first_chunk[s + 1] <= c) ++s;
      const int64_t first = (c - first_chunk[s]) * kChunk, end = first + kChunk, length = lengths[s];
      const Chunk chunk{table.from(s * block_table.stride(0)), first, end < length ? end : length, page_size};
      const Cache k{k_cache.as<float>() + g * k_cache.stride(2), k_cache.stride(0), k_cache.stride(1)};
      const Cache v{v_cache.as<float>() + g * v_cache.stride(2), v_cache.stride(0), v_cache.stride(1)};
      for (int64_t i = 0; i < group; ++i) {
        const float* q = query.as<float>() + s * query.stride(0) + (g * group + i) * query.stride(1);
        const Part part{parts + (u * group + i) * step};
        if (dim == 64)
          attend<64>(q, dim, k, v, chunk, static_cast<float>(scale), scores, part);
        else if (dim == 128)
          attend<128>(q, dim, k, v, chunk, static_cast<float>(scale), scores, part);
        else
          attend<0>(q, dim, k, v, chunk, static_cast<float>(scale), scores, part);
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < sequences * query_heads; ++i) {
      const int64_t s = i / query_heads, h = i % query_heads;
      const int64_t unit = first_chunk[s] * kv_heads + h / group;
      join(Part{parts + (unit * group + h % group) * step}, first_chunk[s + 1] - first_chunk[s],
           kv_heads * group * step, dim, out.as<float>() + s * out.stride(0) + h * out.stride(1), out.stride(2));
    }
  }
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(attention_decode))

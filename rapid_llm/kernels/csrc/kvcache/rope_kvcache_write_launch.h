// rope_kvcache_write's launcher: checks, then 16-byte vectors where every row is aligned to them, else single elements.
#pragma once

#include "kvcache/rope_kvcache_write.cuh"
#include "rope/rotation.h"

namespace rapid_llm {

inline void check_cache_write(const char* op, const Tensor& key, const Tensor& value, const Tensor& k_cache,
                              const Tensor& v_cache, const Tensor& slots) {
  check_like(op, "value", value, key);
  check_like(op, "k_cache", k_cache, key);
  check_like(op, "v_cache", v_cache, key);
  check_place(op, "slot_mapping", slots, key);
  check_shape(op, "value", value, key);
  check_shape(op, "v_cache", v_cache, k_cache);
  RAPID_CHECK(k_cache.dim == 4 && k_cache.size(2) == key.size(1) && k_cache.size(3) == key.size(2), op,
              ": caches must have the same shape (pages, page_size, kv_heads, head_dim) as key in heads and width, ",
              key.shape(), ": got ", k_cache.shape());
  RAPID_CHECK(slots.dim == 1 && slots.size(0) == key.size(0) && slots.dtype == DType::int64, op,
              ": slot_mapping must be int64 of shape (", key.size(0), ",): got ", name_of(slots.dtype), " ",
              slots.shape());
  check_dense_rows(op, "value", value);
  check_dense_rows(op, "k_cache", k_cache);
  check_dense_rows(op, "v_cache", v_cache);
  check_written(op, "k_cache", k_cache);
  check_written(op, "v_cache", v_cache);
  check_disjoint(op, "k_cache", k_cache, "v_cache", v_cache);
}

template <class T>
Cache<T> cache_of(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline void rope_kvcache_write(Tensor& query, Tensor& key, const Tensor& value, Tensor& k_cache, Tensor& v_cache,
                               const Tensor& positions, const Tensor& cos_sin_cache, const Tensor& slot_mapping,
                               bool interleaved) {
  constexpr const char* op = "rope_kvcache_write";
  check_rotation(op, query, key, positions, cos_sin_cache);
  check_cache_write(op, key, value, k_cache, v_cache, slot_mapping);
  check_disjoint(op, "query", query, "value", value);
  check_disjoint(op, "key", key, "value", value);
  const int64_t tokens = query.size(0), dim = query.size(2), half = cos_sin_cache.size(1) / 2;
  const int64_t query_heads = query.size(1), kv_heads = key.size(1);
  if (tokens * (query_heads + kv_heads) * dim == 0) return;
  const Launch launch(op, query);
  const Angles angles = angles_of(positions, cos_sin_cache);
  const Slots slots{reinterpret_cast<const i64*>(slot_mapping.data), slot_mapping.stride(0),
                    k_cache.size(0) * k_cache.size(1), k_cache.size(1)};
  const auto run = [&](auto type, auto width) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(width)::value;
    const int64_t items = (query_heads + kv_heads) * (half / N) + kv_heads * (2 * dim - 2 * half) / N;
    if (items == 0) return;
    const TokenBlocks blocks(op, launch, tokens, items);
    const auto kernel = interleaved ? rope_kvcache_write_kernel<T, N, true> : rope_kvcache_write_kernel<T, N, false>;
    kernel<<<blocks.all, blocks.threads, 0, launch.stream()>>>(
        heads_of<T>(query), heads_of<T>(key), heads_of<T>(value), cache_of<T>(k_cache), cache_of<T>(v_cache), angles,
        slots, static_cast<int>(query_heads), static_cast<int>(kv_heads), static_cast<int>(dim), blocks.each);
  };
  dispatch_floating(op, query, [&](auto type) {
    constexpr int whole = 16 / sizeof(typename decltype(type)::type);
    const bool vectors = half % whole == 0 && dim % whole == 0 &&
                         aligned_rows({&query, &key, &value, &k_cache, &v_cache, &cos_sin_cache});
    if (vectors) {
      run(type, std::integral_constant<int, whole>{});
    } else {
      run(type, std::integral_constant<int, 1>{});
    }
  });
  check_launch(op);
}

}  // namespace rapid_llm

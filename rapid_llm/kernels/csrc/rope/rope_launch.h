// rope's launcher: checks, then 16-byte vectors where every row is aligned to them, else single elements.
#pragma once

#include "rope/rotation.h"

namespace rapid_llm {

inline void rope(Tensor& query, Tensor& key, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved) {
  constexpr const char* op = "rope";
  check_rotation(op, query, key, positions, cos_sin_cache);
  const int64_t tokens = query.size(0), heads = query.size(1) + key.size(1), half = cos_sin_cache.size(1) / 2;
  if (tokens * heads * half == 0) return;
  const Launch launch(op, query);
  const Angles angles = angles_of(positions, cos_sin_cache);
  const auto run = [&](auto type, auto width) {
    using T = typename decltype(type)::type;
    constexpr int N = decltype(width)::value;
    const TokenBlocks blocks(op, launch, tokens, heads * (half / N));
    const auto kernel = interleaved ? rope_kernel<T, N, true> : rope_kernel<T, N, false>;
    kernel<<<blocks.all, blocks.threads, 0, launch.stream()>>>(heads_of<T>(query), heads_of<T>(key), angles,
                                                               static_cast<int>(query.size(1)),
                                                               static_cast<int>(heads), blocks.each);
  };
  dispatch_floating(op, query, [&](auto type) {
    constexpr int whole = 16 / sizeof(typename decltype(type)::type);
    if (half % whole == 0 && aligned_rows({&query, &key, &cos_sin_cache})) {
      run(type, std::integral_constant<int, whole>{});
    } else {
      run(type, std::integral_constant<int, 1>{});
    }
  });
  check_launch(op);
}

}  // namespace rapid_llm

// kvcache.write on a CPU: rows of bytes, so one function serves every dtype.
//
// Why not PyTorch: skipping negative slots and scattering key and value takes half a dozen aten calls per layer.

#include <cstdint>
#include <cstring>

// Strides in bytes; a head's row is dense. Returns the first token whose slot is beyond the cache, or -1; nothing is
// written then.
extern "C" std::int64_t kvcache_write(const char* key, std::int64_t key_token, std::int64_t key_head, const char* value,
                                      std::int64_t value_token, std::int64_t value_head, char* k_cache, char* v_cache,
                                      std::int64_t k_page, std::int64_t k_row, std::int64_t k_head, std::int64_t v_page,
                                      std::int64_t v_row, std::int64_t v_head, std::int64_t pages, std::int64_t page_size,
                                      std::int64_t heads, std::int64_t bytes, const std::int64_t* slots,
                                      std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t)
    if (slots[t] >= pages * page_size) return t;
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const std::int64_t page = slots[t] / page_size, row = slots[t] % page_size;
    for (std::int64_t h = 0; h < heads; ++h) {
      std::memcpy(k_cache + page * k_page + row * k_row + h * k_head, key + t * key_token + h * key_head, bytes);
      std::memcpy(v_cache + page * v_page + row * v_row + h * v_head, value + t * value_token + h * value_head, bytes);
    }
  }
  return -1;
}

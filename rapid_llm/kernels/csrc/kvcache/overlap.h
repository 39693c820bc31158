// Whether strided views share memory, for launchers that write in place: no answer costs a loop over elements.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rapid_llm {

// Enough for all elements of one view to be distinct, and exact for every view that slicing makes. At most 4 dimensions.
inline bool distinct_elements(int dims, const int64_t* sizes, const int64_t* strides) {
  int order[4], used = 0;
  for (int at = 0; at < dims; ++at) {
    if (sizes[at] == 0) return true;
    if (sizes[at] > 1) order[used++] = at;
  }
  std::sort(order, order + used, [&](int a, int b) { return strides[a] < strides[b]; });
  int64_t reach = 1;
  for (int at = 0; at < used; ++at) {
    const int64_t size = sizes[order[at]], stride = strides[order[at]];
    if (stride < reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// `count` pieces of `width` bytes, `period` bytes apart.
struct Pieces {
  const char* data;
  int64_t count, period, width;

  Pieces(const void* from, int dims, const int64_t* sizes, const int64_t* strides, int64_t bytes)
      : data(static_cast<const char*>(from)), count(sizes[0]), period(strides[0] * bytes), width(bytes) {
    for (int at = 1; at < dims; ++at) {
      if (sizes[at] == 0) count = 0;
      width += (sizes[at] - 1) * strides[at] * bytes;
    }
  }
};

// Exact for dense pieces of one period, as slices of one buffer are; else by extent.
inline bool overlap(const Pieces& a, const Pieces& b) {
  if (a.count == 0 || b.count == 0) return false;
  const int64_t shift = b.data - a.data;
  if (shift >= (a.count - 1) * a.period + a.width || -shift >= (b.count - 1) * b.period + b.width) return false;
  if (a.count == 1 && b.count == 1) return true;
  if (a.period != b.period || a.period == 0) return true;
  const int64_t within = ((shift % a.period) + a.period) % a.period;
  return within < a.width || within + b.width > a.period;
}

}  // namespace rapid_llm

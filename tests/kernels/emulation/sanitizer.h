// What -fsanitize calls on a misaligned access, an index past an array, an overflow: the launch fails with the place.
//
// A CPU answers a misaligned access all the same, where a GPU stops with an error. The compiler's own library
// would print, once for each place, and go on.
#pragma once

#include "threads.h"

namespace emulation {

struct Place {  // every handler's data begin with it
  const char* file;
  unsigned line, column;
};

inline void report_at(const void* data, const char* what) {
  const Place& place = *static_cast<const Place*>(data);
  const std::string file = place.file != nullptr ? place.file : "?";
  report(file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line) + ": " + what);
  if (running != nullptr) leave(State::done);  // what would follow may crash a CPU, too
}

}  // namespace emulation

#define EMULATION_HANDLER(name, what)                                           \
  extern "C" __attribute__((weak, visibility("hidden"))) void __ubsan_handle_##name(void* data, void*, void*) { \
    emulation::report_at(data, what);                                           \
  }
EMULATION_HANDLER(type_mismatch_v1, "a misaligned access")
EMULATION_HANDLER(out_of_bounds, "an index outside its array")
EMULATION_HANDLER(shift_out_of_bounds, "a shift by more bits than there are")
EMULATION_HANDLER(add_overflow, "a signed sum that overflows")
EMULATION_HANDLER(sub_overflow, "a signed difference that overflows")
EMULATION_HANDLER(mul_overflow, "a signed product that overflows")
EMULATION_HANDLER(negate_overflow, "a signed negation that overflows")
EMULATION_HANDLER(divrem_overflow, "a division by zero")
#undef EMULATION_HANDLER

// A module with the package's own door and host headers, compiled by a C++ compiler: what launchers see of tensors, and
// what they refuse, tried where there is no GPU. `copy_rows` walks rows on the CPU as a kernel would.
#include <chrono>
#include <thread>

#include "rapid_llm/module.h"
#include "rapid_llm/rows.h"

namespace rapid_llm {

void on_cuda(Tensor& out, const Tensor& input, double) {
  check_cuda("on_cuda", "input", input);
  check_like("on_cuda", "out", out, input);
}

// The element counts of its arguments, or -1 for None, and its scalars; proves that all of them arrive.
void arrive(Tensor& out, const Tensor* optional, double real, int64_t whole, bool truth) {
  double* to = out.as<double>();
  to[0] = optional == nullptr ? -1.0 : static_cast<double>(optional->numel());
  to[1] = real, to[2] = static_cast<double>(whole), to[3] = truth;
}

void same_kind(const Tensor& a, const Tensor& b) {
  check_shape("same_kind", "b", b, a);
  RAPID_CHECK(a.dtype == b.dtype, "same_kind: b must have dtype ", name_of(a.dtype), ", got ", name_of(b.dtype));
}

void dense(const Tensor& a) { check_contiguous("dense", "a", a); }
void dense_rows(const Tensor& a) { check_dense_rows("dense_rows", "a", a); }
void written(const Tensor& a) { check_written("written", "a", a); }
void alias(const Tensor& out, const Tensor& input) { check_alias("alias", out, "input", input); }
void apart(const Tensor& a, const Tensor& b) { check_disjoint("apart", "a", a, "b", b); }

bool is_cpu(const Tensor& a) { return a.cpu && !a.cuda; }

void outside(int64_t at) { fail<IndexError>("outside: slot ", at, " is not there"); }

// Waits, without holding up the interpreter, until another thread has set the flag; gives up after about a minute.
void wait_for(const Tensor& flag) {
  const door::Unlocked unlocked(1 << 20);
  for (int i = 0; i < 60000; ++i) {
    if (*static_cast<volatile float*>(flag.data) == 1.0f) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  fail("wait_for: no other thread ran");
}

void copy_rows(Tensor& out, const Tensor& input) {
  const int64_t columns = input.size(-1);
  if (input.numel() == 0) return;
  for_each_rows<2>("copy_rows", {&out, &input}, [&](const Rows<2>& rows) {
    for (int64_t row = 0; row < rows.count; ++row) {
      const int64_t group = row / rows.inner, member = row % rows.inner;
      float* to = static_cast<float*>(rows.data[0]) + group * rows.outer_step[0] + member * rows.inner_step[0];
      const float* from = static_cast<float*>(rows.data[1]) + group * rows.outer_step[1] + member * rows.inner_step[1];
      for (int64_t at = 0; at < columns; ++at) to[at] = from[at];
    }
  });
}

}  // namespace rapid_llm

RAPID_LLM_MODULE(RAPID_LLM_FUNCTION(on_cuda), RAPID_LLM_FUNCTION(arrive), RAPID_LLM_FUNCTION(same_kind),
                 RAPID_LLM_FUNCTION(dense), RAPID_LLM_FUNCTION(dense_rows), RAPID_LLM_FUNCTION(written),
                 RAPID_LLM_FUNCTION(alias), RAPID_LLM_FUNCTION(apart), RAPID_LLM_FUNCTION(copy_rows),
                 RAPID_LLM_FUNCTION(is_cpu), RAPID_LLM_FUNCTION(outside), RAPID_LLM_FUNCTION(wait_for))

// The extension rapid_llm._C: the torch ops of the namespace `rapid_llm`, and the same launchers as a module's functions.
//
// Loading it touches no CUDA, and nothing of it needs torch's CUDA library until a stream is asked for, so that it loads
// beside a torch for CPUs too. A second copy in one process is an ImportError: torch would end the process.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "rapid_llm/launch.h"
#include "rapid_llm/module.h"
#include "rapid_llm_ext.h"

// Exported by torch's CUDA library alone: null beside a torch for CPUs.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

// What the library was built for, found in the file without loading it: rapid_llm/kernels/aot.py reads it.
extern "C" __attribute__((visibility("default"), used)) const char rapid_llm_build_info[] =
    "RAPID_LLM_BUILD_INFO torch=" RAPID_LLM_TORCH_TARGET " headers=" TORCH_VERSION " cuda=" RAPID_LLM_CUDA
    " archs=" RAPID_LLM_ARCHS " sources=" RAPID_LLM_SOURCES ";";

namespace rapid_llm {

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  RAPID_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "rapid_llm._C: this torch is built without CUDA");
  RAPID_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0, "rapid_llm._C: torch has no current stream on cuda:",
              device);
  return static_cast<cudaStream_t>(stream);
}

namespace {

// An exception in a static initialiser would end the process; the module's init function reports this one instead.
char failure[512] = "";

template <class F>
void attempt(F&& f) {
  if (failure[0] != '\0') return;
  try {
    f();
  } catch (const std::exception& error) {
    std::strncpy(failure, error.what(), sizeof(failure) - 1);
    if (failure[0] == '\0') std::strcpy(failure, "unknown error");
  }
}

}  // namespace
}  // namespace rapid_llm

STABLE_TORCH_LIBRARY_FRAGMENT(rapid_llm, m) {
  rapid_llm::attempt([&] {
    m.def("fused_add_rmsnorm(Tensor! input, Tensor! residual, Tensor weight, float eps) -> ()");
    m.def("linear(Tensor! out, Tensor input, Tensor weight, Tensor? bias, bool settled) -> ()");
    m.def("rmsnorm(Tensor! out, Tensor input, Tensor weight, float eps) -> ()");
    m.def("rope(Tensor! query, Tensor! key, Tensor positions, Tensor cos_sin_cache, bool interleaved) -> ()");
    m.def(
        "rope_kvcache_write(Tensor! query, Tensor! key, Tensor value, Tensor! k_cache, Tensor! v_cache, "
        "Tensor positions, Tensor cos_sin_cache, Tensor slot_mapping, bool interleaved) -> ()");
    m.def("scale(Tensor! out, Tensor input, float factor) -> ()");
    m.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  });
}

STABLE_TORCH_LIBRARY_IMPL(rapid_llm, CUDA, m) {
  rapid_llm::attempt([&] {
    m.impl("fused_add_rmsnorm", TORCH_BOX(&rapid_llm::ext::fused_add_rmsnorm));
    m.impl("linear", TORCH_BOX(&rapid_llm::ext::linear));
    m.impl("rmsnorm", TORCH_BOX(&rapid_llm::ext::rmsnorm));
    m.impl("rope", TORCH_BOX(&rapid_llm::ext::rope));
    m.impl("rope_kvcache_write", TORCH_BOX(&rapid_llm::ext::rope_kvcache_write));
    m.impl("scale", TORCH_BOX(&rapid_llm::ext::scale));
    m.impl("silu_and_mul", TORCH_BOX(&rapid_llm::ext::silu_and_mul));
  });
}

#define RAPID_LLM_THIN(op)                                                       \
  {#op,                                                                          \
   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(                   \
       +[](PyObject*, PyObject* const* objects, Py_ssize_t count) -> PyObject* { \
         return ::rapid_llm::door::call(#op, &::rapid_llm::thin::op, objects, count); \
       })),                                                                      \
   METH_FASTCALL, nullptr}

PyMODINIT_FUNC PyInit__C() {
  static PyMethodDef methods[] = {
      RAPID_LLM_THIN(fused_add_rmsnorm),
      RAPID_LLM_THIN(linear),
      RAPID_LLM_THIN(rmsnorm),
      RAPID_LLM_THIN(rope),
      RAPID_LLM_THIN(rope_kvcache_write),
      RAPID_LLM_THIN(scale),
      RAPID_LLM_THIN(silu_and_mul),
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "rapid_llm._C", nullptr, -1, methods,
                                   nullptr, nullptr, nullptr, nullptr};
  if (rapid_llm::failure[0] != '\0') {
    PyErr_Format(PyExc_ImportError,
                 "torch.ops.rapid_llm is defined already, by another copy of this extension in the process (%s)",
                 rapid_llm::failure);
    return nullptr;
  }
  return rapid_llm::door::connect() ? PyModule_Create(&definition) : nullptr;
}

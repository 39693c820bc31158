// The Python door: launchers become functions of an extension module that needs no header and no ABI of torch.
//
// Tensors are read through the DLPack exchange API that torch publishes as torch.Tensor.__dlpack_c_exchange_api__, which
// also gives the current stream. Python is used through its limited API, so one binary serves every Python from 3.11.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "rapid_llm/tensor.h"

#ifdef __CUDACC__
#include "rapid_llm/launch.h"
#endif

namespace rapid_llm::door {

// DLPack's structures, major version 1, under its documented layout: https://dmlc.github.io/dlpack/latest/c_api.html
struct Version {
  uint32_t major, minor;
};
struct View {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};
struct Exchange {
  ExchangeHeader header;
  void* allocate;
  void* managed_from_python;
  void* managed_to_python;
  int (*view_from_python)(void* object, View* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr int32_t kCPU = 1, kCUDA = 2;

// What the module's launchers take, for the text of errors; modules for the CPU say so before they include this file.
#ifdef RAPID_LLM_CPU
constexpr const char* kDevices = "cpu";
#else
constexpr const char* kDevices = "a CUDA device";
#endif

struct State {
  const Exchange* api = nullptr;
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyObject* is_neg = nullptr;
  PyCFunction is_neg_direct = nullptr;  // the C function behind it, where it takes no arguments
};
inline State state;

struct PythonError {};  // the error indicator is set

// The first line of the error that is set, which it clears; torch appends its own call stack.
inline std::string take_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* text = value != nullptr ? PyObject_Str(value) : nullptr;
  const char* bytes = text != nullptr ? PyUnicode_AsUTF8AndSize(text, nullptr) : nullptr;
  std::string said = bytes != nullptr ? bytes : "torch lends no view of it";
  PyErr_Clear();
  Py_XDECREF(text), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  return said.substr(0, said.find('\n'));
}

inline DType dtype_of(const View& view) {
  if (view.lanes != 1) return DType::other;
  switch (view.code << 8 | view.bits) {
    case 2 << 8 | 32: return DType::float32;
    case 2 << 8 | 16: return DType::float16;
    case 4 << 8 | 16: return DType::bfloat16;
    case 2 << 8 | 64: return DType::float64;
    case 10 << 8 | 8: return DType::float8_e4m3;
    case 0 << 8 | 8: return DType::int8;
    case 1 << 8 | 8: return DType::uint8;
    case 0 << 8 | 32: return DType::int32;
    case 0 << 8 | 64: return DType::int64;
    case 6 << 8 | 8: return DType::boolean;
    default: return DType::other;
  }
}

// A tensor subclass (a fake tensor, say) may hold no memory, so only torch.Tensor and Parameter themselves are taken.
inline Tensor tensor_of(const char* op, PyObject* object) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  RAPID_CHECK(type == state.tensor || type == state.parameter, op, ": needs plain tensors, torch.Tensor itself, on ",
              kDevices);
  // A view whose sign is flipped lazily looks like its base to DLPack.
  PyObject* negated = state.is_neg_direct != nullptr ? state.is_neg_direct(object, nullptr)
                                                     : PyObject_CallFunctionObjArgs(state.is_neg, object, nullptr);
  if (negated == nullptr) throw PythonError{};
  Py_DECREF(negated);
  RAPID_CHECK(negated == Py_False, op, ": a tensor has a lazy negation; call resolve_neg() first");
  View view;
  if (state.api->view_from_python(object, &view) != 0) fail(op, ": needs plain tensors with memory: ", take_error());
  Tensor tensor;
  tensor.data = static_cast<char*>(view.data) + view.byte_offset;
  tensor.dtype = dtype_of(view);
  tensor.cuda = view.device_type == kCUDA;
  tensor.cpu = view.device_type == kCPU;
  tensor.device = view.device_id;
  tensor.dim = view.ndim;
  tensor.sizes = view.shape;
  tensor.strides = view.strides;
  return tensor;
}

template <class T>
struct Argument {
  T value;
  Argument(const char*, PyObject* object) {
    bool failed;
    if constexpr (std::is_same_v<T, double>) {
      value = PyFloat_AsDouble(object);
      failed = value == -1.0;
    } else if constexpr (std::is_same_v<T, int64_t>) {
      value = PyLong_AsLongLong(object);
      failed = value == -1;
    } else {
      static_assert(std::is_same_v<T, bool>, "launchers take Tensor&, Tensor*, double, int64_t and bool");
      const int truth = PyObject_IsTrue(object);
      value = truth > 0;
      failed = truth < 0;
    }
    if (failed && PyErr_Occurred()) throw PythonError{};
  }
  T get() { return value; }
};

template <class T>
struct Argument<T&> {
  Tensor value;
  Argument(const char* op, PyObject* object) : value(tensor_of(op, object)) {}
  Tensor& get() { return value; }
};

template <class T>
struct Argument<T*> {  // an optional tensor: None is a null pointer
  Tensor value;
  bool present;
  Argument(const char* op, PyObject* object) : present(object != Py_None) {
    if (present) value = tensor_of(op, object);
  }
  Tensor* get() { return present ? &value : nullptr; }
};

template <class Result, class... Arguments, std::size_t... At>
Result invoke(const char* op, Result (*launcher)(Arguments...), PyObject* const* objects, std::index_sequence<At...>) {
  std::tuple<Argument<Arguments>...> values{Argument<Arguments>(op, objects[At])...};
  return launcher(std::get<At>(values).get()...);
}

// Launchers return nothing, or a bool.
template <class Result, class... Arguments>
PyObject* call(const char* op, Result (*launcher)(Arguments...), PyObject* const* objects, Py_ssize_t count) {
  constexpr Py_ssize_t expected = sizeof...(Arguments);
  if (count != expected) {
    return PyErr_Format(PyExc_TypeError, "%s: takes %zd positional arguments, got %zd", op, expected, count);
  }
  constexpr auto all = std::index_sequence_for<Arguments...>{};
  try {
    if constexpr (std::is_same_v<Result, bool>) {
      return PyBool_FromLong(invoke(op, launcher, objects, all));
    } else {
      invoke(op, launcher, objects, all);
    }
  } catch (const PythonError&) {
    return nullptr;
  } catch (const IndexError& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// While one lives, other Python threads run: for launchers that compute on the CPU, once all checks are made. Letting
// go of the interpreter and asking for it back pays only from some 2^20 operations on.
class Unlocked {
 public:
  explicit Unlocked(int64_t operations) : thread_(operations < (1 << 20) ? nullptr : PyEval_SaveThread()) {}
  ~Unlocked() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

// torch.Tensor.is_neg as C has it: a call through Python makes a tuple for its argument, for each tensor of each call.
inline bool find_is_neg() {
  state.is_neg = PyObject_GetAttrString(state.tensor, "is_neg");
  PyObject* any = state.is_neg != nullptr ? PyObject_CallNoArgs(state.tensor) : nullptr;
  PyObject* bound = any != nullptr ? PyObject_GetAttrString(any, "is_neg") : nullptr;
  Py_XDECREF(any);
  if (bound == nullptr) return false;
  if (Py_IS_TYPE(bound, &PyCFunction_Type) && PyCFunction_GetFlags(bound) == METH_NOARGS) {
    state.is_neg_direct = PyCFunction_GetFunction(bound);
  }
  Py_DECREF(bound);
  return true;
}

// Looks up torch's exchange API once; false with the error indicator set where this torch has none.
inline bool connect() {
  PyObject* torch = PyImport_ImportModule("torch");
  if (torch == nullptr) return false;
  state.tensor = PyObject_GetAttrString(torch, "Tensor");
  PyObject* nn = PyObject_GetAttrString(torch, "nn");
  state.parameter = nn != nullptr ? PyObject_GetAttrString(nn, "Parameter") : nullptr;
  Py_XDECREF(nn);
  Py_DECREF(torch);
  if (state.tensor == nullptr || state.parameter == nullptr) return false;
  if (!find_is_neg()) return false;
  PyObject* capsule = PyObject_GetAttrString(state.tensor, "__dlpack_c_exchange_api__");
  if (capsule == nullptr) return false;
  state.api = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (state.api == nullptr) return false;
  if (state.api->header.version.major != 1 || state.api->view_from_python == nullptr) {
    PyErr_Format(PyExc_ImportError, "torch's DLPack exchange API has version %u; this module reads version 1",
                 state.api->header.version.major);
    return false;
  }
  return true;
}

}  // namespace rapid_llm::door

#ifdef __CUDACC__
namespace rapid_llm {
inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (door::state.api->current_stream(door::kCUDA, device, &stream) != 0) throw door::PythonError{};
  return static_cast<cudaStream_t>(stream);
}
}  // namespace rapid_llm
#endif

#define RAPID_LLM_PASTE_(a, b) a##b
#define RAPID_LLM_PASTE(a, b) RAPID_LLM_PASTE_(a, b)
#define RAPID_LLM_QUOTE_(a) #a
#define RAPID_LLM_QUOTE(a) RAPID_LLM_QUOTE_(a)

// One function of the module: Python's `scale(out, input, factor)` is the launcher `rapid_llm::scale`.
#define RAPID_LLM_FUNCTION(op)                                                                        \
  {#op,                                                                                               \
   reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(                                        \
       +[](PyObject*, PyObject* const* objects, Py_ssize_t count) -> PyObject* {                      \
         return ::rapid_llm::door::call(#op, &::rapid_llm::op, objects, count);                       \
       })),                                                                                           \
   METH_FASTCALL, nullptr}

// The module itself; the build names it with -DRAPID_LLM_MODULE_NAME=rapid_llm_jit_<name>.
#define RAPID_LLM_MODULE(...)                                                                         \
  PyMODINIT_FUNC RAPID_LLM_PASTE(PyInit_, RAPID_LLM_MODULE_NAME)() {                                  \
    static PyMethodDef methods[] = {__VA_ARGS__, {nullptr, nullptr, 0, nullptr}};                     \
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT,                                           \
                                     RAPID_LLM_QUOTE(RAPID_LLM_MODULE_NAME),                          \
                                     nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};       \
    return ::rapid_llm::door::connect() ? PyModule_Create(&definition) : nullptr;                     \
  }

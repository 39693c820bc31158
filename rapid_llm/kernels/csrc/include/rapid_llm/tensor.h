// What a launcher knows of a tensor, whichever door it came in by: a view that owns nothing.
//
// Sizes and strides are counted in elements and belong to the caller's tensor, which outlives the call.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace rapid_llm {

enum class DType : uint8_t {
  float32,
  float16,
  bfloat16,
  float64,
  float8_e4m3,
  int8,
  uint8,
  int32,
  int64,
  boolean,
  other
};

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return "float32";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::float64: return "float64";
    case DType::float8_e4m3: return "float8_e4m3fn";
    case DType::int8: return "int8";
    case DType::uint8: return "uint8";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::boolean: return "bool";
    case DType::other: break;
  }
  return "another dtype";
}

inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64: return 8;
    case DType::float32:
    case DType::int32: return 4;
    case DType::float16:
    case DType::bfloat16: return 2;
    default: return 1;
  }
}

// Becomes RuntimeError in Python.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Becomes IndexError in Python: a position, slot or page that is not there.
struct IndexError : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// Messages are put together without streams: a stream asks the locale how to write a number, and where a process holds
// two C++ runtimes (a library that brought its own) that look-up can end in the other one's memory.
template <class Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    text += std::to_string(part);
  } else {
    text += part;
  }
}

template <class Kind = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw Kind(text);
}

#define RAPID_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::rapid_llm::fail(__VA_ARGS__); \
  } while (0)

struct Tensor {
  void* data = nullptr;
  DType dtype = DType::other;
  bool cuda = false;
  int device = -1;
  int dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  bool cpu = false;

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  // A negative index counts from the end.
  int64_t size(int at) const { return sizes[at < 0 ? dim + at : at]; }
  int64_t stride(int at) const { return strides[at < 0 ? dim + at : at]; }

  int64_t numel() const {
    int64_t product = 1;
    for (int at = 0; at < dim; ++at) product *= sizes[at];
    return product;
  }

  int64_t nbytes() const { return numel() * size_of(dtype); }

  bool contiguous() const {
    int64_t expected = 1;
    for (int at = dim - 1; at >= 0; --at) {
      if (sizes[at] == 0) return true;
      if (sizes[at] != 1 && strides[at] != expected) return false;
      expected *= sizes[at];
    }
    return true;
  }

  // Contiguous in its last dimension, which a row of at most one element always is.
  bool dense_rows() const { return dim > 0 && (size(-1) <= 1 || stride(-1) == 1); }

  // Bytes from the first element to past the last one; 0 for an empty tensor. Strides are never negative in torch.
  int64_t extent() const {
    int64_t reach = 1;
    for (int at = 0; at < dim; ++at) {
      if (sizes[at] == 0) return 0;
      reach += (sizes[at] - 1) * strides[at];
    }
    return reach * size_of(dtype);
  }

  bool same_shape(const Tensor& other) const {
    if (dim != other.dim) return false;
    for (int at = 0; at < dim; ++at) {
      if (sizes[at] != other.sizes[at]) return false;
    }
    return true;
  }

  std::string shape() const {
    std::string text = "(";
    for (int at = 0; at < dim; ++at) text += (at ? ", " : "") + std::to_string(sizes[at]);
    return text + ")";
  }
};

inline void check_cuda(const char* op, const char* name, const Tensor& tensor) {
  RAPID_CHECK(tensor.cuda, op, ": ", name, " must be a CUDA tensor");
}

// The same CUDA device and dtype as `like`.
inline void check_like(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_cuda(op, name, tensor);
  RAPID_CHECK(tensor.device == like.device, op, ": ", name, " must be on the same CUDA device, cuda:", like.device,
              ": got cuda:", tensor.device);
  RAPID_CHECK(tensor.dtype == like.dtype, op, ": ", name, " must have dtype ", name_of(like.dtype), ", got ",
              name_of(tensor.dtype));
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  RAPID_CHECK(tensor.same_shape(like), op, ": ", name, " must have the same shape, ", like.shape(), ": got ",
              tensor.shape());
}

inline void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
  RAPID_CHECK(tensor.contiguous(), op, ": ", name, " must be contiguous; call .contiguous() first");
}

inline void check_dense_rows(const char* op, const char* name, const Tensor& tensor) {
  RAPID_CHECK(tensor.dim > 0, op, ": ", name, " must have a last dimension, got a scalar");
  RAPID_CHECK(tensor.dense_rows(), op, ": ", name, " must be contiguous in its last dimension, whose stride is ",
              tensor.stride(-1), "; call .contiguous() first");
}

// No two elements of a tensor that is written share memory, as those of an expanded one do. Exact for every view that
// slicing, transposing and expanding make.
inline void check_written(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.contiguous()) return;
  int64_t reach = 1;  // one past the largest offset that the dimensions looked at so far can form
  for (int64_t done = 0, stride = 0; done < tensor.dim;) {
    int64_t next = INT64_MAX;  // the smallest stride not yet looked at
    for (int at = 0; at < tensor.dim; ++at) {
      if (tensor.strides[at] >= stride && tensor.strides[at] < next) next = tensor.strides[at];
    }
    for (int at = 0; at < tensor.dim; ++at) {
      if (tensor.strides[at] != next) continue;
      ++done;
      if (tensor.sizes[at] < 2) continue;
      RAPID_CHECK(next >= reach, op, ": elements of ", name, " share memory (shape ", tensor.shape(),
                  "); pass a tensor that is not expanded");
      reach += next * (tensor.sizes[at] - 1);
    }
    stride = next + 1;
  }
}

// Two tensors share no byte: exact for dense ones and for column slices of one buffer, else by extent.
inline bool disjoint(const Tensor& a, const Tensor& b) {
  const char* first = a.as<const char>();
  const char* second = b.as<const char>();
  const int64_t first_extent = a.extent(), second_extent = b.extent();
  if (first + first_extent <= second || second + second_extent <= first) return true;
  if (a.dim < 2 || b.dim < 2 || a.stride(0) * size_of(a.dtype) != b.stride(0) * size_of(b.dtype)) return false;
  const int64_t period = a.stride(0) * size_of(a.dtype);
  if (period == 0) return false;
  const auto row = [](const Tensor& t) {
    Tensor one = t;
    --one.dim, ++one.sizes, ++one.strides;
    return one.extent();
  };
  const int64_t shift = ((second - first) % period + period) % period;
  return shift >= row(a) && shift + row(b) <= period;
}

// `out` may be `input` itself, element for element; any other overlap would be read after it was written.
inline void check_alias(const char* op, const Tensor& out, const char* name, const Tensor& input) {
  bool same = out.data == input.data && out.same_shape(input);
  for (int at = 0; same && at < out.dim; ++at) same = out.sizes[at] < 2 || out.strides[at] == input.strides[at];
  RAPID_CHECK(same || disjoint(out, input), op, ": out overlaps ", name, " in part; pass ", name,
              " itself or separate memory");
}

inline void check_disjoint(const char* op, const char* name, const Tensor& tensor, const char* other_name,
                           const Tensor& other) {
  RAPID_CHECK(disjoint(tensor, other), op, ": ", name, " overlaps ", other_name, " in memory; pass separate tensors");
}

}  // namespace rapid_llm

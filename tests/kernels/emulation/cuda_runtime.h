// Stands in for CUDA's runtime: memory of the CPU is that of device 0, and the caller's current device is another one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrMultiProcessorCount };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emulation {

constexpr int callers_device = 1;
inline int device = callers_device;

// The planted fault that is in force; 0 is none.
extern "C" __attribute__((visibility("default"))) inline int emulation_fault = 0;
inline bool planted(int number) { return emulation_fault == number; }

template <class T>
struct Same {
  using type = T;
};

// kernel<<<grid, block, shared, stream>>>(arguments...)
template <class... Parameters>
void launch(dim3 grid, dim3 block, std::size_t shared, cudaStream_t, void (*kernel)(Parameters...),
            typename Same<Parameters>::type... arguments) {
  if (shared != 0) throw std::runtime_error("emulation: has no dynamic shared memory");
  if (device != 0) throw std::runtime_error("emulation: launched while another device than the tensors' is current");
  launch_each(grid, block, [=] { kernel(arguments...); });
}

}  // namespace emulation

inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
inline const char* cudaGetErrorString(cudaError_t) { return "refused by the emulation"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// Launchers ask first; then the caller's device must be as the call before left it.
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulation::device;
  return *device == emulation::callers_device ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaSetDevice(int device) {
  emulation::device = device;
  return cudaSuccess;
}

// Of an H200.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 9;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  emulation::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, kernel, arguments...);
  return cudaSuccess;
}

#include "ptx.h"
#include "sanitizer.h"

#include "cuda_calls.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace layerstream::test {
namespace {

/// The interposed functions are C functions without a state of their own.
struct Recorder {
  std::mutex mutex;
  bool recording = false;
  int tag = 0;
  std::vector<CudaCall> calls;
};

/// Never destroyed: CUDA is called until the very end of the program.
Recorder& recorder() {
  static Recorder* const object = new Recorder;
  return *object;
}

void note(const char* name, CudaCall::Kind kind) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  if (state.recording) state.calls.push_back({name, kind, std::this_thread::get_id(), state.tag});
}

/// The function of this name in the runtime's own library.
template <class Function>
Function* next(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    std::fprintf(stderr, "no %s behind the test's own: is the CUDA runtime linked statically?\n", name);
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}

bool is_pageable(const void* address) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return true;
  }
  return attributes.type == cudaMemoryTypeUnregistered;
}

}  // namespace

void record_cuda_calls() {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.calls.clear();
  state.recording = true;
}

std::vector<CudaCall> recorded_cuda_calls() {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.recording = false;
  return state.calls;
}

void tag_cuda_calls(int tag) {
  Recorder& state = recorder();
  const std::lock_guard lock(state.mutex);
  state.tag = tag;
}

}  // namespace layerstream::test

// clang-format off
#define LAYERSTREAM_INTERPOSE(name, kind, parameters, arguments)                    \
  extern "C" cudaError_t name parameters {                                          \
    using namespace layerstream::test;                                              \
    note(#name, CudaCall::Kind::kind);                                              \
    static auto* const real = next<cudaError_t parameters>(#name);                  \
    return real arguments;                                                          \
  }

LAYERSTREAM_INTERPOSE(cudaMallocAsync, allocation, (void** to, size_t bytes, cudaStream_t stream), (to, bytes, stream))
LAYERSTREAM_INTERPOSE(cudaMallocFromPoolAsync, allocation, (void** to, size_t bytes, cudaMemPool_t pool, cudaStream_t stream), (to, bytes, pool, stream))
LAYERSTREAM_INTERPOSE(cudaMallocManaged, allocation, (void** to, size_t bytes, unsigned int flags), (to, bytes, flags))
LAYERSTREAM_INTERPOSE(cudaMallocPitch, allocation, (void** to, size_t* pitch, size_t width, size_t height), (to, pitch, width, height))
LAYERSTREAM_INTERPOSE(cudaMallocHost, allocation, (void** to, size_t bytes), (to, bytes))
LAYERSTREAM_INTERPOSE(cudaHostAlloc, allocation, (void** to, size_t bytes, unsigned int flags), (to, bytes, flags))
LAYERSTREAM_INTERPOSE(cudaHostRegister, allocation, (void* data, size_t bytes, unsigned int flags), (data, bytes, flags))
LAYERSTREAM_INTERPOSE(cudaHostUnregister, allocation, (void* data), (data))
LAYERSTREAM_INTERPOSE(cudaFree, allocation, (void* data), (data))
LAYERSTREAM_INTERPOSE(cudaFreeAsync, allocation, (void* data, cudaStream_t stream), (data, stream))
LAYERSTREAM_INTERPOSE(cudaFreeHost, allocation, (void* data), (data))
LAYERSTREAM_INTERPOSE(cudaDeviceSynchronize, device_wait, (), ())
LAYERSTREAM_INTERPOSE(cudaStreamSynchronize, stream_wait, (cudaStream_t stream), (stream))
LAYERSTREAM_INTERPOSE(cudaEventSynchronize, event_wait, (cudaEvent_t event), (event))
LAYERSTREAM_INTERPOSE(cudaMemcpy, synchronous_copy, (void* to, const void* from, size_t bytes, cudaMemcpyKind kind), (to, from, bytes, kind))
LAYERSTREAM_INTERPOSE(cudaMemcpyToSymbol, synchronous_copy, (const void* symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind kind), (symbol, from, bytes, offset, kind))
LAYERSTREAM_INTERPOSE(cudaMemset, synchronous_copy, (void* to, int value, size_t bytes), (to, value, bytes))
// clang-format on

/// Kokkos asks for nothing at each launch of teams without scratch memory; that takes and costs nothing.
extern "C" cudaError_t cudaMalloc(void** to, size_t bytes) {
  using namespace layerstream::test;
  if (bytes > 0) note("cudaMalloc", CudaCall::Kind::allocation);
  static auto* const real = next<cudaError_t(void**, size_t)>("cudaMalloc");
  return real(to, bytes);
}

extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                       cudaStream_t stream) {
  using namespace layerstream::test;
  if (is_pageable(to) || is_pageable(from)) note("cudaMemcpyAsync", CudaCall::Kind::pageable_copy);
  static auto* const real =
      next<cudaError_t(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>("cudaMemcpyAsync");
  return real(to, from, bytes, kind, stream);
}

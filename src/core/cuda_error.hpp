#pragma once

#include <cuda_runtime_api.h>

#include "core/error.hpp"

namespace layerstream {

/// A call into CUDA or one of its libraries failed. The executor adds operation, block, chunk and lane.
class CudaError : public Error {
 public:
  explicit CudaError(const std::string& message) : Error(message) {}
};

/// Throws CudaError naming the call, its place and CUDA's own words. The error is cleared if CUDA lets it be.
inline void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  // An error that stays belongs to earlier work on the device, whichever call it comes out of.
  const bool stays = cudaPeekAtLastError() != cudaSuccess || cudaStreamQuery(cudaStreamLegacy) == status;
  (void)cudaGetLastError();
  throw CudaError(fmt::format(
      "{} failed: {} ({}) at {}:{}{}", call, cudaGetErrorString(status), cudaGetErrorName(status), file, line,
      stays ? "; an earlier kernel or copy caused it, which CUDA_LAUNCH_BLOCKING=1 names" : ""));
}

}  // namespace layerstream

/// Runs a call of the CUDA runtime; throws CudaError unless it returns cudaSuccess.
#define LAYERSTREAM_CUDA(call) ::layerstream::check_cuda((call), #call, __FILE__, __LINE__)

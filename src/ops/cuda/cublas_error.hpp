#pragma once

#include <cublasLt.h>

#include "core/cuda_error.hpp"

namespace layerstream::ops::cuda {

/// @throws CudaError with the call, what it was for, its place and cuBLASLt's own words. A CUDA error behind
/// it is cleared if CUDA lets it be.
[[noreturn]] inline void throw_cublas(cublasStatus_t status, const char* call, const std::string& subject,
                                      const char* file, int line) {
  (void)cudaGetLastError();
  throw CudaError(fmt::format("{} failed for {}: {} ({}) at {}:{}", call, subject,
                              cublasLtGetStatusString(status), cublasLtGetStatusName(status), file, line));
}

}  // namespace layerstream::ops::cuda

/// Runs a call of cuBLASLt; throws CudaError unless it succeeds. `subject`, evaluated only then, says what it
/// was for.
#define LAYERSTREAM_CUBLAS(call, subject)                                                               \
  do {                                                                                                  \
    const cublasStatus_t layerstream_status = (call);                                                   \
    if (layerstream_status != CUBLAS_STATUS_SUCCESS) {                                                  \
      ::layerstream::ops::cuda::throw_cublas(layerstream_status, #call, (subject), __FILE__, __LINE__); \
    }                                                                                                   \
  } while (false)

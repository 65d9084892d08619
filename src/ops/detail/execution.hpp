#pragma once

#include <Kokkos_Core.hpp>

#include "core/stream.hpp"

namespace layerstream::ops::detail {

/// Where the kernels of ops/ run: the device in a CUDA build, the host's threads otherwise.
using ExecutionSpace = Kokkos::DefaultExecutionSpace;

/// True where a work item is a CPU thread that walks memory on its own, rather than one of many lanes.
inline constexpr bool runs_on_host =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename ExecutionSpace::memory_space>::accessible;

/// The Kokkos instance whose kernels are ordered on `stream`.
inline ExecutionSpace execution_space([[maybe_unused]] StreamView stream) {
#if defined(KOKKOS_ENABLE_CUDA)
  return ExecutionSpace(static_cast<cudaStream_t>(stream.native()));
#else
  return ExecutionSpace();
#endif
}

}  // namespace layerstream::ops::detail

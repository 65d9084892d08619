#pragma once

#include <Kokkos_Core.hpp>

#include "ops/context.hpp"

namespace layerstream::ops::detail {

/// Where the kernels of ops/ run: the device in a CUDA build, the host's threads otherwise.
using ExecutionSpace = Kokkos::DefaultExecutionSpace;

/// True where a work item is a CPU thread that walks memory on its own, rather than one of many lanes.
inline constexpr bool runs_on_host =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename ExecutionSpace::memory_space>::accessible;

/// The Kokkos instance whose kernels are ordered on the context's stream.
/// @throws ContractError in a CUDA build if the context has no libraries.
#if defined(KOKKOS_ENABLE_CUDA)
const ExecutionSpace& execution_space(const Context& context);
#else
inline ExecutionSpace execution_space(const Context&) {
  return ExecutionSpace();
}
#endif

}  // namespace layerstream::ops::detail

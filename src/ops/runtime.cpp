#include "ops/runtime.hpp"

#include <fmt/format.h>

#include <Kokkos_Core.hpp>

namespace layerstream::ops {

struct Runtime::Guard {
  // Kokkos' advice on OMP_PROC_BIND does not fit: the optimizer's threads share the CPUs with its own.
  Kokkos::ScopeGuard kokkos{Kokkos::InitializationSettings().set_disable_warnings(true)};
};

Runtime::Runtime() : guard_(std::make_unique<Guard>()) {}
Runtime::~Runtime() = default;

std::string Runtime::description() const {
  const Kokkos::DefaultExecutionSpace space;
  return fmt::format("Kokkos {} with concurrency {}", space.name(), space.concurrency());
}

}  // namespace layerstream::ops

#include "ops/runtime.hpp"

#include <cblas.h>
#include <fmt/format.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <array>

namespace layerstream::ops {

struct Runtime::Guard {
  // Kokkos' advice on OMP_PROC_BIND does not fit: the optimizer's threads share the CPUs with its own.
  Kokkos::ScopeGuard kokkos{Kokkos::InitializationSettings().set_disable_warnings(true)};
};

Runtime::Runtime() : guard_(std::make_unique<Guard>()) {}
Runtime::~Runtime() = default;

std::string Runtime::description() const {
  const Kokkos::DefaultExecutionSpace space;
  return fmt::format("Kokkos {} with concurrency {}, OpenBLAS {}", space.name(), space.concurrency(),
                     openblas_get_corename());
}

std::vector<std::string> Runtime::warnings() const {
  bool has_avx2 = false;
  bool has_avx512 = false;
#if defined(__x86_64__)
  has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
#endif
  const std::string warning = blas_core_warning(openblas_get_corename(), has_avx2, has_avx512);
  return warning.empty() ? std::vector<std::string>{} : std::vector<std::string>{warning};
}

std::string blas_core_warning(const std::string& core, bool has_avx2, bool has_avx512) {
  // OpenBLAS's x86 cores without FMA; an older release takes the first of them on a CPU it does not know.
  static constexpr std::array without_fma{"Prescott",    "Core2",   "Penryn",    "Dunnington",
                                          "Atom",        "Nano",    "Nehalem",   "Athlon",
                                          "Sandybridge", "Opteron", "Barcelona", "Bobcat"};
  if (!has_avx2 || std::ranges::find(without_fma, core) == without_fma.end()) return {};
  return fmt::format(
      "OpenBLAS does not know this CPU and uses its {} kernels, several times slower than it can be; set the "
      "environment variable OPENBLAS_CORETYPE={}, or install a newer OpenBLAS",
      core, has_avx512 ? "SKYLAKEX" : "HASWELL");
}

}  // namespace layerstream::ops

#pragma once

#include <Kokkos_Core.hpp>
#include <cstdint>

#include "ops/detail/attention_tile.hpp"

namespace layerstream::ops::detail {

/// pass(slot) for every slot, on the host's threads.
template <class Pass>
void for_each_slot(const char* label, const Pass& pass) {
  using Space = Kokkos::DefaultHostExecutionSpace;
  using Policy =
      Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>, Kokkos::Schedule<Kokkos::Dynamic>>;
  Kokkos::parallel_for(label, Policy(Space(), 0, attention_slots, Kokkos::ChunkSize(1)), pass);
}

}  // namespace layerstream::ops::detail

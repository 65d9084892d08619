#pragma once

#include <optional>
#include <string>

#include "backends/topology/page_residency.hpp"
#include "doctor/check.hpp"

namespace layerstream::doctor {

/// Where the pages of some host memory lay before and after something used them.
struct ResidencyChange {
  PageResidency before;
  PageResidency after;
  std::string use;                    ///< "4 copies to the device"
  std::optional<int> node = {};       ///< that they were to be bound to
  std::string shortfall = {};         ///< HostRegion::binding_shortfall
  std::string remedy_for_moved = {};  ///< where pages moved although they are bound
};

/// Fails where bound pages were elsewhere before, or are after; warns where they could not be bound, or where
/// that cannot be seen.
Finding judge_residency(const ResidencyChange& change);

}  // namespace layerstream::doctor

#pragma once

#include "backends/slot_backend.hpp"

namespace layerstream {

/// Everything a block needs is copied into a device slot on the h2d lane, ahead of use.
class ExplicitBackend final : public SlotBackend {
 public:
  /// @param link outlives the backend.
  explicit ExplicitBackend(Link& link) : SlotBackend(link) {}

  std::string name() const override { return "explicit"; }
  bool kernels_reach_host() const override { return false; }
  Lane fetch_lane() const override { return Lane::h2d; }
  std::size_t slot_bytes(const BlockSource& source) const override;
  void fetch(int slot, int block, std::int64_t version, const BlockSource& source,
             StreamView stream) override;
};

}  // namespace layerstream

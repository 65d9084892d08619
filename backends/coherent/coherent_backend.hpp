#pragma once

#include "backends/slot_backend.hpp"

namespace layerstream {

/// The device reads host memory by itself. Matrices that meet a GEMM are promoted into a slot by a copy
/// that is ordered like a kernel; tables whose rows are gathered, and vectors, are used where they lie.
class CoherentBackend final : public SlotBackend {
 public:
  /// @param link promotes matrices and moves gradients and activations; outlives the backend.
  explicit CoherentBackend(Link& link) : SlotBackend(link) {}

  std::string name() const override { return "coherent"; }
  Lane fetch_lane() const override { return Lane::compute; }
  std::size_t slot_bytes(const BlockSource& source) const override;
  void fetch(int slot, int block, std::int64_t version, const BlockSource& source,
             StreamView stream) override;
};

}  // namespace layerstream

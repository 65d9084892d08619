#pragma once

#include "backends/slot_backend.hpp"

namespace layerstream {

/// The device reads host memory by itself. Matrices that meet a GEMM are promoted into a slot by a copy;
/// tables whose rows are gathered, and vectors, are used where they lie.
class CoherentBackend final : public SlotBackend {
 public:
  /// @param link moves gradients and activations. @param promotion brings matrices: the link's copies, or the
  /// device's kernels (Device::kernel_link). Both outlive the backend.
  CoherentBackend(Link& link, Link& promotion) : SlotBackend(link), promotion_(promotion) {}
  explicit CoherentBackend(Link& link) : CoherentBackend(link, link) {}

  std::string name() const override { return "coherent"; }
  bool kernels_reach_host() const override { return true; }
  Lane fetch_lane() const override { return Lane::h2d; }
  std::size_t slot_bytes(const BlockSource& source) const override;
  void fetch(int slot, int block, std::int64_t version, const BlockSource& source,
             StreamView stream) override;

 private:
  Link& promotion_;
};

}  // namespace layerstream

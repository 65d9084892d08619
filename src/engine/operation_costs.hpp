#pragma once

#include <vector>

#include "engine/buffers.hpp"
#include "engine/chunk_pairs.hpp"
#include "engine/schedule.hpp"
#include "engine/simulator.hpp"
#include "longctx/chunk_plan.hpp"
#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

/// What each operation of a run takes of a machine: its bytes and FLOPs over the profile's rates, and what
/// the schedule does not say (traffic of memory-bound kernels, launches) from the model's shape.
class OperationCosts {
 public:
  /// All three outlive this object. Of the shape, model, compute dtype, loss tile and activation policies
  /// count.
  /// @param busy_fraction of the device's processors over the run, as far as known: a card that rests runs
  /// its matrix products faster (HardwareProfile::Device::cool_ratio).
  OperationCosts(const HardwareProfile& profile, const EngineShape& shape, const ChunkPlan& chunks,
                 double busy_fraction = 1.0);

  OperationCost of(const Operation& operation) const;
  std::vector<OperationCost> of(const Schedule& schedule) const;

 private:
  struct KernelWork;

  OperationCost kernels(const KernelWork& work) const;
  OperationCost copy(const Operation& operation, bool to_device, int num_copies) const;
  OperationCost host_update(const Operation& operation) const;
  OperationCost device_update(const Operation& operation) const;
  OperationCost update_in_place(const Operation& operation) const;
  OperationCost promotion(const Operation& operation) const;
  /// The lookup in a table on the host.
  OperationCost gather(const Operation& operation) const;
  OperationCost simulated(OperationCost cost) const;
  KernelWork forward(const Operation& operation) const;
  KernelWork head(const Operation& operation) const;
  KernelWork rebuild(const Operation& operation) const;
  KernelWork backward(const Operation& operation) const;
  KernelWork gradient_pass(const Operation& operation) const;

  double tokens(const Operation& operation) const;
  double row_tokens(const Operation& operation) const;

  const HardwareProfile& profile_;
  const EngineShape& shape_;
  const ChunkPlan& chunks_;
  ChunkPairs pairs_;
  double speed_up_;  ///< of matrix products and attention, for a rested card
  double host_bytes_per_second_;
  double copy_weight_;
};

}  // namespace layerstream

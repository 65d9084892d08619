#pragma once

#include <cstdint>
#include <vector>

#include "engine/hazards.hpp"
#include "engine/schedule.hpp"

namespace layerstream {

/// The optimizer's part of a schedule: the updates that wait, by the host's threads and by the device, and
/// the moves of state that lives on the device.
class UpdateOperations {
 public:
  /// All arguments outlive this object.
  UpdateOperations(const ScheduleSettings& settings, const std::vector<BlockCost>& costs,
                   HazardTracker& tracker);

  /// The host's shares of all blocks, in the order in which the forward pass needs them. Their lane does
  /// little else.
  void hosts_shares();
  /// The host's share of one block, if it has one.
  void hosts_share(int block);
  /// All waiting pieces up to `block`, and all the others that need no slot, or as many of the next as there
  /// are slots: they cross the link while the last stores of `block` are under way, before its weights can be
  /// fetched. State and weights come over the link on one lane, since the order of two would be the
  /// hardware's, which starves one of them.
  void devices_shares(int block);
  /// The whole state of the resident blocks: to the device (load_state), or to the host (store_state).
  void move_resident(OperationKind kind, Lane lane);

 private:
  void update_on_device(int block, int piece);
  /// Pieces up to `block` that go through a slot.
  int uses_through(int block) const;
  /// @param slot −1: the state is where it lives.
  Operation state_operation(OperationKind kind, Lane lane, int block, int piece, int slot,
                            std::int64_t bytes_per_element) const;
  const BlockCost& cost(int block) const { return costs_[static_cast<std::size_t>(block)]; }

  const ScheduleSettings& settings_;
  const std::vector<BlockCost>& costs_;
  HazardTracker& tracker_;
  int uses_ = 0;        ///< of update slots
  int next_block_ = 0;  ///< of the device's share
  int next_piece_ = 0;
};

}  // namespace layerstream

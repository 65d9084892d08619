#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "engine/schedule.hpp"

namespace layerstream {

/// Something that operations read and write: a buffer, or a part of one.
struct Resource {
  enum class Kind : std::uint8_t {
    host_weights,         ///< of a block, with their moments, by (block, StatePart)
    update_slot,          ///< index
    device_gradient,      ///< of a block: what waits on the device
    weight_slot,          ///< index
    input,                ///< a decoder block's input buffer, by (buffer, chunk)
    intermediates,        ///< kept on the device, by (block, chunk)
    intermediate_slot,    ///< index: on their way from or to the host
    saved_input,          ///< host copy, by (block, chunk)
    saved_intermediates,  ///< host copy, by (block, chunk)
    gradient_slot,        ///< device gradient buffer
    host_gradient,        ///< by host slab
    norm_partial,         ///< of a block, on the device
    host_statistics,      ///< of a block: its norm (and the head's loss) on the host
    residual_gradient,    ///< gradient of the residual stream, by chunk
    group_key_value,      ///< keys and values in the making
    loss,
    verdict,
  };
  Kind kind;
  int index = 0;
  int chunk = 0;
  friend auto operator<=>(const Resource&, const Resource&) = default;
};

/// The parts of a block's state that are written apart: the host's share, and each piece of the device's.
struct StatePart {
  static constexpr int of_host = 0;
  static constexpr int of_piece(int piece) { return 1 + piece; }
};

/// Turns declared reads and writes into dependencies: a read waits for the last write, a write waits for
/// the last write and for the reads since. Waits within a lane are left out, since a lane keeps order,
/// and so are waits that another wait implies on the same lane.
class HazardTracker {
 public:
  explicit HazardTracker(Schedule& schedule) : schedule_(schedule) {}

  /// Appends the operation with its dependencies; returns its index.
  int append(Operation operation, const std::vector<Resource>& reads, const std::vector<Resource>& writes) {
    std::map<Lane, int> latest;  // per lane the latest operation to wait for
    const auto wait_for = [&](int other) {
      const Lane lane = schedule_.operations[static_cast<std::size_t>(other)].lane;
      if (lane == operation.lane) return;
      const auto [entry, fresh] = latest.emplace(lane, other);
      if (!fresh && entry->second < other) entry->second = other;
    };
    for (const Resource& resource : reads) {
      const State& state = states_[resource];
      if (state.writer >= 0) wait_for(state.writer);
    }
    for (const Resource& resource : writes) {
      const State& state = states_[resource];
      if (state.writer >= 0) wait_for(state.writer);
      for (const int reader : state.readers) wait_for(reader);
    }
    const int index = static_cast<int>(schedule_.operations.size());
    std::set<int> ascending;
    for (const auto& [lane, other] : latest) ascending.insert(other);
    operation.dependencies.assign(ascending.begin(), ascending.end());
    schedule_.operations.push_back(std::move(operation));

    for (const Resource& resource : reads) states_[resource].readers.push_back(index);
    for (const Resource& resource : writes) states_[resource] = {.writer = index, .readers = {}};
    return index;
  }

 private:
  struct State {
    int writer = -1;
    std::vector<int> readers;
  };

  Schedule& schedule_;
  std::map<Resource, State> states_;
};

}  // namespace layerstream

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/lane.hpp"
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
  int index = 0;  ///< not negative, nor is chunk
  int chunk = 0;
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
  /// @param reads, writes ranges of Resource
  template <class Reads = std::initializer_list<Resource>, class Writes = std::initializer_list<Resource>>
  int append(Operation operation, const Reads& reads, const Writes& writes) {
    LatestOfLane latest = none;  // to wait for
    for (const Resource& resource : reads) add_writer(latest, state(resource));
    for (const Resource& resource : writes) {
      const State& state = this->state(resource);
      add_writer(latest, state);
      for (std::size_t lane = 0; lane < latest.size(); ++lane) {
        latest[lane] = std::max(latest[lane], state.readers[lane]);
      }
    }
    const auto own_lane = static_cast<std::size_t>(operation.lane);
    latest[own_lane] = -1;
    std::ranges::sort(latest);
    operation.dependencies.assign(std::ranges::upper_bound(latest, -1), latest.end());
    const int index = static_cast<int>(schedule_.operations.size());
    schedule_.operations.push_back(std::move(operation));

    for (const Resource& resource : reads) state(resource).readers[own_lane] = index;
    for (const Resource& resource : writes) state(resource) = {.writer = index, .readers = none};
    return index;
  }

 private:
  /// By lane the latest of some operations; −1: none.
  using LatestOfLane = std::array<int, all_lanes.size()>;
  static constexpr LatestOfLane none = [] {
    LatestOfLane latest{};
    latest.fill(-1);
    return latest;
  }();

  struct State {
    int writer = -1;
    LatestOfLane readers = none;  ///< since
  };

  State& state(const Resource& resource) {
    LAYERSTREAM_EXPECT(resource.index >= 0 && resource.chunk >= 0,
                       "a resource of kind {}, index {}, chunk {}", static_cast<int>(resource.kind),
                       resource.index, resource.chunk);
    const auto at = [](auto& all, std::size_t index) -> auto& {
      if (index >= all.size()) all.resize(index + 1);
      return all[index];
    };
    auto& of_kind = states_[static_cast<std::size_t>(resource.kind)];
    return at(at(of_kind, static_cast<std::size_t>(resource.index)),
              static_cast<std::size_t>(resource.chunk));
  }

  void add_writer(LatestOfLane& latest, const State& state) const {
    if (state.writer < 0) return;
    int& of_lane =
        latest[static_cast<std::size_t>(schedule_.operations[static_cast<std::size_t>(state.writer)].lane)];
    of_lane = std::max(of_lane, state.writer);
  }

  Schedule& schedule_;
  /// By kind, index and chunk, which are few and dense.
  std::array<std::vector<std::vector<State>>, static_cast<std::size_t>(Resource::Kind::verdict) + 1> states_;
};

}  // namespace layerstream

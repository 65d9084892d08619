#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "core/lane.hpp"
#include "engine/schedule.hpp"

// A second opinion on schedules: what each operation touches is written down here from what the step runner
// does, and not taken from the builder's own declarations.

namespace layerstream::test {

inline std::string to_string(const Schedule& schedule, int index) {
  const Operation& operation = schedule.operations[static_cast<std::size_t>(index)];
  return fmt::format("#{} {} block {} chunk {} piece {} on {}", index, name_of(operation.kind),
                     operation.block, operation.chunk, operation.piece, name_of(operation.lane));
}

/// Whether a decoder block keeps its activations on the device: the last so many do.
inline bool keeps_on_device(const ScheduleSettings& settings, int block) {
  const int head = settings.num_blocks - 1;
  return block >= 1 && block < head && head - block <= settings.device_activation_blocks;
}

/// Where a block's input is: the first two buffers are shared by the blocks whose inputs go to the host, by
/// turns, and by the head, whose turn is after the last of them.
inline int input_buffer(const ScheduleSettings& settings, int block) {
  int turn = 0, own = 0;
  for (int b = 1; b <= block; ++b) (keeps_on_device(settings, b) ? own : turn)++;
  return keeps_on_device(settings, block) ? 1 + own : turn % 2;
}

/// The order that an executor must keep and no more: each lane in order, and dependencies. One vector clock
/// per operation: the last operation of each lane that is done before it begins.
class HappensBefore {
 public:
  explicit HappensBefore(const Schedule& schedule) : schedule_(schedule) {
    std::array<int, all_lanes.size()> last;
    last.fill(-1);
    for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
      const Operation& operation = schedule.operations[i];
      Clock clock;
      clock.fill(-1);
      const auto join = [&](int other) {
        const auto index = static_cast<std::size_t>(other);
        for (std::size_t lane = 0; lane < clock.size(); ++lane) {
          clock[lane] = std::max(clock[lane], clocks_[index][lane]);
        }
        int& own = clock[lane_of(other)];
        own = std::max(own, other);
      };
      const auto lane = static_cast<std::size_t>(operation.lane);
      if (last[lane] >= 0) join(last[lane]);
      for (const int dependency : operation.dependencies) join(dependency);
      clocks_.push_back(clock);
      last[lane] = static_cast<int>(i);
    }
  }

  /// `first` is done before `second` begins, however fast the lanes are.
  bool ordered(int first, int second) const {
    return clocks_[static_cast<std::size_t>(second)][lane_of(first)] >= first;
  }

 private:
  using Clock = std::array<int, all_lanes.size()>;
  std::size_t lane_of(int index) const {
    return static_cast<std::size_t>(schedule_.operations[static_cast<std::size_t>(index)].lane);
  }
  const Schedule& schedule_;
  std::vector<Clock> clocks_;
};

/// A piece of memory, as it lies there: two names never overlap.
struct Place {
  enum Buffer {
    weight_slot,     // (slot)
    host_slab,       // (block, part): halves, moments, version; part 0 is the host's to update, 1 + k piece k
    update_slot,     // (slot)
    resident_state,  // (block): halves and moments that live on the device
    block_gradient,  // (block): its gradient's own buffer, or what of it waits on the device
    input,           // (buffer, chunk)
    ring,            // (intermediate slot)
    resident,        // (block, chunk): intermediates that stay on the device
    saved_input,     // (block, chunk)
    saved_intermediates,  // (block, chunk)
    gradient_slot,        // (slot)
    host_gradient,        // (slab)
    norm_partial,         // (block)
    host_sums,            // (block): norm and loss on the host
    stream_gradient,      // (chunk)
    nll_sum,
    verdict,
    compute_scratch,  // workspace, merged weights, keys and values of the group
  };
  Buffer buffer;
  int index = 0;
  int chunk = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};

struct Accesses {
  std::vector<Place> reads, writes;
};

/// What the step runner reads and writes for an operation.
class AccessModel {
 public:
  AccessModel(const ScheduleSettings& settings, const ChunkPlan& chunks)
      : settings_(settings), chunks_(chunks) {}

  Accesses of(const Operation& operation) const {
    Accesses accesses;
    auto& [reads, writes] = accesses;
    const int b = operation.block;
    const int c = operation.chunk;
    const int head = settings_.num_blocks - 1;
    const bool tied_head = b == head && settings_.head_uses_embedding;
    const bool immediate = settings_.optimizer_update == OptimizerUpdate::immediate;
    const auto both = [&](Place place) {
      reads.push_back(place);
      writes.push_back(place);
    };
    const auto compute_with_weights = [&] {
      if (operation.weight_slot >= 0) reads.push_back({Place::weight_slot, operation.weight_slot});
      read_slab(b, reads);  // resident weights, or its version and what a coherent backend leaves there
      if (tied_head && operation.weight_slot < 0) read_slab(0, reads);
      both({Place::compute_scratch});
    };
    switch (operation.kind) {
      case OperationKind::update:
        reads = {{Place::host_gradient, host_gradient_slab(settings_, b)}};
        both({Place::host_slab, b, 0});
        if (immediate) {
          reads.push_back({Place::host_sums, b});
          both({Place::verdict});
        }
        break;
      case OperationKind::load_state:
        reads = {{Place::host_slab, b, 1 + operation.piece}};
        if (settings_.device_update.kept(b) == 0) {
          reads.push_back({Place::host_gradient, host_gradient_slab(settings_, b)});
        }
        writes = {state_on_device(operation)};
        break;
      case OperationKind::update_on_device:
        if (settings_.device_update.kept(b) > 0) reads = {{Place::block_gradient, b}};
        both(state_on_device(operation));
        break;
      case OperationKind::store_state:
        reads = {state_on_device(operation)};
        writes = {{Place::host_slab, b, 1 + operation.piece}};
        break;
      case OperationKind::fetch_weights:
        read_slab(b, reads);
        if (tied_head) read_slab(0, reads);
        writes = {{Place::weight_slot, operation.weight_slot}};
        break;
      case OperationKind::release_weights:
        writes = {{Place::weight_slot, operation.weight_slot}};
        break;
      case OperationKind::forward:
        compute_with_weights();
        if (b > 0) {
          reads.push_back(input(b, c));
          for (const Place& place : intermediates(operation)) writes.push_back(place);
        }
        writes.push_back(input(b + 1, c));
        break;
      case OperationKind::save_input:
        reads = {input(b, c)};
        writes = {{Place::saved_input, b, in_buffer(c)}};
        break;
      case OperationKind::load_input:
        reads = {{Place::saved_input, b, in_buffer(c)}};
        writes = {input(b, c)};
        break;
      case OperationKind::save_intermediates:
        reads = {{Place::ring, operation.intermediate_slot}};
        writes = {{Place::saved_intermediates, b, in_kept_buffer(c)}};
        break;
      case OperationKind::load_intermediates:
        reads = {{Place::saved_intermediates, b, in_kept_buffer(c)}};
        writes = {{Place::ring, operation.intermediate_slot}};
        break;
      case OperationKind::loss:
      case OperationKind::logits:
        compute_with_weights();
        reads.push_back(input(b, c));
        both({Place::nll_sum});
        break;
      case OperationKind::loss_and_gradient:
        compute_with_weights();
        reads.push_back(input(b, c));
        writes.push_back({Place::stream_gradient, c});
        both(gradient(operation));
        if (tied_head && settings_.head_adds_to_embedding()) both({Place::block_gradient, 0});
        both({Place::nll_sum});
        break;
      case OperationKind::clear_gradient:
        writes = {gradient(operation)};
        break;
      case OperationKind::load_gradient:
        reads = {{Place::host_gradient, host_gradient_slab(settings_, b)}};
        if (settings_.device_update.kept(b) > 0) reads.push_back({Place::block_gradient, b});
        writes = {gradient(operation)};
        break;
      case OperationKind::rebuild_key_value:
        compute_with_weights();
        reads.push_back(input(b, c));
        if (on_device(b)) {
          for (const Place& place : intermediates(operation)) reads.push_back(place);
        }
        break;
      case OperationKind::backward:
        both({Place::stream_gradient, c});
        both(gradient(operation));
        if (b > 0) {
          compute_with_weights();
          reads.push_back(input(b, c));
          for (const Place& place : intermediates(operation)) both(place);
        }
        break;
      case OperationKind::gradient_norm:
        reads = {gradient(operation)};
        writes = {{Place::norm_partial, b}, {Place::compute_scratch}};
        break;
      case OperationKind::keep_gradient:
        reads = {gradient(operation)};
        if (settings_.device_update.kept(b) > 0) writes.push_back({Place::block_gradient, b});
        if (tied_head && settings_.device_update.kept(0) > 0) writes.push_back({Place::block_gradient, 0});
        break;
      case OperationKind::emit_gradient:
        // What is not kept on the device, if only nothing.
        reads = {gradient(operation), {Place::norm_partial, b}};
        if (b == head) reads.push_back({Place::nll_sum});
        writes = {{Place::host_gradient, host_gradient_slab(settings_, b)}, {Place::host_sums, b}};
        if (tied_head && !settings_.head_adds_to_embedding()) {
          writes.push_back({Place::host_gradient, host_gradient_slab(settings_, 0)});
        }
        break;
      case OperationKind::verdict:
        for (int block = 0; block < settings_.num_blocks; ++block) reads.push_back({Place::host_sums, block});
        both({Place::verdict});
        break;
    }
    return accesses;
  }

 private:
  /// Where a chunk's activations lie: micro-batch-major every group's lie over those of the one before.
  int in_buffer(int chunk) const {
    if (settings_.loop_order == LoopOrder::layer_major) return chunk;
    for (const ChunkGroup& group : chunks_.groups) {
      if (chunk < group.first_chunk + group.num_chunks) return chunk - group.first_chunk;
    }
    return -1;
  }
  /// The same for what only the last chunks of a group keep.
  int in_kept_buffer(int chunk) const {
    if (settings_.loop_order == LoopOrder::layer_major) return chunk;
    const ChunkGroup& group = chunks_.group_of(chunk);
    return in_buffer(chunk) - std::max(0, group.num_chunks - settings_.activation_chunks);
  }
  static Place gradient(const Operation& operation) {
    if (operation.gradient_slot < 0) return {Place::block_gradient, operation.block};
    return {Place::gradient_slot, operation.gradient_slot};
  }
  bool saves(const Operation& operation) const {
    const ChunkGroup& group = chunks_.group_of(operation.chunk);
    const int later = group.first_chunk + group.num_chunks - 1 - operation.chunk;
    return settings_.activation_policy != ActivationPolicy::input &&
           operation.block >= settings_.num_blocks - 1 - settings_.activation_blocks &&
           later < settings_.activation_chunks;
  }
  bool on_device(int block) const { return keeps_on_device(settings_, block); }
  static Place state_on_device(const Operation& operation) {
    if (operation.update_slot < 0) return {Place::resident_state, operation.block};
    return {Place::update_slot, operation.update_slot};
  }
  void read_slab(int block, std::vector<Place>& reads) const {
    if (settings_.device_update.is_resident(block)) {
      reads.push_back({Place::resident_state, block});
      return;
    }
    const int parts = 1 + settings_.device_update.num_pieces(block);
    for (int part = 0; part < parts; ++part) reads.push_back({Place::host_slab, block, part});
  }
  Place input(int block, int chunk) const {
    return {Place::input, test::input_buffer(settings_, block), in_buffer(chunk)};
  }
  std::vector<Place> intermediates(const Operation& operation) const {
    if (!saves(operation)) return {};
    if (on_device(operation.block)) {
      return {{Place::resident, operation.block, in_kept_buffer(operation.chunk)}};
    }
    return {{Place::ring, operation.intermediate_slot}};
  }

  const ScheduleSettings& settings_;
  const ChunkPlan& chunks_;
};

/// Two operations that touch the same memory, one writing, and nothing that keeps them apart: described;
/// empty when there is no such pair.
inline std::string find_race(const Schedule& schedule, const ScheduleSettings& settings,
                             const ChunkPlan& chunks) {
  const HappensBefore order(schedule);
  const AccessModel model(settings, chunks);
  struct Access {
    int operation;
    bool writes;
  };
  std::map<Place, std::vector<Access>> accesses;
  for (int i = 0; i < static_cast<int>(schedule.operations.size()); ++i) {
    const Accesses own = model.of(schedule.operations[static_cast<std::size_t>(i)]);
    for (const Place& place : own.reads) accesses[place].push_back({i, false});
    for (const Place& place : own.writes) accesses[place].push_back({i, true});
  }
  for (const auto& [place, list] : accesses) {
    for (std::size_t second = 0; second < list.size(); ++second) {
      for (std::size_t first = 0; first < second; ++first) {
        const auto [a, a_writes] = list[first];
        const auto [b, b_writes] = list[second];
        if (a == b || !(a_writes || b_writes) || order.ordered(a, b)) continue;
        return fmt::format("{} and {} may both touch buffer {} ({}, {})", to_string(schedule, a),
                           to_string(schedule, b), static_cast<int>(place.buffer), place.index, place.chunk);
      }
    }
  }
  return {};
}

}  // namespace layerstream::test

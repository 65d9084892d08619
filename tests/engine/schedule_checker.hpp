#pragma once

#include <fmt/format.h>

#include <array>
#include <compare>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/lane.hpp"
#include "engine/schedule.hpp"
#include "longctx/chunk_plan.hpp"

// A second opinion on schedules: what each operation touches is written down here from what the step runner
// does, and not taken from the builder's own declarations.

namespace layerstream::test {

inline std::string to_string(const Schedule& schedule, int index) {
  const Operation& operation = schedule.operations[static_cast<std::size_t>(index)];
  return fmt::format("#{} {} block {} chunk {} on {}", index, name_of(operation.kind), operation.block,
                     operation.chunk, name_of(operation.lane));
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
    weight_slot,          // (slot)
    host_slab,            // (block): halves and version
    input,                // (buffer, chunk)
    ring,                 // (intermediate slot)
    resident,             // (block, chunk): intermediates that stay on the device
    saved_input,          // (block, chunk)
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
  explicit AccessModel(const ScheduleSettings& settings) : settings_(settings) {}

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
      reads.push_back({Place::weight_slot, operation.weight_slot});
      reads.push_back({Place::host_slab, b});  // its version, and what a coherent backend leaves there
      both({Place::compute_scratch});
    };
    switch (operation.kind) {
      case OperationKind::update:
        reads = {{Place::host_gradient, host_gradient_slab(settings_, b)}};
        both({Place::host_slab, b});
        if (immediate) {
          reads.push_back({Place::host_sums, b});
          both({Place::verdict});
        }
        break;
      case OperationKind::fetch_weights:
        reads = {{Place::host_slab, b}};
        if (tied_head) reads.push_back({Place::host_slab, 0});
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
        writes = {{Place::saved_input, b, c}};
        break;
      case OperationKind::load_input:
        reads = {{Place::saved_input, b, c}};
        writes = {input(b, c)};
        break;
      case OperationKind::save_intermediates:
        reads = {{Place::ring, operation.intermediate_slot}};
        writes = {{Place::saved_intermediates, b, c}};
        break;
      case OperationKind::load_intermediates:
        reads = {{Place::saved_intermediates, b, c}};
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
        both({Place::gradient_slot, operation.gradient_slot});
        both({Place::nll_sum});
        break;
      case OperationKind::clear_gradient:
        writes = {{Place::gradient_slot, operation.gradient_slot}};
        break;
      case OperationKind::load_gradient:
        reads = {{Place::host_gradient, host_gradient_slab(settings_, b)}};
        writes = {{Place::gradient_slot, operation.gradient_slot}};
        break;
      case OperationKind::rebuild_key_value:
        compute_with_weights();
        reads.push_back(input(b, c));
        if (!settings_.activations_on_host) {
          for (const Place& place : intermediates(operation)) reads.push_back(place);
        }
        break;
      case OperationKind::backward:
        both({Place::stream_gradient, c});
        both({Place::gradient_slot, operation.gradient_slot});
        if (b > 0) {
          compute_with_weights();
          reads.push_back(input(b, c));
          for (const Place& place : intermediates(operation)) both(place);
        }
        break;
      case OperationKind::gradient_norm:
        reads = {{Place::gradient_slot, operation.gradient_slot}};
        writes = {{Place::norm_partial, b}, {Place::compute_scratch}};
        break;
      case OperationKind::emit_gradient:
        reads = {{Place::gradient_slot, operation.gradient_slot}, {Place::norm_partial, b}};
        if (b == head) reads.push_back({Place::nll_sum});
        writes = {{Place::host_gradient, host_gradient_slab(settings_, b)}, {Place::host_sums, b}};
        if (tied_head) writes.push_back({Place::host_gradient, host_gradient_slab(settings_, 0)});
        break;
      case OperationKind::verdict:
        for (int block = 0; block < settings_.num_blocks; ++block) reads.push_back({Place::host_sums, block});
        both({Place::verdict});
        break;
    }
    return accesses;
  }

 private:
  bool saves() const { return settings_.activation_policy != ActivationPolicy::input; }
  Place input(int block, int chunk) const {
    return {Place::input, settings_.activations_on_host ? block % 2 : block, chunk};
  }
  std::vector<Place> intermediates(const Operation& operation) const {
    if (!saves()) return {};
    if (!settings_.activations_on_host) return {{Place::resident, operation.block, operation.chunk}};
    return {{Place::ring, operation.intermediate_slot}};
  }

  const ScheduleSettings& settings_;
};

/// Two operations that touch the same memory, one writing, and nothing that keeps them apart: described;
/// empty when there is no such pair.
inline std::string find_race(const Schedule& schedule, const ScheduleSettings& settings) {
  const HappensBefore order(schedule);
  const AccessModel model(settings);
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

/// Follows what lies in each buffer through the list of operations, and stops at the first operation that
/// does not find what it needs. Where `find_race` finds nothing every possible execution has the same result.
class StepReplay {
 public:
  StepReplay(const Schedule& schedule, const ScheduleSettings& settings, const ChunkPlan& chunks)
      : schedule_(schedule), settings_(settings), chunks_(chunks), head_(settings.num_blocks - 1) {
    const auto num_blocks = static_cast<std::size_t>(settings.num_blocks);
    versions_.assign(num_blocks, 0);
    updates_.assign(num_blocks, 0);
    emits_.assign(num_blocks, 0);
    if (settings.pending_update) {
      for (int block = 0; block <= head_; ++block) {
        host_gradients_[host_gradient_slab(settings, block)] = {
            .block = block, .complete = true, .of_this_step = false};
      }
    }
  }

  /// Empty when every operation finds what it needs and the step is complete.
  std::string run() {
    for (int i = 0; i < static_cast<int>(schedule_.operations.size()); ++i) {
      index_ = i;
      step(schedule_.operations[static_cast<std::size_t>(i)]);
      if (!problem_.empty()) return problem_;
    }
    finish();
    return problem_;
  }

  int num_fetches() const { return num_fetches_; }

 private:
  struct SlotContent {
    int block, version, embedding_version;
    friend bool operator==(const SlotContent&, const SlotContent&) = default;
  };
  struct GradientContent {
    int block = -1;
    bool has_share_of_head = false;
    std::set<int> chunks;
    bool normed = false;
  };
  struct HostGradient {
    int block = -1;
    bool complete = false;  // else the head's share of a tied matrix
    bool of_this_step = true;
  };
  struct KeyValues {
    int block = -1;
    int group = -1;
    bool rebuilt = false;
    std::set<int> chunks;    // whose keys and values are there
    std::set<int> backward;  // that have been through the backward pass
  };

  void expect(bool holds, const char* what) {
    if (!holds && problem_.empty()) problem_ = fmt::format("{}: {}", to_string(schedule_, index_), what);
  }
  bool tied() const { return settings_.head_uses_embedding; }
  bool saves() const { return settings_.activation_policy != ActivationPolicy::input; }
  int input_buffer(int block) const { return settings_.activations_on_host ? block % 2 : block; }
  SlotContent current(int block) const {
    return {block, versions_[static_cast<std::size_t>(block)], block == head_ && tied() ? versions_[0] : 0};
  }

  void expect_weights(const Operation& operation) {
    const auto slot = slots_.find(operation.weight_slot);
    expect(slot != slots_.end() && slot->second == current(operation.block), "the slot holds other weights");
  }
  void expect_input(const Operation& operation) {
    const auto found = inputs_.find({input_buffer(operation.block), operation.chunk});
    expect(found != inputs_.end() && found->second == operation.block, "the input is not there");
  }
  int group_of(int chunk) const { return chunks_.chunks[static_cast<std::size_t>(chunk)].group; }

  void write_intermediates(const Operation& operation) {
    if (!saves()) return;
    if (settings_.activations_on_host) {
      expect(operation.intermediate_slot >= 0 && operation.intermediate_slot < settings_.intermediate_slots,
             "no intermediate slot");
      ring_[operation.intermediate_slot] = {operation.block, operation.chunk};
    } else {
      resident_.insert({operation.block, operation.chunk});
    }
  }
  void take_intermediates(const Operation& operation) {
    if (!saves()) return;
    const std::pair key{operation.block, operation.chunk};
    if (settings_.activations_on_host) {
      const auto found = ring_.find(operation.intermediate_slot);
      expect(found != ring_.end() && found->second == key, "the ring holds other intermediates");
      ring_.erase(operation.intermediate_slot);  // overwritten with gradients
    } else {
      expect(resident_.erase(key) == 1, "the intermediates are not there");
    }
  }
  GradientContent& gradient_of(const Operation& operation) {
    GradientContent& content = gradients_[operation.gradient_slot];
    expect(content.block == operation.block, "the gradient slot belongs to another block");
    return content;
  }
  void add_gradient(const Operation& operation) {
    GradientContent& content = gradient_of(operation);
    expect(!content.normed, "the gradient was finished");
    expect(content.chunks.insert(operation.chunk).second, "the chunk's gradient was added before");
  }

  void step(const Operation& operation) {
    const int b = operation.block;
    const int c = operation.chunk;
    const auto block = static_cast<std::size_t>(b);
    switch (operation.kind) {
      case OperationKind::update: {
        HostGradient& gradient = host_gradients_[host_gradient_slab(settings_, b)];
        const bool immediate = settings_.optimizer_update == OptimizerUpdate::immediate;
        expect(gradient.block == b && gradient.complete && gradient.of_this_step == immediate,
               "the host slab holds another gradient");
        gradient = {};
        ++versions_[block];
        ++updates_[block];
        break;
      }
      case OperationKind::fetch_weights:
        expect(!slots_.contains(operation.weight_slot), "the slot is in use");
        expect(operation.weight_slot >= 0 && operation.weight_slot < settings_.weight_slots, "no such slot");
        if (settings_.pending_update) {
          expect(updates_[block] == 1 && (b != head_ || !tied() || updates_[0] == 1),
                 "its update is still waiting");
        }
        slots_[operation.weight_slot] = current(b);
        ++num_fetches_;
        break;
      case OperationKind::release_weights:
        expect(slots_.contains(operation.weight_slot) && slots_[operation.weight_slot].block == b,
               "the slot holds another block");
        slots_.erase(operation.weight_slot);
        break;
      case OperationKind::forward:
        expect_weights(operation);
        if (b > 0) {
          expect_input(operation);
          append_key_values(operation, false);
          write_intermediates(operation);
        }
        inputs_[{input_buffer(b + 1), c}] = b + 1;
        break;
      case OperationKind::save_input:
        expect_input(operation);
        saved_inputs_.insert({b, c});
        break;
      case OperationKind::load_input:
        expect(saved_inputs_.contains({b, c}), "nothing was saved");
        inputs_[{input_buffer(b), c}] = b;
        break;
      case OperationKind::save_intermediates: {
        const auto found = ring_.find(operation.intermediate_slot);
        expect(found != ring_.end() && found->second == std::pair(b, c),
               "the ring holds other intermediates");
        saved_intermediates_.insert({b, c});
        break;
      }
      case OperationKind::load_intermediates:
        expect(saved_intermediates_.contains({b, c}), "nothing was saved");
        ring_[operation.intermediate_slot] = {b, c};
        break;
      case OperationKind::loss:
      case OperationKind::logits:
        expect_weights(operation);
        expect_input(operation);
        expect(losses_.insert(c).second, "the chunk's loss was added before");
        break;
      case OperationKind::loss_and_gradient:
        expect_weights(operation);
        expect_input(operation);
        expect(losses_.insert(c).second, "the chunk's loss was added before");
        add_gradient(operation);
        stream_gradient_[c] = head_;
        break;
      case OperationKind::clear_gradient:
        expect(gradients_[operation.gradient_slot].block < 0, "the slot holds a gradient that has not left");
        gradients_[operation.gradient_slot] = {.block = b, .chunks = {}};
        break;
      case OperationKind::load_gradient: {
        const HostGradient& gradient = host_gradients_[host_gradient_slab(settings_, b)];
        expect(gradients_[operation.gradient_slot].block < 0, "the slot holds a gradient that has not left");
        expect(gradient.block == b && !gradient.complete && gradient.of_this_step,
               "the head's share is not there");
        gradients_[operation.gradient_slot] = {.block = b, .has_share_of_head = true, .chunks = {}};
        break;
      }
      case OperationKind::rebuild_key_value:
        expect_weights(operation);
        expect_input(operation);
        append_key_values(operation, true);
        break;
      case OperationKind::backward:
        backward(operation);
        break;
      case OperationKind::gradient_norm: {
        GradientContent& content = gradient_of(operation);
        expect(static_cast<int>(content.chunks.size()) == chunks_.num_chunks(), "chunks are missing");
        expect(b != 0 || content.has_share_of_head == tied(), "the head's share is missing");
        content.normed = true;
        break;
      }
      case OperationKind::emit_gradient:
        expect(gradient_of(operation).normed, "its norm is missing");
        put_host_gradient(b, true);
        if (b == head_ && tied()) put_host_gradient(0, false);
        gradients_[operation.gradient_slot] = {};
        ++emits_[block];
        break;
      case OperationKind::verdict:
        for (const int count : emits_) expect(count == 1, "a block's sums are missing");
        expect(index_ + 1 == static_cast<int>(schedule_.operations.size()), "the step goes on");
        break;
    }
  }

  void append_key_values(const Operation& operation, bool rebuild) {
    const int group = group_of(operation.chunk);
    const ChunkGroup& bounds = chunks_.groups[static_cast<std::size_t>(group)];
    if (operation.chunk == bounds.first_chunk) {
      key_values_ = {
          .block = operation.block, .group = group, .rebuilt = rebuild, .chunks = {}, .backward = {}};
    }
    expect(
        key_values_.block == operation.block && key_values_.group == group && key_values_.rebuilt == rebuild,
        "keys and values of another group");
    expect(static_cast<int>(key_values_.chunks.size()) == operation.chunk - bounds.first_chunk,
           "chunks of a row out of order");
    key_values_.chunks.insert(operation.chunk);
  }

  void backward(const Operation& operation) {
    const int b = operation.block;
    const int c = operation.chunk;
    const auto gradient = stream_gradient_.find(c);
    expect(gradient != stream_gradient_.end() && gradient->second == b + 1,
           "the output's gradient is not there");
    stream_gradient_[c] = b;
    add_gradient(operation);
    if (b == 0) return;
    expect_weights(operation);
    expect_input(operation);
    const ChunkGroup& group = chunks_.groups[static_cast<std::size_t>(group_of(c))];
    const int later = group.first_chunk + group.num_chunks - 1 - c;
    expect(key_values_.block == b && key_values_.group == group_of(c) && key_values_.rebuilt &&
               static_cast<int>(key_values_.chunks.size()) == group.num_chunks,
           "the group's keys and values are not there");
    expect(static_cast<int>(key_values_.backward.size()) == later && !key_values_.backward.contains(c),
           "later chunks of the row must come first");
    key_values_.backward.insert(c);
    take_intermediates(operation);
  }

  void put_host_gradient(int block, bool complete) {
    HostGradient& gradient = host_gradients_[host_gradient_slab(settings_, block)];
    const bool replaces_share = complete && gradient.block == block && !gradient.complete;
    expect(gradient.block < 0 || replaces_share, "the host slab holds a gradient that waits for its update");
    gradient = {.block = block, .complete = complete};
  }

  void finish() {
    index_ = static_cast<int>(schedule_.operations.size()) - 1;
    expect(slots_.empty(), "a slot is not released at the end");
    expect(static_cast<int>(losses_.size()) == chunks_.num_chunks(), "the loss of a chunk is missing");
    const bool immediate = settings_.optimizer_update == OptimizerUpdate::immediate;
    const int updates = settings_.pending_update || (immediate && settings_.train) ? 1 : 0;
    for (const int count : updates_) expect(count == updates, "a block was not updated once");
    for (const int count : emits_) expect(count == (settings_.train ? 1 : 0), "a block did not emit once");
    for (const auto& [chunk, block] : stream_gradient_)
      expect(block == 0, "the backward pass is not complete");
    if (settings_.train) {
      expect(schedule_.operations.back().kind == OperationKind::verdict, "no verdict");
      for (const auto& [slab, gradient] : host_gradients_) {
        expect(immediate ? gradient.block < 0 : gradient.complete && gradient.of_this_step,
               "gradients in the host slabs are not this step's");
      }
    }
  }

  const Schedule& schedule_;
  const ScheduleSettings& settings_;
  const ChunkPlan& chunks_;
  int head_;
  int index_ = 0;
  std::string problem_;
  int num_fetches_ = 0;
  std::vector<int> versions_, updates_, emits_;
  std::map<int, SlotContent> slots_;
  std::map<std::pair<int, int>, int> inputs_;  // (buffer, chunk) → block
  std::set<std::pair<int, int>> saved_inputs_, saved_intermediates_, resident_;
  std::map<int, std::pair<int, int>> ring_;
  KeyValues key_values_;
  std::map<int, int> stream_gradient_;  // chunk → the block whose input's gradient it is
  std::map<int, GradientContent> gradients_;
  std::map<int, HostGradient> host_gradients_;
  std::set<int> losses_;
};

}  // namespace layerstream::test

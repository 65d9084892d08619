#include "engine/schedule.hpp"

#include <algorithm>
#include <deque>
#include <set>

#include "core/error.hpp"
#include "engine/hazards.hpp"

namespace layerstream {
namespace {

using Kind = Resource::Kind;

std::int64_t num_pairs(const Chunk& chunk) {
  std::int64_t pairs = 0;
  for (const ops::AttentionSegment& segment : chunk.segments) {
    const std::int64_t unseen = segment.num_queries * (segment.num_queries - 1) / 2;
    pairs += segment.num_queries * segment.num_keys - unseen;
  }
  return pairs;
}

/// Two halves of the weight and two moments.
constexpr std::int64_t state_bytes_per_element = 12;
constexpr std::int64_t gradient_bytes_per_element = 4;

class StepBuilder {
 public:
  StepBuilder(const ScheduleSettings& settings, const ChunkPlan& chunks, const std::vector<BlockCost>& costs)
      : settings_(settings), chunks_(chunks), costs_(costs), head_(settings.num_blocks - 1) {
    LAYERSTREAM_EXPECT(
        settings.num_blocks >= 3 && costs.size() == static_cast<std::size_t>(settings.num_blocks),
        "{} blocks, {} costs", settings.num_blocks, costs.size());
    LAYERSTREAM_EXPECT(
        settings.weight_slots >= 1 && settings.gradient_slots >= 1 && settings.intermediate_slots >= 1,
        "at least one slot of each kind");
    expect_sound(settings.device_update);
    for (int slot = 0; slot < settings.weight_slots; ++slot) free_slots_.push_back(slot);
    slot_of_block_.assign(static_cast<std::size_t>(settings.num_blocks), -1);
    for (int block = 0; block <= head_; ++block) visits_.push_back(block);
    if (settings.train) {
      for (int block = head_ - 1; block >= 1; --block) visits_.push_back(block);
    }
  }

  Schedule build() {
    if (settings_.load_resident) move_resident(OperationKind::load_state, Lane::h2d);
    if (settings_.pending_update) update_hosts_shares();
    for (int block = 0; block < head_; ++block) forward(block);
    if (settings_.train) {
      head_step();
      for (int block = head_ - 1; block >= 1; --block) backward(block);
      embedding_backward();
      verdict();
    } else {
      head_forward();
    }
    return std::move(schedule_);
  }

  Schedule build_updates() {
    if (settings_.load_resident) move_resident(OperationKind::load_state, Lane::h2d);
    if (settings_.pending_update) {
      update_hosts_shares();
      update_devices_shares(head_);
    }
    move_resident(OperationKind::store_state, Lane::update_out);
    return std::move(schedule_);
  }

 private:
  void expect_sound(const DeviceUpdate& device) const {
    if (device.elements.empty()) return;
    LAYERSTREAM_EXPECT(
        device.elements.size() == costs_.size() && device.piece_elements >= 1 && device.resident_blocks >= 0,
        "device updates of {} blocks out of {}, {} of them resident, in pieces of {}", device.elements.size(),
        costs_.size(), device.resident_blocks, device.piece_elements);
    for (int block = 0; block <= head_; ++block) {
      const std::int64_t elements = device.of(block);
      LAYERSTREAM_EXPECT(elements >= 0 && elements <= cost(block).num_elements &&
                             (!device.is_resident(block) || elements == cost(block).num_elements),
                         "device updates of {} elements of block {}, which has {}", elements, block,
                         cost(block).num_elements);
      LAYERSTREAM_EXPECT(elements == 0 || device.is_resident(block) || device.slots >= 1,
                         "device updates of block {} without a slot", block);
    }
    LAYERSTREAM_EXPECT(settings_.optimizer_update == OptimizerUpdate::deferred,
                       "immediate updates are the host's alone");
  }

  // --- weights ---

  /// Fetches the block that is visited now and, as far as slots are free, those that come next.
  void fetch_ahead() {
    for (std::size_t visit = visit_; visit < visits_.size(); ++visit) {
      const int block = visits_[visit];
      if (slot_of(block) >= 0) continue;
      if (free_slots_.empty()) break;
      fetch(block);
    }
    LAYERSTREAM_EXPECT(slot_of(visits_[visit_]) >= 0, "no slot for block {}", visits_[visit_]);
  }

  void fetch(int block) {
    if (settings_.pending_update) update_devices_shares(block);
    const int slot = free_slots_.front();
    free_slots_.pop_front();
    slot_of_block_[static_cast<std::size_t>(block)] = slot;
    tracker_.append({.kind = OperationKind::fetch_weights,
                     .lane = settings_.fetch_lane,
                     .block = block,
                     .weight_slot = slot,
                     .bytes = fetch_bytes(block),
                     .dependencies = {}},
                    host_weights(block), {{Kind::weight_slot, slot}});
  }

  /// Ends a visit. The block stays in its slot when the blocks visited until its next use leave room.
  void end_visit() {
    const int block = visits_[visit_];
    ++visit_;
    std::set<int> in_use{block};
    for (std::size_t visit = visit_; visit < visits_.size(); ++visit) {
      if (visits_[visit] == block) return;
      in_use.insert(visits_[visit]);
      if (static_cast<int>(in_use.size()) > settings_.weight_slots) break;
    }
    const int slot = slot_of(block);
    slot_of_block_[static_cast<std::size_t>(block)] = -1;
    free_slots_.push_back(slot);
    tracker_.append({.kind = OperationKind::release_weights,
                     .lane = Lane::compute,
                     .block = block,
                     .weight_slot = slot,
                     .dependencies = {}},
                    {}, {{Kind::weight_slot, slot}});
  }

  /// What a block's weights are read from; a coherent backend reads some of them in place.
  std::vector<Resource> host_weights(int block) const {
    std::vector<Resource> resources;
    const auto add = [&](int home) {
      resources.push_back({Kind::host_weights, home, StatePart::of_host});
      for (int piece = 0; piece < settings_.device_update.num_pieces(home); ++piece) {
        resources.push_back({Kind::host_weights, home, StatePart::of_piece(piece)});
      }
    };
    add(block);
    if (block == head_ && settings_.head_uses_embedding) add(0);
    return resources;
  }

  std::vector<Resource> with_weights(int block, std::vector<Resource> others) const {
    for (const Resource& resource : host_weights(block)) others.push_back(resource);
    others.push_back({Kind::weight_slot, slot_of(block)});
    return others;
  }

  // --- activations ---

  bool saves_intermediates() const { return settings_.activation_policy != ActivationPolicy::input; }

  Resource input(int block, int chunk) const { return {Kind::input, settings_.input_buffer(block), chunk}; }

  /// The last decoder block's input still stands where the forward pass left it when the backward pass
  /// comes to it.
  bool input_leaves(int block) const {
    return settings_.train && settings_.activations_on_host && block >= 1 && block < head_ - 1;
  }

  /// Intermediates on the device: a ring when they go to the host, else a place of their own.
  Resource intermediates(int block, int chunk, int slot) const {
    return settings_.activations_on_host ? Resource{Kind::intermediates, slot}
                                         : Resource{Kind::intermediates, block, chunk};
  }

  int next_intermediate_slot() {
    if (!saves_intermediates() || !settings_.activations_on_host) return -1;
    return intermediate_uses_++ % settings_.intermediate_slots;
  }

  void save_input(int block, int chunk) {
    if (!input_leaves(block)) return;
    tracker_.append({.kind = OperationKind::save_input,
                     .lane = Lane::d2h,
                     .block = block,
                     .chunk = chunk,
                     .bytes = cost(block).input_bytes_per_token * tokens(chunk),
                     .dependencies = {}},
                    {input(block, chunk)}, {{Kind::saved_input, block, chunk}});
  }

  void load_input(int block, int chunk) {
    if (!input_leaves(block)) return;
    tracker_.append({.kind = OperationKind::load_input,
                     .lane = Lane::h2d,
                     .block = block,
                     .chunk = chunk,
                     .bytes = cost(block).input_bytes_per_token * tokens(chunk),
                     .dependencies = {}},
                    {{Kind::saved_input, block, chunk}}, {input(block, chunk)});
  }

  // --- optimizer ---

  /// The updates that wait, in the order in which the forward pass needs them. Their lane does little else.
  void update_hosts_shares() {
    for (int block = 0; block <= head_; ++block) update_hosts_share(block);
  }

  void update_hosts_share(int block) {
    const Resource gradient{Kind::host_gradient, host_gradient_slab(settings_, block)};
    const std::int64_t device_elements = settings_.device_update.of(block);
    if (device_elements < cost(block).num_elements) {
      tracker_.append(
          {.kind = OperationKind::update,
           .lane = Lane::host,
           .block = block,
           .bytes = share(cost(block).update_bytes, block, cost(block).num_elements - device_elements),
           .dependencies = {}},
          {gradient, {Kind::host_statistics, block}}, {{Kind::host_weights, block, StatePart::of_host}});
    }
  }

  /// All waiting pieces up to `block`, and as many of the next as there are slots: they cross the link while
  /// the last stores of `block` are under way, before its weights can be fetched. State and weights come over
  /// the link on one lane, since the order of two would be the hardware's, which starves one of them.
  void update_devices_shares(int block) {
    const DeviceUpdate& device = settings_.device_update;
    const int ahead = device.slots + update_uses_through(block);
    while (next_update_block_ <= head_ && (next_update_block_ <= block || update_uses_ < ahead)) {
      if (next_update_piece_ == device.num_pieces(next_update_block_)) {
        ++next_update_block_;
        next_update_piece_ = 0;
        continue;
      }
      update_on_device(next_update_block_, next_update_piece_++);
    }
  }

  /// Pieces up to `block` that go through a slot.
  int update_uses_through(int block) const {
    int pieces = 0;
    for (int b = settings_.device_update.resident_blocks; b <= block; ++b) {
      pieces += settings_.device_update.num_pieces(b);
    }
    return pieces;
  }

  /// @param slot −1: the state is where it lives.
  Operation state_operation(OperationKind kind, Lane lane, int block, int piece, int slot,
                            std::int64_t bytes_per_element) const {
    return {.kind = kind,
            .lane = lane,
            .block = block,
            .piece = piece,
            .update_slot = slot,
            .bytes = bytes_per_element * settings_.device_update.piece(block, piece).count,
            .dependencies = {}};
  }

  void move_resident(OperationKind kind, Lane lane) {
    for (int block = 0; block < settings_.device_update.resident_blocks; ++block) {
      const std::vector<Resource> state{{Kind::host_weights, block, StatePart::of_piece(0)}};
      const bool loads = kind == OperationKind::load_state;
      tracker_.append(state_operation(kind, lane, block, 0, -1, state_bytes_per_element),
                      loads ? std::vector<Resource>{} : state, loads ? state : std::vector<Resource>{});
    }
  }

  void update_on_device(int block, int piece) {
    const DeviceUpdate& device = settings_.device_update;
    const Resource host_gradient{Kind::host_gradient, host_gradient_slab(settings_, block)};
    if (device.is_resident(block)) {
      tracker_.append(state_operation(OperationKind::update_on_device, Lane::update, block, piece, -1,
                                      2 * state_bytes_per_element + 4),
                      {{Kind::device_gradient, block}},
                      {{Kind::host_weights, block, StatePart::of_piece(piece)}});
      return;
    }
    const int slot = update_uses_++ % device.slots;
    const auto operation = [&](OperationKind kind, Lane lane, std::int64_t bytes_per_element) {
      return state_operation(kind, lane, block, piece, slot, bytes_per_element);
    };
    std::vector<Resource> sources{{Kind::host_weights, block, StatePart::of_piece(piece)}};
    std::vector<Resource> gradient;
    (device.gradients_on_device ? gradient : sources)
        .push_back(device.gradients_on_device ? Resource{Kind::device_gradient, block} : host_gradient);
    tracker_.append(operation(OperationKind::load_state, Lane::h2d,
                              state_bytes_per_element + (device.gradients_on_device ? 0 : 4)),
                    sources, {{Kind::update_slot, slot}});
    tracker_.append(operation(OperationKind::update_on_device, Lane::update, 2 * state_bytes_per_element + 4),
                    gradient, {{Kind::update_slot, slot}});
    tracker_.append(operation(OperationKind::store_state, Lane::update_out, state_bytes_per_element),
                    {{Kind::update_slot, slot}}, {{Kind::host_weights, block, StatePart::of_piece(piece)}});
  }

  // --- passes ---

  void forward(int block) {
    fetch_ahead();
    for (int chunk = 0; chunk < chunks_.num_chunks(); ++chunk) {
      const int slot = block == 0 ? -1 : next_intermediate_slot();
      std::vector<Resource> reads = with_weights(block, {});
      std::vector<Resource> writes{input(block + 1, chunk)};
      if (block > 0) {
        reads.push_back(input(block, chunk));
        writes.push_back({Kind::group_key_value});
        if (saves_intermediates()) writes.push_back(intermediates(block, chunk, slot));
      }
      tracker_.append({.kind = OperationKind::forward,
                       .lane = Lane::compute,
                       .block = block,
                       .chunk = chunk,
                       .weight_slot = slot_of(block),
                       .intermediate_slot = slot,
                       .flops = forward_flops(block, chunk),
                       .dependencies = {}},
                      reads, writes);
      save_input(block + 1, chunk);
      if (slot >= 0 && settings_.train) {
        tracker_.append({.kind = OperationKind::save_intermediates,
                         .lane = Lane::d2h,
                         .block = block,
                         .chunk = chunk,
                         .intermediate_slot = slot,
                         .bytes = cost(block).intermediate_bytes_per_token * tokens(chunk),
                         .dependencies = {}},
                        {intermediates(block, chunk, slot)}, {{Kind::saved_intermediates, block, chunk}});
      }
    }
    end_visit();
  }

  void head_forward() {
    fetch_ahead();
    for (int chunk = 0; chunk < chunks_.num_chunks(); ++chunk) {
      tracker_.append({.kind = settings_.logits_only ? OperationKind::logits : OperationKind::loss,
                       .lane = Lane::compute,
                       .block = head_,
                       .chunk = chunk,
                       .weight_slot = slot_of(head_),
                       .flops = forward_flops(head_, chunk),
                       .dependencies = {}},
                      with_weights(head_, {input(head_, chunk)}), {{Kind::loss}});
    }
    end_visit();
  }

  void head_step() {
    fetch_ahead();
    const int slot = clear_gradient(head_);
    for (int chunk = 0; chunk < chunks_.num_chunks(); ++chunk) {
      tracker_.append({.kind = OperationKind::loss_and_gradient,
                       .lane = Lane::compute,
                       .block = head_,
                       .chunk = chunk,
                       .weight_slot = slot_of(head_),
                       .gradient_slot = slot,
                       .flops = 3.0 * forward_flops(head_, chunk),
                       .dependencies = {}},
                      with_weights(head_, {input(head_, chunk)}),
                      {{Kind::loss}, {Kind::residual_gradient, 0, chunk}, {Kind::gradient_slot, slot}});
    }
    end_visit();
    finish_gradient(head_, slot);
  }

  void backward(int block) {
    fetch_ahead();
    const int slot = clear_gradient(block);
    for (const ChunkGroup& group : chunks_.groups) {
      const int end = group.first_chunk + group.num_chunks;
      for (int chunk = group.first_chunk; chunk < end; ++chunk) load_input(block, chunk);
      for (int chunk = group.first_chunk; chunk < end; ++chunk) rebuild_key_value(block, chunk);
      for (int chunk = end - 1; chunk >= group.first_chunk; --chunk) backward_chunk(block, chunk, slot);
    }
    end_visit();
    finish_gradient(block, slot);
  }

  void rebuild_key_value(int block, int chunk) {
    std::vector<Resource> reads = with_weights(block, {input(block, chunk)});
    if (saves_intermediates() && !settings_.activations_on_host)
      reads.push_back(intermediates(block, chunk, -1));
    tracker_.append({.kind = OperationKind::rebuild_key_value,
                     .lane = Lane::compute,
                     .block = block,
                     .chunk = chunk,
                     .weight_slot = slot_of(block),
                     .dependencies = {}},
                    reads, {{Kind::group_key_value}});
  }

  void backward_chunk(int block, int chunk, int gradient_slot) {
    const int slot = next_intermediate_slot();
    if (slot >= 0) {
      tracker_.append({.kind = OperationKind::load_intermediates,
                       .lane = Lane::h2d,
                       .block = block,
                       .chunk = chunk,
                       .intermediate_slot = slot,
                       .bytes = cost(block).intermediate_bytes_per_token * tokens(chunk),
                       .dependencies = {}},
                      {{Kind::saved_intermediates, block, chunk}}, {intermediates(block, chunk, slot)});
    }
    std::vector<Resource> writes{{Kind::residual_gradient, 0, chunk}, {Kind::gradient_slot, gradient_slot}};
    // The backward pass overwrites some of its intermediates with their gradients.
    if (saves_intermediates()) writes.push_back(intermediates(block, chunk, slot));
    tracker_.append({.kind = OperationKind::backward,
                     .lane = Lane::compute,
                     .block = block,
                     .chunk = chunk,
                     .weight_slot = slot_of(block),
                     .gradient_slot = gradient_slot,
                     .intermediate_slot = slot,
                     .flops = backward_flops(block, chunk),
                     .dependencies = {}},
                    with_weights(block, {input(block, chunk), {Kind::group_key_value}}), writes);
  }

  void embedding_backward() {
    const int slot = settings_.head_uses_embedding ? load_gradient(0) : clear_gradient(0);
    for (int chunk = 0; chunk < chunks_.num_chunks(); ++chunk) {
      tracker_.append({.kind = OperationKind::backward,
                       .lane = Lane::compute,
                       .block = 0,
                       .chunk = chunk,
                       .gradient_slot = slot,
                       .dependencies = {}},
                      {{Kind::residual_gradient, 0, chunk}}, {{Kind::gradient_slot, slot}});
    }
    finish_gradient(0, slot);
  }

  // --- gradients ---

  int next_gradient_slot() { return gradient_uses_++ % settings_.gradient_slots; }

  int clear_gradient(int block) {
    const int slot = next_gradient_slot();
    tracker_.append({.kind = OperationKind::clear_gradient,
                     .lane = Lane::compute,
                     .block = block,
                     .gradient_slot = slot,
                     .dependencies = {}},
                    {}, {{Kind::gradient_slot, slot}});
    return slot;
  }

  int load_gradient(int block) {
    const int slot = next_gradient_slot();
    tracker_.append(
        {.kind = OperationKind::load_gradient,
         .lane = Lane::h2d,
         .block = block,
         .gradient_slot = slot,
         .bytes = cost(block).gradient_bytes - kept_bytes(block),
         .dependencies = {}},
        {{Kind::host_gradient, host_gradient_slab(settings_, block)}, {Kind::device_gradient, block}},
        {{Kind::gradient_slot, slot}});
    return slot;
  }

  void finish_gradient(int block, int slot) {
    tracker_.append({.kind = OperationKind::gradient_norm,
                     .lane = Lane::compute,
                     .block = block,
                     .gradient_slot = slot,
                     .dependencies = {}},
                    {{Kind::gradient_slot, slot}}, {{Kind::norm_partial, block}});
    const bool shares_embedding = block == head_ && settings_.head_uses_embedding;
    const DeviceUpdate& device = settings_.device_update;
    std::vector<Resource> kept;
    if (device.kept(block) > 0) kept.push_back({Kind::device_gradient, block});
    if (shares_embedding && device.kept(0) > 0) kept.push_back({Kind::device_gradient, 0});
    if (!kept.empty()) {
      tracker_.append({.kind = OperationKind::keep_gradient,
                       .lane = Lane::compute,
                       .block = block,
                       .gradient_slot = slot,
                       .bytes = kept_bytes(block),
                       .dependencies = {}},
                      {{Kind::gradient_slot, slot}}, kept);
    }
    std::vector<Resource> sources{{Kind::gradient_slot, slot}, {Kind::norm_partial, block}};
    if (block == head_) sources.push_back({Kind::loss});
    std::vector<Resource> homes{{Kind::host_gradient, host_gradient_slab(settings_, block)},
                                {Kind::host_statistics, block}};
    if (shares_embedding) {
      homes.push_back({Kind::host_gradient, host_gradient_slab(settings_, 0)});
    }
    tracker_.append({.kind = OperationKind::emit_gradient,
                     .lane = Lane::d2h,
                     .block = block,
                     .gradient_slot = slot,
                     .bytes = cost(block).gradient_bytes - kept_bytes(block),
                     .dependencies = {}},
                    sources, homes);
    if (settings_.optimizer_update == OptimizerUpdate::immediate) update_hosts_share(block);
  }

  void verdict() {
    std::vector<Resource> reads;
    for (int block = 0; block < settings_.num_blocks; ++block)
      reads.push_back({Kind::host_statistics, block});
    tracker_.append({.kind = OperationKind::verdict, .lane = Lane::host, .dependencies = {}}, reads,
                    {{Kind::verdict}});
  }

  // --- costs ---

  /// What stays on the device of the gradient that a block's backward pass makes: a tied head's has the
  /// embedding's share in it.
  std::int64_t kept_bytes(int block) const {
    const bool shares_embedding = block == head_ && settings_.head_uses_embedding;
    const DeviceUpdate& device = settings_.device_update;
    return gradient_bytes_per_element * (device.kept(block) + (shares_embedding ? device.kept(0) : 0));
  }
  const BlockCost& cost(int block) const { return costs_[static_cast<std::size_t>(block)]; }
  std::int64_t tokens(int chunk) const { return chunks_.chunks[static_cast<std::size_t>(chunk)].num_tokens; }
  double attention_flops(int block, int chunk) const {
    return cost(block).attention_flops_per_pair *
           static_cast<double>(num_pairs(chunks_.chunks[static_cast<std::size_t>(chunk)]));
  }
  double forward_flops(int block, int chunk) const {
    return cost(block).forward_flops_per_token * static_cast<double>(tokens(chunk)) +
           attention_flops(block, chunk);
  }
  double backward_flops(int block, int chunk) const {
    const double gemms = cost(block).forward_flops_per_token * static_cast<double>(tokens(chunk));
    const double attention = attention_flops(block, chunk);
    // Twice the forward GEMMs, and what the policy computes again.
    const bool recomputes_gemms = settings_.activation_policy != ActivationPolicy::all;
    const bool recomputes_attention = settings_.activation_policy == ActivationPolicy::input;
    return (recomputes_gemms ? 3.0 : 2.0) * gemms + (recomputes_attention ? 3.5 : 2.5) * attention;
  }

  /// What a block's weights bring over the link: nothing of resident ones.
  std::int64_t fetch_bytes(int block) const {
    const DeviceUpdate& device = settings_.device_update;
    if (block == head_ && settings_.head_uses_embedding && device.is_resident(0)) {
      return device.is_resident(head_)
                 ? 0
                 : std::max<std::int64_t>(0, cost(head_).fetch_bytes - cost(0).fetch_bytes);
    }
    return device.is_resident(block) ? 0 : cost(block).fetch_bytes;
  }

  /// The part of a block's `bytes` that belongs to so many of its elements.
  std::int64_t share(std::int64_t bytes, int block, std::int64_t elements) const {
    return static_cast<std::int64_t>(static_cast<double>(bytes) * static_cast<double>(elements) /
                                     static_cast<double>(cost(block).num_elements));
  }

  int slot_of(int block) const { return slot_of_block_[static_cast<std::size_t>(block)]; }

  const ScheduleSettings& settings_;
  const ChunkPlan& chunks_;
  const std::vector<BlockCost>& costs_;
  int head_;
  Schedule schedule_;
  HazardTracker tracker_{schedule_};
  std::vector<int> visits_;  ///< blocks in the order in which their weights are used
  std::size_t visit_ = 0;
  std::deque<int> free_slots_;
  std::vector<int> slot_of_block_;
  int update_uses_ = 0;
  int next_update_block_ = 0;  ///< of the device's share
  int next_update_piece_ = 0;
  int intermediate_uses_ = 0;
  int gradient_uses_ = 0;
};

}  // namespace

std::string_view name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::update:
      return "update";
    case OperationKind::load_state:
      return "load_state";
    case OperationKind::update_on_device:
      return "update_on_device";
    case OperationKind::store_state:
      return "store_state";
    case OperationKind::fetch_weights:
      return "fetch_weights";
    case OperationKind::release_weights:
      return "release_weights";
    case OperationKind::forward:
      return "forward";
    case OperationKind::save_input:
      return "save_input";
    case OperationKind::save_intermediates:
      return "save_intermediates";
    case OperationKind::loss:
      return "loss";
    case OperationKind::loss_and_gradient:
      return "loss_and_gradient";
    case OperationKind::logits:
      return "logits";
    case OperationKind::load_input:
      return "load_input";
    case OperationKind::load_intermediates:
      return "load_intermediates";
    case OperationKind::clear_gradient:
      return "clear_gradient";
    case OperationKind::load_gradient:
      return "load_gradient";
    case OperationKind::rebuild_key_value:
      return "rebuild_key_value";
    case OperationKind::backward:
      return "backward";
    case OperationKind::gradient_norm:
      return "gradient_norm";
    case OperationKind::emit_gradient:
      return "emit_gradient";
    case OperationKind::keep_gradient:
      return "keep_gradient";
    case OperationKind::verdict:
      return "verdict";
  }
  return "?";
}

std::string Schedule::to_text() const {
  std::string text;
  for (std::size_t i = 0; i < operations.size(); ++i) {
    const Operation& operation = operations[i];
    text += fmt::format("{:>5} {:<10} {:<20}", i, name_of(operation.lane), name_of(operation.kind));
    if (operation.block >= 0) text += fmt::format(" block {}", operation.block);
    if (operation.chunk >= 0) text += fmt::format(" chunk {}", operation.chunk);
    if (operation.piece >= 0)
      text += fmt::format(" piece {} state@{}", operation.piece, operation.update_slot);
    if (operation.weight_slot >= 0) text += fmt::format(" weights@{}", operation.weight_slot);
    if (operation.gradient_slot >= 0) text += fmt::format(" gradient@{}", operation.gradient_slot);
    if (operation.intermediate_slot >= 0)
      text += fmt::format(" intermediates@{}", operation.intermediate_slot);
    if (!operation.dependencies.empty())
      text += fmt::format(" after {}", fmt::join(operation.dependencies, ", "));
    text += '\n';
  }
  return text;
}

int host_gradient_slab(const ScheduleSettings& settings, int block) {
  if (settings.optimizer_update == OptimizerUpdate::deferred) return block;
  if (block == 0 && settings.head_uses_embedding) return settings.host_gradient_ring;
  return (settings.num_blocks - 1 - block) % settings.host_gradient_ring;
}

int num_host_gradient_slabs(const ScheduleSettings& settings) {
  if (settings.optimizer_update == OptimizerUpdate::deferred) return settings.num_blocks;
  return settings.host_gradient_ring + (settings.head_uses_embedding ? 1 : 0);
}

Schedule build_schedule(const ScheduleSettings& settings, const ChunkPlan& chunks,
                        const std::vector<BlockCost>& costs) {
  return StepBuilder(settings, chunks, costs).build();
}

Schedule build_update_schedule(const ScheduleSettings& settings, const std::vector<BlockCost>& costs) {
  const ChunkPlan nothing;
  return StepBuilder(settings, nothing, costs).build_updates();
}

}  // namespace layerstream

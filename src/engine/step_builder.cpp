#include "engine/step_builder.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.hpp"

namespace layerstream {
namespace {

using Kind = Resource::Kind;

constexpr std::int64_t gradient_bytes_per_element = 4;

/// f(chunk) for the chunks of the groups, ascending.
template <class F>
void for_each_chunk(std::span<const ChunkGroup> groups, const F& f) {
  for (const ChunkGroup& group : groups) {
    for (int chunk = group.first_chunk; chunk < group.first_chunk + group.num_chunks; ++chunk) f(chunk);
  }
}

std::vector<AttentionPattern> patterns_of(const std::vector<BlockCost>& costs) {
  std::vector<AttentionPattern> patterns;
  for (const BlockCost& cost : costs) patterns.push_back(cost.attention_pattern);
  return patterns;
}

}  // namespace

StepBuilder::StepBuilder(const ScheduleSettings& settings, const ChunkPlan& chunks,
                         const std::vector<BlockCost>& costs)
    : settings_(settings),
      chunks_(chunks),
      costs_(costs),
      pairs_(chunks, patterns_of(costs)),
      head_(settings.num_blocks - 1),
      updates_(settings, costs, tracker_),
      slot_of_block_(static_cast<std::size_t>(settings.num_blocks), -1),
      gradient_slots_(static_cast<std::size_t>(settings.num_blocks), -1),
      gradient_started_(static_cast<std::size_t>(settings.num_blocks), false) {
  LAYERSTREAM_EXPECT(
      settings.num_blocks >= 3 && costs.size() == static_cast<std::size_t>(settings.num_blocks),
      "{} blocks, {} costs", settings.num_blocks, costs.size());
  LAYERSTREAM_EXPECT((settings.weight_slots >= 1 || settings.num_streamed_blocks() == 0) &&
                         settings.gradient_slots >= 1 && settings.intermediate_slots >= 1,
                     "at least one slot of each kind");
  for (int slot = 0; slot < settings.weight_slots; ++slot) free_slots_.push_back(slot);
}

Schedule StepBuilder::build() {
  plan_visits();
  if (settings_.load_resident) updates_.move_resident(OperationKind::load_state, Lane::h2d);
  if (settings_.pending_update) updates_.hosts_shares();
  const Groups groups(chunks_.groups);
  if (settings_.loop_order == LoopOrder::layer_major) {
    pass(groups);
  } else {
    for (std::size_t group = 0; group < groups.size(); ++group) pass(groups.subspan(group, 1));
  }
  if (settings_.train) {
    // Once for all chunks: a tied head has added to the same sums before.
    embedding_backward();
    verdict();
  }
  return std::move(schedule_);
}

Schedule StepBuilder::build_updates() {
  if (settings_.load_resident) updates_.move_resident(OperationKind::load_state, Lane::h2d);
  if (settings_.pending_update) {
    updates_.hosts_shares();
    updates_.devices_shares(head_);
  }
  updates_.move_resident(OperationKind::store_state, Lane::update_out);
  return std::move(schedule_);
}

void StepBuilder::pass(Groups groups) {
  for (int block = 0; block < head_; ++block) forward(block, groups);
  if (!settings_.train) return head_forward(groups);
  head_step(groups);
  for (int block = head_ - 1; block >= settings_.first_backward(); --block) backward(block, groups);
}

// --- weights ---

void StepBuilder::plan_visits() {
  const std::size_t passes = settings_.loop_order == LoopOrder::layer_major ? 1 : chunks_.groups.size();
  for (std::size_t pass = 0; pass < passes; ++pass) {
    for (int block = 0; block <= head_; ++block) visits_.push_back(block);
    if (!settings_.train) continue;
    for (int block = head_ - 1; block >= settings_.first_backward(); --block) visits_.push_back(block);
  }
}

void StepBuilder::fetch_ahead() {
  const int visited = visits_[visit_];
  if (settings_.pending_update) updates_.devices_shares(visited);
  for (std::size_t visit = visit_; visit < visits_.size() && !free_slots_.empty(); ++visit) {
    const int block = visits_[visit];
    if (is_streamed(block) && slot_of(block) < 0) fetch(block);
  }
  LAYERSTREAM_EXPECT(!is_streamed(visited) || slot_of(visited) >= 0, "no slot for block {}", visited);
  reads_ = weights_at_home(visited);
  if (is_streamed(visited)) reads_.push_back({Kind::weight_slot, slot_of(visited)});
  num_weights_ = reads_.size();
}

void StepBuilder::fetch(int block) {
  if (settings_.pending_update) updates_.devices_shares(block);
  const int slot = free_slots_.front();
  free_slots_.pop_front();
  slot_of_block_[static_cast<std::size_t>(block)] = slot;
  tracker_.append({.kind = OperationKind::fetch_weights,
                   .lane = settings_.fetch_lane,
                   .block = block,
                   .weight_slot = slot,
                   .bytes = fetch_bytes(block),
                   .dependencies = {}},
                  weights_at_home(block), {{Kind::weight_slot, slot}});
}

void StepBuilder::end_visit() {
  const int block = visits_[visit_];
  ++visit_;
  if (!is_streamed(block)) return;
  std::set<int> in_use{block};
  for (std::size_t visit = visit_; visit < visits_.size(); ++visit) {
    if (visits_[visit] == block) return;
    if (is_streamed(visits_[visit])) in_use.insert(visits_[visit]);
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
std::vector<Resource> StepBuilder::weights_at_home(int block) const {
  std::vector<Resource> resources;
  const auto add = [&](int home) {
    if (is_streamed(home)) resources.push_back({Kind::host_weights, home, StatePart::of_host});
    for (int piece = 0; piece < settings_.device_update.num_pieces(home); ++piece) {
      resources.push_back({Kind::host_weights, home, StatePart::of_piece(piece)});
    }
  };
  add(block);
  if (block == head_ && settings_.head_uses_embedding) add(0);
  return resources;
}

const std::vector<Resource>& StepBuilder::with_weights(std::initializer_list<Resource> others) {
  reads_.resize(num_weights_);
  reads_.insert(reads_.end(), others);
  return reads_;
}

/// What a block's weights bring over the link: nothing of resident ones.
std::int64_t StepBuilder::fetch_bytes(int block) const {
  if (block == head_ && settings_.head_uses_embedding && !is_streamed(0)) {
    return std::max<std::int64_t>(0, cost(head_).fetch_bytes - cost(0).fetch_bytes);
  }
  return cost(block).fetch_bytes;
}

// --- activations ---

Resource StepBuilder::input(int block, int chunk) const {
  return {Kind::input, settings_.input_buffer(block), input_place(chunk)};
}

/// Intermediates on the device: a ring when they go to the host, else a place of their own.
Resource StepBuilder::intermediates(int block, int chunk, int slot) const {
  if (!settings_.activations_on_device(block)) return {Kind::intermediate_slot, slot};
  return {Kind::intermediates, block, settings_.intermediate_place(chunks_, chunk)};
}

Resource StepBuilder::saved_intermediates(int block, int chunk) const {
  return {Kind::saved_intermediates, block, settings_.intermediate_place(chunks_, chunk)};
}

int StepBuilder::next_intermediate_slot(int block, int chunk) {
  if (!keeps_intermediates(block, chunk) || settings_.activations_on_device(block)) return -1;
  return intermediate_uses_++ % settings_.intermediate_slots;
}

void StepBuilder::save_input(int block, int chunk) {
  if (!settings_.input_leaves(block)) return;
  tracker_.append({.kind = OperationKind::save_input,
                   .lane = Lane::d2h,
                   .block = block,
                   .chunk = chunk,
                   .bytes = cost(block).input_bytes_per_token * tokens(chunk),
                   .dependencies = {}},
                  {input(block, chunk)}, {{Kind::saved_input, block, input_place(chunk)}});
}

void StepBuilder::load_input(int block, int chunk) {
  if (!settings_.input_leaves(block)) return;
  tracker_.append({.kind = OperationKind::load_input,
                   .lane = Lane::h2d,
                   .block = block,
                   .chunk = chunk,
                   .bytes = cost(block).input_bytes_per_token * tokens(chunk),
                   .dependencies = {}},
                  {{Kind::saved_input, block, input_place(chunk)}}, {input(block, chunk)});
}

// --- passes ---

/// @param gemms_per_token FLOPs @param attention how often that of the forward pass is done
void StepBuilder::add_flops(Operation& operation, double gemms_per_token, double attention) const {
  const BlockCost& own = cost(operation.block);
  const Chunk& chunk = chunks_.chunks[static_cast<std::size_t>(operation.chunk)];
  const auto pairs = static_cast<double>(pairs_.of(operation.block, operation.chunk));
  operation.attention_flops = attention * own.attention_flops_per_pair * pairs;
  operation.flops = gemms_per_token * static_cast<double>(chunk.num_tokens) + operation.attention_flops;
}

void StepBuilder::forward(int block, Groups groups) {
  fetch_ahead();
  for_each_chunk(groups, [&](int chunk) {
    const int slot = block == 0 ? -1 : next_intermediate_slot(block, chunk);
    std::vector<Resource> writes{input(block + 1, chunk)};
    if (block > 0) {
      writes.push_back({Kind::group_key_value});
      if (keeps_intermediates(block, chunk)) writes.push_back(intermediates(block, chunk, slot));
    }
    Operation operation{.kind = OperationKind::forward,
                        .lane = Lane::compute,
                        .block = block,
                        .chunk = chunk,
                        .weight_slot = slot_of(block),
                        .intermediate_slot = slot,
                        .dependencies = {}};
    add_flops(operation, cost(block).forward_flops_per_token, 1.0);
    tracker_.append(std::move(operation), block > 0 ? with_weights({input(block, chunk)}) : with_weights({}),
                    writes);
    save_input(block + 1, chunk);
    if (slot >= 0 && settings_.train) {
      tracker_.append({.kind = OperationKind::save_intermediates,
                       .lane = Lane::d2h,
                       .block = block,
                       .chunk = chunk,
                       .intermediate_slot = slot,
                       .bytes = cost(block).intermediate_bytes_per_token * tokens(chunk),
                       .dependencies = {}},
                      {intermediates(block, chunk, slot)}, {saved_intermediates(block, chunk)});
    }
  });
  end_visit();
}

void StepBuilder::head_forward(Groups groups) {
  fetch_ahead();
  for_each_chunk(groups, [&](int chunk) {
    Operation operation{.kind = settings_.logits_only ? OperationKind::logits : OperationKind::loss,
                        .lane = Lane::compute,
                        .block = head_,
                        .chunk = chunk,
                        .weight_slot = slot_of(head_),
                        .dependencies = {}};
    add_flops(operation, cost(head_).forward_flops_per_token, 0.0);
    tracker_.append(std::move(operation), with_weights({input(head_, chunk)}), {{Kind::loss}});
  });
  end_visit();
}

void StepBuilder::head_step(Groups groups) {
  fetch_ahead();
  if (is_first(groups)) {
    if (!settings_.is_frozen(head_)) clear_gradient(head_);
    if (settings_.head_adds_to_embedding()) clear_gradient(0);
  }
  for_each_chunk(groups, [&](int chunk) {
    Operation operation{.kind = OperationKind::loss_and_gradient,
                        .lane = Lane::compute,
                        .block = head_,
                        .chunk = chunk,
                        .weight_slot = slot_of(head_),
                        .gradient_slot = gradient_slot(head_),
                        .starts_gradient = starts_gradient(head_),
                        .dependencies = {}};
    add_flops(operation, (head_has_matrix_gradient() ? 3.0 : 2.0) * cost(head_).forward_flops_per_token, 0.0);
    std::vector<Resource> writes = head_gradients();
    writes.push_back({Kind::loss});
    writes.push_back({Kind::residual_gradient, 0, chunk});
    tracker_.append(std::move(operation), with_weights({input(head_, chunk)}), writes);
  });
  end_visit();
  if (is_last(groups)) finish_gradient(head_);
}

void StepBuilder::backward(int block, Groups groups) {
  fetch_ahead();
  if (is_first(groups) && !settings_.is_frozen(block)) clear_gradient(block);
  for (const ChunkGroup& group : groups) {
    const int end = group.first_chunk + group.num_chunks;
    for (int chunk = group.first_chunk; chunk < end; ++chunk) load_input(block, chunk);
    for (int chunk = group.first_chunk; chunk < end; ++chunk) rebuild_key_value(block, chunk);
    for (int chunk = end - 1; chunk >= group.first_chunk; --chunk) backward_chunk(block, chunk);
  }
  end_visit();
  if (is_last(groups)) finish_gradient(block);
}

void StepBuilder::rebuild_key_value(int block, int chunk) {
  const bool reads_intermediates =
      keeps_intermediates(block, chunk) && settings_.activations_on_device(block);
  tracker_.append({.kind = OperationKind::rebuild_key_value,
                   .lane = Lane::compute,
                   .block = block,
                   .chunk = chunk,
                   .weight_slot = slot_of(block),
                   .dependencies = {}},
                  reads_intermediates ? with_weights({input(block, chunk), intermediates(block, chunk, -1)})
                                      : with_weights({input(block, chunk)}),
                  {{Kind::group_key_value}});
}

void StepBuilder::backward_chunk(int block, int chunk) {
  const int slot = next_intermediate_slot(block, chunk);
  if (slot >= 0) {
    tracker_.append({.kind = OperationKind::load_intermediates,
                     .lane = Lane::h2d,
                     .block = block,
                     .chunk = chunk,
                     .intermediate_slot = slot,
                     .bytes = cost(block).intermediate_bytes_per_token * tokens(chunk),
                     .dependencies = {}},
                    {saved_intermediates(block, chunk)}, {intermediates(block, chunk, slot)});
  }
  std::vector<Resource> writes{{Kind::residual_gradient, 0, chunk}};
  if (!settings_.is_frozen(block)) writes.push_back(gradient(block));
  // The backward pass overwrites some of its intermediates with their gradients.
  if (keeps_intermediates(block, chunk)) writes.push_back(intermediates(block, chunk, slot));
  Operation operation{.kind = OperationKind::backward,
                      .lane = Lane::compute,
                      .block = block,
                      .chunk = chunk,
                      .weight_slot = slot_of(block),
                      .gradient_slot = gradient_slot(block),
                      .intermediate_slot = slot,
                      .starts_gradient = starts_gradient(block),
                      .dependencies = {}};
  // Twice the forward GEMMs, once in a frozen block, and 2.5 times its attention, and what the policy
  // computes again.
  const ActivationPolicy kept = policy(block, chunk);
  const double again = kept == ActivationPolicy::all ? 0.0 : cost(block).recomputed_flops_per_token;
  add_flops(operation, (settings_.is_frozen(block) ? 1.0 : 2.0) * cost(block).forward_flops_per_token + again,
            kept == ActivationPolicy::input ? 3.5 : 2.5);
  tracker_.append(std::move(operation), with_weights({input(block, chunk), {Kind::group_key_value}}), writes);
}

void StepBuilder::embedding_backward() {
  if (settings_.is_frozen(0)) return;
  if (settings_.head_carries_embedding()) {
    load_gradient(0);
  } else if (!settings_.head_uses_embedding) {
    clear_gradient(0);
  }
  for_each_chunk(chunks_.groups, [&](int chunk) {
    tracker_.append({.kind = OperationKind::backward,
                     .lane = Lane::compute,
                     .block = 0,
                     .chunk = chunk,
                     .gradient_slot = gradient_slot(0),
                     .dependencies = {}},
                    {{Kind::residual_gradient, 0, chunk}}, {gradient(0)});
  });
  finish_gradient(0);
}

// --- gradients ---

Resource StepBuilder::gradient(int block) const {
  if (settings_.has_own_gradient_buffer(block)) return {Kind::device_gradient, block};
  return {Kind::gradient_slot, gradient_slot(block)};
}

std::vector<Resource> StepBuilder::head_gradients() const {
  std::vector<Resource> gradients;
  if (!settings_.is_frozen(head_)) gradients.push_back(gradient(head_));
  if (settings_.head_adds_to_embedding()) gradients.push_back(gradient(0));
  return gradients;
}

void StepBuilder::take_gradient_slot(int block) {
  if (settings_.has_own_gradient_buffer(block)) return;
  gradient_slots_[static_cast<std::size_t>(block)] = gradient_uses_++ % settings_.gradient_slots;
}

bool StepBuilder::starts_gradient(int block) {
  const auto index = static_cast<std::size_t>(block);
  const bool starts = !gradient_started_[index];
  gradient_started_[index] = true;
  return starts;
}

void StepBuilder::clear_gradient(int block) {
  take_gradient_slot(block);
  tracker_.append({.kind = OperationKind::clear_gradient,
                   .lane = Lane::compute,
                   .block = block,
                   .gradient_slot = gradient_slot(block),
                   .dependencies = {}},
                  {}, {gradient(block)});
}

void StepBuilder::load_gradient(int block) {
  take_gradient_slot(block);
  tracker_.append(
      {.kind = OperationKind::load_gradient,
       .lane = Lane::h2d,
       .block = block,
       .gradient_slot = gradient_slot(block),
       .bytes = cost(block).gradient_bytes - kept_bytes(block),
       .dependencies = {}},
      {{Kind::host_gradient, host_gradient_slab(settings_, block)}, {Kind::device_gradient, block}},
      {gradient(block)});
}

bool StepBuilder::head_has_matrix_gradient() const {
  return settings_.head_uses_embedding ? !settings_.is_frozen(0) : !settings_.is_frozen(head_);
}

/// The loss comes to the host with the head's gradient; by itself if there is none.
void StepBuilder::emit_loss() {
  tracker_.append(
      {.kind = OperationKind::emit_gradient, .lane = Lane::d2h, .block = head_, .dependencies = {}},
      {{Kind::loss}}, {{Kind::host_statistics, head_}});
}

void StepBuilder::finish_gradient(int block) {
  if (settings_.is_frozen(block)) {
    if (block == head_) emit_loss();
    return;
  }
  const int slot = gradient_slot(block);
  tracker_.append({.kind = OperationKind::gradient_norm,
                   .lane = Lane::compute,
                   .block = block,
                   .gradient_slot = slot,
                   .dependencies = {}},
                  {}, {gradient(block), {Kind::norm_partial, block}});
  const DeviceUpdate& device = settings_.device_update;
  if (!settings_.has_own_gradient_buffer(block)) {
    std::vector<Resource> kept;
    if (device.kept(block) > 0) kept.push_back({Kind::device_gradient, block});
    if (carries_embedding(block) && device.kept(0) > 0) kept.push_back({Kind::device_gradient, 0});
    if (!kept.empty()) {
      tracker_.append({.kind = OperationKind::keep_gradient,
                       .lane = Lane::compute,
                       .block = block,
                       .gradient_slot = slot,
                       .bytes = kept_bytes(block),
                       .dependencies = {}},
                      {gradient(block)}, kept);
    }
  }
  std::vector<Resource> sources{gradient(block), {Kind::norm_partial, block}};
  if (block == head_) sources.push_back({Kind::loss});
  std::vector<Resource> homes{{Kind::host_gradient, host_gradient_slab(settings_, block)},
                              {Kind::host_statistics, block}};
  if (carries_embedding(block)) homes.push_back({Kind::host_gradient, host_gradient_slab(settings_, 0)});
  tracker_.append({.kind = OperationKind::emit_gradient,
                   .lane = Lane::d2h,
                   .block = block,
                   .gradient_slot = slot,
                   .bytes = emitted_bytes(block),
                   .dependencies = {}},
                  sources, homes);
  if (settings_.optimizer_update == OptimizerUpdate::immediate) updates_.hosts_share(block);
}

void StepBuilder::verdict() {
  std::vector<Resource> reads;
  for (int block = 0; block < settings_.num_blocks; ++block) reads.push_back({Kind::host_statistics, block});
  tracker_.append({.kind = OperationKind::verdict, .lane = Lane::host, .dependencies = {}}, reads,
                  {{Kind::verdict}});
}

/// What of a block's gradient goes to the host; of used rows at most one for each token.
std::int64_t StepBuilder::emitted_bytes(int block) const {
  const std::int64_t all = cost(block).gradient_bytes - kept_bytes(block);
  if (block != 0 || !settings_.emits_embedding_rows()) return all;
  return std::min(all, cost(block).gradient_row_bytes * chunks_.num_tokens());
}

/// What stays on the device of the gradient that a block's backward pass makes.
std::int64_t StepBuilder::kept_bytes(int block) const {
  const DeviceUpdate& device = settings_.device_update;
  return gradient_bytes_per_element * (device.kept(block) + (carries_embedding(block) ? device.kept(0) : 0));
}

}  // namespace layerstream

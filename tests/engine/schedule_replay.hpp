#pragma once

#include <fmt/format.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "schedule_checker.hpp"

namespace layerstream::test {

/// Follows what lies in each buffer through the list of operations, and stops at the first operation that
/// does not find what it needs. Where `find_race` finds nothing every possible execution has the same result.
class StepReplay {
 public:
  StepReplay(const Schedule& schedule, const ScheduleSettings& settings, const ChunkPlan& chunks,
             const std::vector<BlockCost>& costs)
      : schedule_(schedule),
        settings_(settings),
        chunks_(chunks),
        costs_(costs),
        head_(settings.num_blocks - 1) {
    const auto num_blocks = static_cast<std::size_t>(settings.num_blocks);
    versions_.assign(num_blocks, 0);
    updated_parts_.resize(num_blocks);
    emits_.assign(num_blocks, 0);
    if (!settings.pending_update) return;
    for (int block = 0; block <= head_; ++block) {
      put(host_home(block), block, true, host_readers(block));
      put(device_home(block), block, true, device_readers(block));
      host_home(block).of_this_step = device_home(block).of_this_step = false;
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
  /// A gradient, or a part of one, where it waits for its update.
  struct WaitingGradient {
    int block = -1;
    bool complete = false;  // else the head's share of a tied matrix
    bool of_this_step = true;
    std::set<int> readers = {};  // parts of the block's state whose update has not read it yet
  };
  struct PieceInSlot {
    int block, piece;
    bool updated;
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
  bool saves(const Operation& operation) const {
    const ChunkGroup& group = chunks_.group_of(operation.chunk);
    return settings_.activation_policy != ActivationPolicy::input &&
           operation.block >= head_ - settings_.activation_blocks &&
           operation.chunk >= group.first_chunk + group.num_chunks - settings_.activation_chunks;
  }
  bool immediate() const { return settings_.optimizer_update == OptimizerUpdate::immediate; }

  // --- gradients that wait, and the parts of a block's state that they are for ---

  static constexpr int host_part = -1;  // other parts are the device's pieces, from 0
  std::set<int> pieces(int block) const {
    std::set<int> all;
    for (int piece = 0; piece < settings_.device_update.num_pieces(block); ++piece) all.insert(piece);
    return all;
  }
  bool host_has_part(int block) const {
    return settings_.device_update.of(block) < costs_[static_cast<std::size_t>(block)].num_elements;
  }
  std::set<int> parts(int block) const {
    std::set<int> all = pieces(block);
    if (host_has_part(block)) all.insert(host_part);
    return all;
  }
  std::set<int> host_readers(int block) const {
    if (settings_.device_update.kept(block) == 0) return parts(block);
    return host_has_part(block) ? std::set<int>{host_part} : std::set<int>{};
  }
  std::set<int> device_readers(int block) const {
    return settings_.device_update.kept(block) > 0 ? pieces(block) : std::set<int>{};
  }
  WaitingGradient& host_home(int block) { return host_gradients_[host_gradient_slab(settings_, block)]; }
  WaitingGradient& device_home(int block) { return kept_gradients_[block]; }

  void put(WaitingGradient& home, int block, bool complete, const std::set<int>& readers) {
    if (readers.empty()) return;  // nothing of it goes there
    const bool replaces_share = complete && home.block == block && !home.complete;
    expect(home.block < 0 || replaces_share, "its home holds a gradient that waits for its update");
    home = {.block = block, .complete = complete, .of_this_step = true, .readers = readers};
  }
  void take(WaitingGradient& home, int block, int part) {
    expect(home.block == block && home.complete && home.of_this_step == immediate(),
           "the gradient's home holds another one");
    expect(home.readers.erase(part) == 1, "this part read its gradient before");
    if (home.readers.empty()) home = {};
  }
  void finish_part(int block, int part) {
    expect(updated_parts_[static_cast<std::size_t>(block)].insert(part).second, "it was updated before");
    ++versions_[static_cast<std::size_t>(block)];
  }
  bool is_updated(int block) const { return updated_parts_[static_cast<std::size_t>(block)] == parts(block); }

  int input_buffer(int block) const { return test::input_buffer(settings_, block); }
  SlotContent current(int block) const {
    return {block, versions_[static_cast<std::size_t>(block)], block == head_ && tied() ? versions_[0] : 0};
  }

  void expect_weights(const Operation& operation) {
    if (settings_.device_update.is_resident(operation.block)) {
      expect(operation.weight_slot == -1, "resident weights in a slot");
      expect_ready(operation.block);
      return;
    }
    const auto slot = slots_.find(operation.weight_slot);
    expect(slot != slots_.end() && slot->second == current(operation.block), "the slot holds other weights");
  }
  void expect_input(const Operation& operation) {
    const auto found = inputs_.find({input_buffer(operation.block), in_buffer(operation.chunk)});
    expect(found != inputs_.end() && found->second == std::pair(operation.block, operation.chunk),
           "the input is not there");
  }
  int in_buffer(int chunk) const {
    if (settings_.loop_order == LoopOrder::layer_major) return chunk;
    return chunk - chunks_.groups[static_cast<std::size_t>(group_of(chunk))].first_chunk;
  }
  int in_kept_buffer(int chunk) const {
    if (settings_.loop_order == LoopOrder::layer_major) return chunk;
    return in_buffer(chunk) - std::max(0, chunks_.group_of(chunk).num_chunks - settings_.activation_chunks);
  }
  int group_of(int chunk) const { return chunks_.chunks[static_cast<std::size_t>(chunk)].group; }

  void write_intermediates(const Operation& operation) {
    if (!saves(operation)) return;
    if (!keeps_on_device(settings_, operation.block)) {
      expect(operation.intermediate_slot >= 0 && operation.intermediate_slot < settings_.intermediate_slots,
             "no intermediate slot");
      ring_[operation.intermediate_slot] = {operation.block, operation.chunk};
    } else {
      resident_[{operation.block, in_kept_buffer(operation.chunk)}] = operation.chunk;
    }
  }
  void take_intermediates(const Operation& operation) {
    if (!saves(operation)) return;
    const std::pair key{operation.block, operation.chunk};
    if (!keeps_on_device(settings_, operation.block)) {
      const auto found = ring_.find(operation.intermediate_slot);
      expect(found != ring_.end() && found->second == key, "the ring holds other intermediates");
      ring_.erase(operation.intermediate_slot);  // overwritten with gradients
    } else {
      const auto found = resident_.find({operation.block, in_kept_buffer(operation.chunk)});
      expect(found != resident_.end() && found->second == operation.chunk, "the intermediates are not there");
      if (found != resident_.end()) resident_.erase(found);
    }
  }
  /// Where the operation's gradient grows: a buffer of the ring, or one of the block's own.
  GradientContent& buffer_of(const Operation& operation) {
    const bool own = settings_.loop_order == LoopOrder::micro_batch_major ||
                     settings_.device_update.is_resident(operation.block);
    expect(own ? operation.gradient_slot == -1
               : operation.gradient_slot >= 0 && operation.gradient_slot < settings_.gradient_slots,
           "no such gradient buffer");
    return own ? own_gradients_[operation.block] : gradients_[operation.gradient_slot];
  }
  GradientContent& gradient_of(const Operation& operation) {
    GradientContent& content = buffer_of(operation);
    expect(content.block == operation.block, "the gradient slot belongs to another block");
    return content;
  }
  void add_gradient(const Operation& operation) {
    GradientContent& content = gradient_of(operation);
    expect(!content.normed, "the gradient was finished");
    expect(operation.starts_gradient == (operation.block > 0 && content.chunks.empty()),
           "the first product writes, the others add");
    expect(content.chunks.insert(operation.chunk).second, "the chunk's gradient was added before");
  }

  void step(const Operation& operation) {
    const int b = operation.block;
    const int c = operation.chunk;
    const auto block = static_cast<std::size_t>(b);
    switch (operation.kind) {
      case OperationKind::update:
        expect(host_has_part(b), "nothing of it is the host's");
        take(host_home(b), b, host_part);
        finish_part(b, host_part);
        break;
      case OperationKind::load_state:
        if (settings_.device_update.is_resident(b)) {
          expect(operation.update_slot == -1 && operation.piece == 0, "resident state is no piece in a slot");
          expect(settings_.load_resident && resident_state_.insert(b).second, "it is on the device already");
          break;
        }
        expect(operation.update_slot >= 0 && operation.update_slot < settings_.device_update.slots,
               "no such slot");
        expect(pieces(b).contains(operation.piece), "no such piece");
        if (settings_.device_update.kept(b) == 0) take(host_home(b), b, operation.piece);
        expect(update_slots_.emplace(operation.update_slot, PieceInSlot{b, operation.piece, false}).second,
               "the slot holds a piece that has not left");
        break;
      case OperationKind::update_on_device: {
        if (settings_.device_update.is_resident(b)) {
          expect_resident(b);
          take(device_home(b), b, 0);
          finish_part(b, 0);
          break;
        }
        PieceInSlot& content = piece_of(operation);
        expect(!content.updated, "the piece was updated before");
        if (settings_.device_update.kept(b) > 0) take(device_home(b), b, operation.piece);
        content.updated = true;
        break;
      }
      case OperationKind::store_state:
        expect(!settings_.device_update.is_resident(b), "a step leaves resident state where it is");
        expect(piece_of(operation).updated, "its update is missing");
        update_slots_.erase(operation.update_slot);
        finish_part(b, operation.piece);
        break;
      case OperationKind::fetch_weights:
        expect(!slots_.contains(operation.weight_slot), "the slot is in use");
        expect(operation.weight_slot >= 0 && operation.weight_slot < settings_.weight_slots, "no such slot");
        expect(!settings_.device_update.is_resident(b), "it lives on the device");
        expect_ready(b);
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
        inputs_[{input_buffer(b + 1), in_buffer(c)}] = {b + 1, c};
        break;
      case OperationKind::save_input:
        expect_input(operation);
        saved_inputs_[{b, in_buffer(c)}] = c;
        break;
      case OperationKind::load_input:
        expect(saved_inputs_.contains({b, in_buffer(c)}) && saved_inputs_[{b, in_buffer(c)}] == c,
               "nothing was saved");
        inputs_[{input_buffer(b), in_buffer(c)}] = {b, c};
        break;
      case OperationKind::save_intermediates: {
        const auto found = ring_.find(operation.intermediate_slot);
        expect(found != ring_.end() && found->second == std::pair(b, c),
               "the ring holds other intermediates");
        saved_intermediates_[{b, in_kept_buffer(c)}] = c;
        break;
      }
      case OperationKind::load_intermediates:
        expect(saved_intermediates_.contains({b, in_kept_buffer(c)}) &&
                   saved_intermediates_[{b, in_kept_buffer(c)}] == c,
               "nothing was saved");
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
        if (tied() && settings_.head_adds_to_embedding()) {
          GradientContent& embedding = own_gradients_[0];
          expect(embedding.block == 0 && embedding.chunks.empty(), "the embedding's gradient is not clear");
          embedding.has_share_of_head = true;
        }
        stream_gradient_[c] = head_;
        break;
      case OperationKind::clear_gradient:
        expect(buffer_of(operation).block < 0, "the buffer holds a gradient that has not left");
        if (operation.gradient_slot < 0) {
          expect(device_home(b).block < 0, "the buffer holds a gradient that waits for its update");
        }
        buffer_of(operation) = {.block = b, .chunks = {}};
        break;
      case OperationKind::load_gradient: {
        const auto has_share = [&](const WaitingGradient& home) {
          return home.block == b && !home.complete && home.of_this_step;
        };
        expect(buffer_of(operation).block < 0, "the buffer holds a gradient that has not left");
        expect(host_readers(b).empty() || has_share(host_home(b)), "the head's share is not there");
        expect(device_readers(b).empty() || has_share(device_home(b)), "the head's share was not kept");
        buffer_of(operation) = {.block = b, .has_share_of_head = true, .chunks = {}};
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
        put(host_home(b), b, true, host_readers(b));
        if (carries_embedding(b)) put(host_home(0), 0, false, host_readers(0));
        if (operation.gradient_slot < 0) put(device_home(b), b, true, device_readers(b));
        buffer_of(operation) = {};
        ++emits_[block];
        break;
      case OperationKind::keep_gradient:
        expect(gradient_of(operation).normed, "the gradient is not finished");
        expect(operation.gradient_slot >= 0, "it stays where it grew");
        put(device_home(b), b, true, device_readers(b));
        if (carries_embedding(b)) put(device_home(0), 0, false, device_readers(0));
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

  void finish() {
    index_ = static_cast<int>(schedule_.operations.size()) - 1;
    expect(slots_.empty(), "a slot is not released at the end");
    expect(static_cast<int>(losses_.size()) == chunks_.num_chunks(), "the loss of a chunk is missing");
    for (int block = 0; block < settings_.device_update.resident_blocks; ++block) {
      expect(resident_state_.contains(block) == settings_.load_resident,
             "resident state was not loaded once");
    }
    expect(update_slots_.empty(), "a piece has not left its slot");
    const bool updates = settings_.pending_update || (immediate() && settings_.train);
    for (int block = 0; block <= head_; ++block) {
      expect(updates ? is_updated(block) : updated_parts_[static_cast<std::size_t>(block)].empty(),
             "a block was not updated once");
    }
    for (const int count : emits_) expect(count == (settings_.train ? 1 : 0), "a block did not emit once");
    for (const auto& [chunk, block] : stream_gradient_)
      expect(block == 0, "the backward pass is not complete");
    if (settings_.train) {
      expect(schedule_.operations.back().kind == OperationKind::verdict, "no verdict");
      for (int block = 0; block <= head_; ++block) {
        expect_waiting(host_home(block), block, host_readers(block));
        expect_waiting(device_home(block), block, device_readers(block));
      }
    }
  }

  /// What the step leaves for its deferred update.
  void expect_waiting(const WaitingGradient& home, int block, const std::set<int>& readers) {
    if (immediate() || readers.empty()) {
      expect(home.block < 0, "a gradient waits that nothing will read");
    } else {
      expect(home.block == block && home.complete && home.of_this_step && home.readers == readers,
             "the gradients that wait are not this step's");
    }
  }
  bool carries_embedding(int block) const {
    return block == head_ && tied() && !settings_.head_adds_to_embedding();
  }
  /// The block's weights are those of this step, where they live.
  void expect_ready(int block) {
    const bool with_embedding = block == head_ && tied();
    if (settings_.pending_update) {
      expect(is_updated(block) && (!with_embedding || is_updated(0)), "its update is still waiting");
    }
    expect_resident(block);
    if (with_embedding) expect_resident(0);
  }
  void expect_resident(int block) {
    if (!settings_.device_update.is_resident(block)) return;
    expect(!settings_.load_resident || resident_state_.contains(block), "its state is still on the host");
  }
  PieceInSlot& piece_of(const Operation& operation) {
    PieceInSlot& content =
        update_slots_.emplace(operation.update_slot, PieceInSlot{-1, -1, false}).first->second;
    expect(content.block == operation.block && content.piece == operation.piece,
           "the slot holds another piece");
    return content;
  }

  const Schedule& schedule_;
  const ScheduleSettings& settings_;
  const ChunkPlan& chunks_;
  const std::vector<BlockCost>& costs_;
  int head_;
  int index_ = 0;
  std::string problem_;
  int num_fetches_ = 0;
  std::vector<int> versions_, emits_;
  std::vector<std::set<int>> updated_parts_;  // by block
  std::map<int, SlotContent> slots_;
  std::map<std::pair<int, int>, std::pair<int, int>> inputs_;  // (buffer, place) → (block, chunk)
  std::map<std::pair<int, int>, int> saved_inputs_, saved_intermediates_,
      resident_;  // (block, place) → chunk
  std::map<int, std::pair<int, int>> ring_;
  KeyValues key_values_;
  std::map<int, int> stream_gradient_;             // chunk → the block whose input's gradient it is
  std::map<int, GradientContent> gradients_;       // by slot
  std::map<int, GradientContent> own_gradients_;   // by block
  std::map<int, WaitingGradient> host_gradients_;  // by slab
  std::map<int, WaitingGradient> kept_gradients_;  // by block
  std::map<int, PieceInSlot> update_slots_;
  std::set<int> resident_state_;  // blocks whose state was loaded to where it lives
  std::set<int> losses_;
};

}  // namespace layerstream::test

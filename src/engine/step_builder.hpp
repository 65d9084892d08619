#pragma once

#include <cstddef>
#include <deque>
#include <initializer_list>
#include <span>
#include <vector>

#include "engine/chunk_pairs.hpp"
#include "engine/hazards.hpp"
#include "engine/schedule.hpp"
#include "engine/update_operations.hpp"

namespace layerstream {

/// Makes the list of operations of a step: what follows what here is what the lanes do in that order.
class StepBuilder {
 public:
  /// All arguments outlive the builder.
  StepBuilder(const ScheduleSettings& settings, const ChunkPlan& chunks, const std::vector<BlockCost>& costs);

  Schedule build();
  /// The waiting updates, and the resident blocks' state to the host.
  Schedule build_updates();

 private:
  /// Groups of chunks that go through the blocks together: all, or a micro-batch.
  using Groups = std::span<const ChunkGroup>;

  /// Through all blocks, and back when training.
  void pass(Groups groups);

  // --- weights ---
  void plan_visits();
  bool is_streamed(int block) const { return !settings_.device_update.is_resident(block); }
  /// Brings the block that is visited now and, as far as slots are free, those that come next.
  void fetch_ahead();
  void fetch(int block);
  /// Ends a visit. The block stays in its slot when the blocks visited until its next use leave room.
  void end_visit();
  std::vector<Resource> weights_at_home(int block) const;
  /// What an operation of the visited block reads: its weights and the others. Until the next call.
  const std::vector<Resource>& with_weights(std::initializer_list<Resource> others);

  // --- activations ---
  int input_place(int chunk) const { return settings_.input_place(chunks_, chunk); }
  Resource input(int block, int chunk) const;
  ActivationPolicy policy(int block, int chunk) const { return settings_.policy(block, chunks_, chunk); }
  bool keeps_intermediates(int block, int chunk) const {
    return policy(block, chunk) != ActivationPolicy::input;
  }
  Resource intermediates(int block, int chunk, int slot) const;
  Resource saved_intermediates(int block, int chunk) const;
  int next_intermediate_slot(int block, int chunk);
  void save_input(int block, int chunk);
  void load_input(int block, int chunk);

  // --- passes ---
  void forward(int block, Groups groups);
  void head_forward(Groups groups);
  void head_step(Groups groups);
  void backward(int block, Groups groups);
  void rebuild_key_value(int block, int chunk);
  void backward_chunk(int block, int chunk);
  void embedding_backward();
  void verdict();

  // --- gradients ---
  /// Where the block's gradient grows during this step.
  Resource gradient(int block) const;
  int gradient_slot(int block) const { return gradient_slots_[static_cast<std::size_t>(block)]; }
  /// Resources of the gradients that the head adds to.
  std::vector<Resource> head_gradients() const;
  bool is_first(Groups groups) const { return groups.data() == chunks_.groups.data(); }
  bool is_last(Groups groups) const {
    return groups.data() + groups.size() == chunks_.groups.data() + chunks_.groups.size();
  }
  void take_gradient_slot(int block);
  /// True at the first call of a step for the block.
  bool starts_gradient(int block);
  void clear_gradient(int block);
  void load_gradient(int block);
  bool head_has_matrix_gradient() const;
  void emit_loss();
  void finish_gradient(int block);
  /// Whether a block's gradient in the ring has the embedding's share behind it.
  bool carries_embedding(int block) const { return block == head_ && settings_.head_carries_embedding(); }
  std::int64_t kept_bytes(int block) const;
  std::int64_t emitted_bytes(int block) const;

  // --- costs ---
  const BlockCost& cost(int block) const { return costs_[static_cast<std::size_t>(block)]; }
  std::int64_t tokens(int chunk) const { return chunks_.chunks[static_cast<std::size_t>(chunk)].num_tokens; }
  void add_flops(Operation& operation, double gemms_per_token, double attention) const;
  std::int64_t fetch_bytes(int block) const;

  int slot_of(int block) const { return slot_of_block_[static_cast<std::size_t>(block)]; }

  const ScheduleSettings& settings_;
  const ChunkPlan& chunks_;
  const std::vector<BlockCost>& costs_;
  ChunkPairs pairs_;
  int head_;
  Schedule schedule_;
  HazardTracker tracker_{schedule_};
  UpdateOperations updates_;
  std::vector<int> visits_;  ///< blocks in the order in which their weights are used
  std::size_t visit_ = 0;
  std::vector<Resource> reads_;  ///< of an operation: first the visited block's weights
  std::size_t num_weights_ = 0;  ///< of reads_
  std::deque<int> free_slots_;
  std::vector<int> slot_of_block_;
  std::vector<int> gradient_slots_;     ///< by block; −1: a buffer of its own
  std::vector<bool> gradient_started_;  ///< by block
  int intermediate_uses_ = 0;
  int gradient_uses_ = 0;
};

}  // namespace layerstream

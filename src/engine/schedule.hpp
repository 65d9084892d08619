#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/lane.hpp"
#include "core/run_config.hpp"
#include "longctx/chunk_plan.hpp"

namespace layerstream {

/// What an operation does. `block` and `chunk` say to what.
enum class OperationKind : std::uint8_t {
  update,              ///< AdamW on a block's host slab
  fetch_weights,       ///< host slab → slot
  release_weights,     ///< the slot is free
  forward,             ///< a block's forward pass over a chunk
  save_input,          ///< a decoder block's input, device → host
  save_intermediates,  ///< attention output etc. of a decoder block, device → host
  loss,                ///< head: loss only
  loss_and_gradient,   ///< head: loss and backward in one sweep
  logits,              ///< head: logits of the chunk's last token
  load_input,          ///< host → device
  load_intermediates,  ///< host → device
  clear_gradient,      ///< a block's device gradient buffer to zero
  load_gradient,       ///< gradient emitted earlier in this step, host → device, to be added to
  rebuild_key_value,   ///< keys and values of a chunk of a long row, again
  backward,            ///< a block's backward pass over a chunk
  gradient_norm,       ///< sum of squares of a block's gradient
  emit_gradient,       ///< a block's gradient, device → host
  verdict,             ///< global norm, clip scale, finite or not
};
std::string_view name_of(OperationKind kind);

/// One entry of a step. What it waits for is in `dependencies`, and nowhere else.
struct Operation {
  OperationKind kind;
  Lane lane;
  int block = -1;
  int chunk = -1;
  int weight_slot = -1;    ///< the slot that holds or receives the block's weights
  int gradient_slot = -1;  ///< the device buffer of the block's gradient
  int intermediate_slot =
      -1;                  ///< the ring buffer of saved intermediates; −1: scratch, or a home of their own
  std::int64_t bytes = 0;  ///< moved over the link or through host memory
  double flops = 0.0;
  std::vector<int> dependencies;  ///< earlier operations of other lanes, ascending
};

/// A step as data. The executor runs it; whatever else wants to know a step (a simulator, a trace) reads the
/// same list.
struct Schedule {
  std::vector<Operation> operations;

  std::string to_text() const;
};

/// What a schedule is made from besides the step's chunks.
struct ScheduleSettings {
  int num_blocks = 0;  ///< embedding, decoder layers, head
  bool head_uses_embedding = false;
  bool train = true;            ///< false: forward and loss only
  bool logits_only = false;     ///< forward, and logits instead of the loss
  bool pending_update = false;  ///< gradients of the step before wait in host slabs
  Lane fetch_lane = Lane::h2d;
  int weight_slots = 2;
  int gradient_slots = 2;
  int intermediate_slots = 2;
  int host_gradient_ring = 2;  ///< host gradient slabs in flight under immediate update
  ActivationPolicy activation_policy = ActivationPolicy::input;
  bool activations_on_host = true;
  OptimizerUpdate optimizer_update = OptimizerUpdate::deferred;

  /// The whole-step device buffer that holds a block's input. Activations on the host: two take turns. On the
  /// device: each block has its own.
  int input_buffer(int block) const { return activations_on_host ? block % 2 : block; }
};

/// The host gradient slab of a block. Deferred update needs one per block; immediate update passes them
/// through a ring, beside which a tied embedding keeps one of its own, since the head adds to it first.
int host_gradient_slab(const ScheduleSettings& settings, int block);
int num_host_gradient_slabs(const ScheduleSettings& settings);

/// Costs, for the simulator and the trace; by block.
struct BlockCost {
  std::int64_t fetch_bytes = 0;
  std::int64_t gradient_bytes = 0;
  std::int64_t update_bytes = 0;
  std::int64_t input_bytes_per_token = 0;
  std::int64_t intermediate_bytes_per_token = 0;
  double forward_flops_per_token = 0.0;   ///< GEMMs; the backward pass is twice this
  double attention_flops_per_pair = 0.0;  ///< forward, per query and visible key; backward is 2.5 times this
};

/// Builds the list of operations of one step, layer-major: each block processes all chunks before the
/// next block begins. Dependencies follow from what each operation reads and writes.
Schedule build_schedule(const ScheduleSettings& settings, const ChunkPlan& chunks,
                        const std::vector<BlockCost>& costs);

/// Applies waiting gradients without a step (before a checkpoint, or at the end).
Schedule build_update_schedule(const ScheduleSettings& settings, const std::vector<BlockCost>& costs);

}  // namespace layerstream

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "core/lane.hpp"
#include "core/run_config.hpp"
#include "longctx/attention_pattern.hpp"
#include "longctx/chunk_plan.hpp"

namespace layerstream {

/// What an operation does. `block` and `chunk` say to what.
enum class OperationKind : std::uint8_t {
  update,      ///< AdamW by the host's threads on their share of a block's slab
  load_state,  ///< a piece of a block's weights and moments, host → update slot (or home, if resident)
  update_on_device,    ///< AdamW by the device on a piece
  store_state,         ///< update slot → host
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
  clear_gradient,      ///< a block's device gradient buffer to zero, but for the matrices of its products
  load_gradient,       ///< gradient emitted earlier in this step, host → device, to be added to
  rebuild_key_value,   ///< keys and values of a chunk of a long row, again
  backward,            ///< a block's backward pass over a chunk
  gradient_norm,       ///< sum of squares of a block's gradient, in which what is frozen becomes zero
  emit_gradient,  ///< a block's gradient (but what is kept), and its statistics, device → host; of a frozen
                  ///< head the loss alone
  keep_gradient,  ///< what the device's share of the update needs, to where it waits on the device
  verdict,        ///< global norm, clip scale, finite or not
};
std::string_view name_of(OperationKind kind);

/// One entry of a step. What it waits for is in `dependencies`, and nowhere else.
struct Operation {
  OperationKind kind;
  Lane lane;
  int block = -1;
  int chunk = -1;
  int piece = -1;        ///< of the device's share of the block's update
  int update_slot = -1;  ///< the ring buffer that holds the piece
  int weight_slot = -1;  ///< the slot that holds or receives the block's weights; −1: they live on the device
  int gradient_slot = -1;  ///< the ring buffer of the block's gradient; −1: a buffer of its own
  int intermediate_slot =
      -1;  ///< the ring buffer of saved intermediates; −1: scratch, or a home of their own
  bool starts_gradient = false;  ///< the first to add to gradients of matrices, which it writes instead
  std::int64_t bytes = 0;        ///< moved over the link or through host memory
  double flops = 0.0;
  double attention_flops = 0.0;   ///< of `flops`, outside GEMMs
  std::vector<int> dependencies;  ///< earlier operations of other lanes, ascending
};

/// A step as data. The executor runs it; whatever else wants to know a step (a simulator, a trace) reads the
/// same list.
struct Schedule {
  std::vector<Operation> operations;
  std::int64_t step = 0;  ///< for messages and traces

  std::string to_text() const;
};

/// Which part of the optimizer's work is the device's: of each block's slab the first elements, taken through
/// a ring of slots piece by piece. The host's threads do the rest beside it. Whoever does it, the bits are
/// the same.
struct DeviceUpdate {
  std::vector<std::int64_t> elements;  ///< by block; empty: the host does all
  std::int64_t piece_elements = 0;
  int slots = 3;                     ///< one piece arrives, one is worked on, one leaves
  bool gradients_on_device = false;  ///< where the gradients of the device's share wait for the verdict
  bool in_place = false;  ///< a kernel on state in host memory, without slots: a block's share is one piece
  int thread_blocks = 0;  ///< of that kernel
  /// The first blocks' whole state lives on the device, and their gradients wait there: nothing of it crosses
  /// the link in a step. First, because theirs are the updates that a forward pass waits for.
  int resident_blocks = 0;

  std::int64_t of(int block) const {
    return elements.empty() ? 0 : elements[static_cast<std::size_t>(block)];
  }
  bool is_resident(int block) const { return block < resident_blocks; }
  /// Whether the block's share is updated where it lies on the host.
  bool is_in_place(int block) const { return in_place && !is_resident(block); }
  /// A piece that stays where it is is the whole share.
  bool in_one_piece(int block) const { return in_place || is_resident(block); }
  int num_pieces(int block) const {
    if (of(block) == 0) return 0;
    return in_one_piece(block) ? 1 : static_cast<int>((of(block) + piece_elements - 1) / piece_elements);
  }
  /// Elements of a block's gradient that wait on the device; the rest waits in the host slab.
  std::int64_t kept(int block) const { return gradients_on_device || is_resident(block) ? of(block) : 0; }
  struct Range {
    std::int64_t first, count;
  };
  /// Elements of a piece.
  Range piece(int block, int index) const {
    if (in_one_piece(block)) return {0, of(block)};
    const std::int64_t first = index * piece_elements;
    return {first, std::min(piece_elements, of(block) - first)};
  }
};

/// What a schedule is made from besides the step's chunks.
struct ScheduleSettings {
  int num_blocks = 0;  ///< embedding, decoder layers, head
  bool head_uses_embedding = false;
  bool train = true;            ///< false: forward and loss only
  bool logits_only = false;     ///< forward, and logits instead of the loss
  bool pending_update = false;  ///< gradients of the step before wait
  bool load_resident = false;   ///< the resident blocks' state is newer on the host
  std::vector<bool> frozen;     ///< by block: it has no gradient; empty: none
  Lane fetch_lane = Lane::h2d;
  int weight_slots = 2;
  int gradient_slots = 2;
  int intermediate_slots = 2;
  int host_gradient_ring = 2;  ///< host gradient slabs in flight under immediate update
  LoopOrder loop_order = LoopOrder::layer_major;
  ActivationPolicy activation_policy = ActivationPolicy::input;
  /// Decoder blocks that keep what activation_policy says, counted from the last; the others keep their
  /// input.
  int activation_blocks = std::numeric_limits<int>::max();
  /// And of these of each group the last so many chunks: the last of a long row see the most keys.
  int activation_chunks = std::numeric_limits<int>::max();
  /// Decoder blocks whose activations stay on the device, counted from the last; those of the others wait on
  /// the host.
  int device_activation_blocks = 0;
  OptimizerUpdate optimizer_update = OptimizerUpdate::deferred;
  DeviceUpdate device_update;
  bool kernels_reach_host = false;  ///< see MemoryBackend
  bool promotes_by_kernel = false;  ///< weights come to their slot by a kernel

  int head() const { return num_blocks - 1; }
  bool is_frozen(int block) const { return !frozen.empty() && frozen[static_cast<std::size_t>(block)]; }
  /// The first decoder block that the backward pass goes through; the head if none: before it nothing is
  /// trained.
  int first_backward() const {
    const auto first = std::ranges::find(frozen, false);
    return first == frozen.end() ? 1 : std::max(1, static_cast<int>(first - frozen.begin()));
  }
  /// The first block whose activations stay on the device; the head if none do.
  int first_device_activations() const { return head() - std::min(head() - 1, device_activation_blocks); }
  bool activations_on_device(int block) const {
    return block >= first_device_activations() && block < head();
  }
  /// The device buffer that holds a block's input: one of its own behind the first two where activations stay
  /// on the device. The other blocks and the head take turns with the first two.
  int input_buffer(int block) const {
    const int first = first_device_activations();
    if (activations_on_device(block)) return 2 + block - first;
    return std::min(block, first) % 2;
  }
  int num_input_buffers() const { return 2 + head() - first_device_activations(); }
  /// Whether a block's input waits on the host for the backward pass. The last one that would still stands
  /// where the forward pass left it.
  bool input_leaves(int block) const {
    return train && block >= first_backward() && block < first_device_activations() - 1;
  }
  /// What a decoder block keeps, of the chunks that keep it.
  ActivationPolicy policy(int block) const {
    const bool keeps = head() - block <= activation_blocks && block >= first_backward();
    return keeps ? activation_policy : ActivationPolicy::input;
  }
  /// Of a group's chunks the first that keeps what its block's policy says, counted within the group.
  int first_keeping(const ChunkGroup& group) const {
    return group.num_chunks - std::min(group.num_chunks, activation_chunks);
  }
  /// What a decoder block keeps of a chunk.
  ActivationPolicy policy(int block, const ChunkPlan& chunks, int chunk) const {
    const ChunkGroup& group = chunks.group_of(chunk);
    return chunk - group.first_chunk >= first_keeping(group) ? policy(block) : ActivationPolicy::input;
  }
  /// Whether a block's gradient grows in a device buffer of its own, where what is kept of it waits for its
  /// update; else in one of the ring, which it leaves. Micro-batch-major it would leave it and come back for
  /// every micro-batch.
  bool has_own_gradient_buffer(int block) const {
    return device_update.is_resident(block) || loop_order == LoopOrder::micro_batch_major;
  }
  /// Whether a tied head adds to a buffer of the embedding's gradient; else it brings a share of its own
  /// along.
  bool head_adds_to_embedding() const {
    return head_uses_embedding && !is_frozen(0) && has_own_gradient_buffer(0);
  }
  /// Whether it does bring one along.
  bool head_carries_embedding() const {
    return head_uses_embedding && !is_frozen(0) && !has_own_gradient_buffer(0);
  }
  /// Whether of the embedding's gradient only the rows that the step used go to the host, whose slab keeps
  /// zeros between them: not where a head has gradients for all rows, or blocks take turns in the slab.
  bool emits_embedding_rows() const {
    return kernels_reach_host && train && !head_uses_embedding && !is_frozen(0) &&
           optimizer_update == OptimizerUpdate::deferred && device_update.kept(0) == 0;
  }
  int num_streamed_blocks() const { return num_blocks - std::min(num_blocks, device_update.resident_blocks); }
  /// The place of a chunk in buffers of inputs. Micro-batch-major they hold one group, and serve all.
  int input_place(const ChunkPlan& chunks, int chunk) const {
    return loop_order == LoopOrder::layer_major ? chunk : chunk - chunks.group_of(chunk).first_chunk;
  }
  /// The same in buffers of kept intermediates, which hold the chunks that keep them and no others.
  int intermediate_place(const ChunkPlan& chunks, int chunk) const {
    return loop_order == LoopOrder::layer_major
               ? chunk
               : input_place(chunks, chunk) - first_keeping(chunks.group_of(chunk));
  }
};

/// The first row of each chunk in buffers of kept intermediates (see ScheduleSettings::intermediate_place);
/// negative for chunks that keep none.
std::vector<std::int64_t> intermediate_rows(const ScheduleSettings& settings, const ChunkPlan& chunks);

/// The host gradient slab of a block. Deferred update needs one per block; immediate update passes them
/// through a ring, beside which a tied embedding keeps one of its own, since the head adds to it first.
int host_gradient_slab(const ScheduleSettings& settings, int block);
int num_host_gradient_slabs(const ScheduleSettings& settings);

/// Costs, for the simulator and the trace; by block.
struct BlockCost {
  std::int64_t num_elements = 0;
  std::int64_t fetch_bytes = 0;
  std::int64_t gradient_bytes = 0;
  std::int64_t gradient_row_bytes = 0;  ///< of a table's row
  std::int64_t update_bytes = 0;
  std::int64_t input_bytes_per_token = 0;
  std::int64_t intermediate_bytes_per_token = 0;
  double forward_flops_per_token = 0.0;     ///< GEMMs; the backward pass is twice this
  double recomputed_flops_per_token = 0.0;  ///< and this, where projections are not saved
  double attention_flops_per_pair = 0.0;  ///< forward, per query and visible key; backward is 2.5 times this
  AttentionPattern attention_pattern = {};
};

/// Builds the list of operations of one step. Layer-major, each block processes all chunks before the next
/// block begins; micro-batch-major, each group of chunks goes through all blocks, forward and backward,
/// before the next group. Either way a block sees the chunks in the same order, so that its sums are the
/// same. Dependencies follow from what each operation reads and writes.
Schedule build_schedule(const ScheduleSettings& settings, const ChunkPlan& chunks,
                        const std::vector<BlockCost>& costs);

/// Applies waiting gradients without a step, and brings the resident blocks' state to the host (before a
/// checkpoint, or at the end).
Schedule build_update_schedule(const ScheduleSettings& settings, const std::vector<BlockCost>& costs);

}  // namespace layerstream

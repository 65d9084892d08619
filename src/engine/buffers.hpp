#pragma once

#include <cstdint>
#include <vector>

#include "core/ledger.hpp"
#include "engine/parameter_store.hpp"
#include "engine/schedule.hpp"
#include "longctx/chunk_plan.hpp"
#include "model/decoder.hpp"
#include "model/head.hpp"
#include "model/layout.hpp"
#include "model/spec.hpp"

namespace layerstream {

/// All that decides how large the engine's buffers are. T tokens of a step, C of a chunk, S of a group.
struct EngineShape {
  ModelSpec spec;
  ModelLayout layout;
  DType compute = DType::bf16;
  ChunkBounds bounds;
  ScheduleSettings schedule;
  std::int64_t loss_tile_tokens = 0;
  std::int64_t max_positions = 0;  ///< rows of the rope tables
  std::size_t slot_bytes = 0;      ///< of a weight slot: what the backend needs for the largest block
  bool deterministic = true;
  bool on_gpu = false;  ///< else on the simulated device of a CPU build
  /// Keys and values of every decoder block stay, for generation; else one group's at a time.
  bool keeps_key_values = false;

  DType accumulator() const { return accumulator_of(compute); }
  bool low_halves_stream() const { return compute == DType::f32; }
  /// Elements of a block's device gradient: its slab, and the share of the embedding's that a tied head
  /// brings along where the embedding's has no buffer of its own.
  std::int64_t gradient_elements(int block) const;
  /// Tokens that buffers of inputs hold: those of a step, or micro-batch-major of a group.
  std::int64_t activation_tokens() const {
    return schedule.loop_order == LoopOrder::layer_major ? bounds.tokens : bounds.group_tokens;
  }
  /// Tokens that buffers of kept intermediates hold: those of the chunks that keep them.
  std::int64_t intermediate_tokens() const;
};

/// Which intermediates of a decoder block outlive its forward pass.
SavedIntermediates saved_by(ActivationPolicy policy);

/// A piece of a block's state on the device, while its optimizer works on it.
struct UpdateSlot {
  TensorView hi, lo, exp_avg, exp_avg_sq;  ///< (piece) bf16, int16, fp32, fp32
  TensorView gradient;                     ///< (piece) fp32; empty when gradients wait on the device
};

/// Device memory of a run, laid out in one arena. Buffers that a run does not need are empty.
struct DeviceBuffers {
  DeviceBuffers(const EngineShape& shape, Arena& arena);

  TensorView rope_cos, rope_sin;  ///< (P, d/2); filled once
  std::vector<Slab> resident;     ///< [b]: state of block b, if it lives here
  /// [b], fp32: the gradient of block b, if it has a buffer of its own; else what waits on the device of it,
  /// if anything.
  std::vector<TensorView> block_gradients;
  /// (V) uint8: rows of the embedding's gradient on the host that may not be zero (see ops::emit_rows).
  TensorView embedding_rows_written;
  std::size_t first_volatile_byte = 0;  ///< of the arena: from here on nothing outlives a step
  std::vector<UpdateSlot> update_slots;
  std::vector<void*> weight_slots;
  TensorView matrices;                     ///< fp32: a block's matrices, merged
  TensorView vectors;                      ///< a block's vectors, merged (fp32)
  std::vector<TensorView> gradient_slots;  ///< (elements of the largest block that uses them) fp32
  TensorView unused_gradient;              ///< where those of frozen blocks' vectors go, fp32
  /// (A, h) each, A the shape's activation_tokens; by ScheduleSettings::input_buffer.
  std::vector<TensorView> inputs;
  TensorView residual_gradient;            ///< (T, h)
  std::vector<DecoderIntermediates> kept;  ///< [b]: the shape's intermediate_tokens, if kept on the device
  std::vector<DecoderIntermediates>
      in_transit;                              ///< a ring for chunks of the blocks that keep them on the host
  DecoderIntermediates scratch_intermediates;  ///< what is not saved, for one chunk
  bool key_value_raw_spans_group = false;      ///< scratch key_value_raw has S rows instead of C
  std::vector<GroupKeyValue> groups;           ///< one, or one per decoder block (index block − 1)
  DecoderScratch decoder;
  HeadScratch head;
  TensorView logits;                         ///< (1, V), generation only
  TensorView input_ids, targets, positions;  ///< (T) int32
  TensorView tokens_by_id;                   ///< (T, 4) int32, only for a gradient of the embedding
  TensorView workspace;                      ///< bytes
  double* nll_sum = nullptr;
  double* norm_partials = nullptr;  ///< by block
};

/// Host memory of a run besides the parameter store.
struct HostBuffers {
  HostBuffers(const EngineShape& shape, Arena& arena);

  double* norm_partials = nullptr;  ///< by block: copies of the device's
  double* nll_sum = nullptr;
  TensorView input_ids, targets, positions;  ///< (T) int32, on their way to the device
  TensorView tokens_by_id;                   ///< the same, only for a gradient of the embedding
  TensorView logits;                         ///< (1, V), generation only
  /// By host gradient slab, fp32; without what is kept on the device.
  std::vector<TensorView> gradients;
  std::vector<TensorView> inputs;                   ///< (A, h) by block; empty where not saved
  std::vector<DecoderIntermediates> intermediates;  ///< by block, the shape's intermediate_tokens
};

/// The views of `set` restricted to rows [first, first + count); empty views stay empty.
DecoderIntermediates rows_of(const DecoderIntermediates& set, std::int64_t first, std::int64_t count);

/// Calls function(view_a, view_b) for each view that is present in `a`.
template <class Function>
void for_each_pair(const DecoderIntermediates& a, const DecoderIntermediates& b, const Function& function) {
  const auto visit = [&](TensorView DecoderIntermediates::*member) {
    if (a.*member) function(a.*member, b.*member);
  };
  visit(&DecoderIntermediates::query_raw);
  visit(&DecoderIntermediates::key_value_raw);
  visit(&DecoderIntermediates::attention);
  visit(&DecoderIntermediates::lse);
  visit(&DecoderIntermediates::residual);
  visit(&DecoderIntermediates::gate_up);
}

/// Bytes per token of what a decoder block keeps under the policy besides its input.
std::int64_t intermediate_bytes_per_token(const EngineShape& shape, ActivationPolicy policy);

/// Costs of each block for schedules of this shape.
std::vector<BlockCost> block_costs(const EngineShape& shape, const ParameterStore& store,
                                   const MemoryBackend& backend);

}  // namespace layerstream

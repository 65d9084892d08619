#pragma once

#include <vector>

#include "backends/device.hpp"
#include "backends/memory_backend.hpp"
#include "engine/buffers.hpp"
#include "engine/executor.hpp"
#include "engine/host_optimizer.hpp"
#include "engine/parameter_store.hpp"
#include "ops/adamw.hpp"
#include "ops/embedding.hpp"
#include "ops/libraries.hpp"

namespace layerstream {

/// What is known when all gradients of a step exist.
struct StepVerdict {
  double nll_sum = 0.0;
  double grad_norm = 0.0;   ///< before clipping
  double clip_scale = 1.0;  ///< multiplies every gradient
  bool finite = true;       ///< loss and gradients, and the squares of the scaled gradients
};

/// Carries out a step's operations over the engine's buffers. Holds no decisions: which operation, where
/// and when is the schedule's affair.
class StepRunner final : public OperationRunner {
 public:
  struct Parts {
    const EngineShape& shape;
    DeviceBuffers& device_buffers;
    HostBuffers& host_buffers;
    ParameterStore& store;
    MemoryBackend& backend;
    Device& device;
    HostOptimizer& optimizer;
    const ParameterGroups& parameter_groups;
    ops::Libraries& libraries;
  };
  /// All parts outlive the runner.
  /// @param poison fill released weight slots with NaN (diagnostics).
  StepRunner(const Parts& parts, bool poison);

  /// Must be called before a schedule of `chunks` runs; uploads ids, targets and positions.
  /// @param chunks outlives the run. @param max_grad_norm 0: no clipping.
  /// @param optimizer what `update` operations of this schedule apply.
  void begin(const ChunkPlan& chunks, double max_grad_norm, const ops::AdamWSettings& optimizer);

  void run(const Operation& operation, StreamView stream) override;

  const StepVerdict& verdict() const { return verdict_; }
  /// Of a schedule without gradients: read back after the run.
  double read_nll_sum();
  std::vector<float> read_logits();

 private:
  struct BoundWeights {
    int block = -1;
    int slot = -1;
    const void* matrices = nullptr;  ///< compute dtype; of the embedding's slab for a tied head
    ops::SplitMatrix table;          ///< embedding only
  };

  ops::Context context(StreamView stream) const;
  /// For kernels of other lanes: the workspace belongs to the compute lane.
  ops::Context context_without_workspace(StreamView stream) const;
  const Chunk& chunk_of(const Operation& operation) const;
  const BlockLayout& layout_of(int block) const;
  void bind(const Operation& operation, StreamView stream);

  /// The chunk's rows of a buffer of inputs, and of kept intermediates.
  TensorView input_rows(const TensorView& buffer, const Chunk& chunk) const;
  DecoderIntermediates intermediate_rows(const DecoderIntermediates& buffer, int chunk) const;
  TensorView input_of(int block, const Chunk& chunk) const;
  DecoderIntermediates scratch_of(const Chunk& chunk) const;
  DecoderIntermediates intermediates_of(const Operation& operation, const Chunk& chunk) const;
  DecoderIntermediates saved_views_of(const Operation& operation, const Chunk& chunk) const;
  DecoderPass pass_of(const Operation& operation, const DecoderWeights& weights,
                      const DecoderIntermediates& intermediates) const;
  DecoderWeights decoder_weights(int block) const;
  /// Of a frozen block the matrices have none, and those of vectors go where nobody reads them.
  DecoderGradients decoder_gradients(const Operation& operation) const;
  HeadWeights head_weights() const;
  HeadPass head_pass(const Operation& operation, const HeadWeights& weights) const;
  /// `elements` from `first` on of the buffer that the block's gradient grows in.
  TensorView gradient_of(const Operation& operation, std::int64_t first, std::int64_t elements) const;
  TensorView block_gradient(int block) const;
  SavedIntermediates saved_of(const Operation& operation) const;

  void fetch_weights(const Operation& operation, StreamView stream);
  BlockSource source_of(int block) const;
  WeightBinding binding_of(const Operation& operation);
  std::int64_t weights_version(int block) const;
  void release_weights(const Operation& operation, StreamView stream);
  void forward(const Operation& operation, StreamView stream);
  void loss(const Operation& operation, StreamView stream);
  void loss_and_gradient(const Operation& operation, StreamView stream);
  void logits(const Operation& operation, StreamView stream);
  void rebuild_key_value(const Operation& operation, StreamView stream);
  void backward(const Operation& operation, StreamView stream);
  void move_input(const Operation& operation, StreamView stream);
  void move_intermediates(const Operation& operation, StreamView stream);
  void clear_gradient(const Operation& operation, StreamView stream);
  void load_gradient(const Operation& operation, StreamView stream);
  void gradient_norm(const Operation& operation, StreamView stream);
  void emit_gradient(const Operation& operation, StreamView stream);
  void keep_gradient(const Operation& operation, StreamView stream);
  void update(const Operation& operation);
  void load_state(const Operation& operation, StreamView stream);
  void update_on_device(const Operation& operation, StreamView stream);
  std::vector<UpdateRange> update_ranges(int block, std::int64_t first, std::int64_t count) const;
  void store_state(const Operation& operation, StreamView stream);
  ops::AdamWSlice host_piece(const Operation& operation) const;
  ops::AdamWSlice device_piece(const Operation& operation) const;
  void compute_verdict();

  Parts parts_;
  bool poison_;
  const ChunkPlan* chunks_ = nullptr;
  std::vector<std::int64_t> intermediate_rows_;  ///< by chunk, of the step's
  double max_grad_norm_ = 0.0;
  ops::AdamWSettings optimizer_settings_;
  BoundWeights bound_;
  StepVerdict verdict_;
  int num_updated_ = 0;  ///< blocks that have moved in this run
};

}  // namespace layerstream

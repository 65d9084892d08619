#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "core/run_config.hpp"
#include "core/token_row.hpp"
#include "engine/engine.hpp"
#include "model/spec.hpp"
#include "tests/support/scratch_directory.hpp"
#include "tests/support/test_device.hpp"

namespace layerstream::test {

/// A small model that has every feature the engine treats apart: grouped queries, biases, q/k norm, tied
/// or untied embeddings.
inline ModelSpec tiny_spec(bool tied = true) {
  ModelSpec spec;
  spec.family = Family::qwen3;
  spec.vocab_size = 61;
  spec.hidden_size = 32;
  spec.intermediate_size = 48;
  spec.num_hidden_layers = 4;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 12;
  spec.max_position_embeddings = 64;
  spec.tie_word_embeddings = tied;
  spec.qkv_bias = true;
  spec.qk_norm = true;
  spec.initializer_range = 0.2;
  return spec;
}

/// The shape of examples/qwen2.5-7b-shape, with as many layers. For plans: nothing of it is ever allocated.
inline ModelSpec qwen2_5_7b(std::int64_t layers = 28) {
  ModelSpec spec;
  spec.family = Family::qwen2;
  spec.vocab_size = 152064;
  spec.hidden_size = 3584;
  spec.intermediate_size = 18944;
  spec.num_hidden_layers = layers;
  spec.num_attention_heads = 28;
  spec.num_key_value_heads = 4;
  spec.head_dim = 128;
  spec.max_position_embeddings = 32768;
  spec.qkv_bias = true;
  return spec;
}

/// Rows of different lengths, some with several documents, some targets missing; a function of the seed.
inline std::vector<TokenRow> random_rows(int count, std::int64_t max_tokens, std::int64_t vocab_size,
                                         std::uint64_t seed) {
  std::vector<TokenRow> rows;
  std::uint64_t index = 0;
  const auto below = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(uniform_at(seed, 7, index++) * static_cast<double>(limit));
  };
  for (int r = 0; r < count; ++r) {
    TokenRow row;
    const std::int64_t tokens = max_tokens - below(max_tokens / 2);
    row.document_starts.push_back(0);
    if (tokens > 6 && below(2) == 1) row.document_starts.push_back(2 + below(tokens - 4));
    for (std::int64_t t = 0; t < tokens; ++t)
      row.input_ids.push_back(static_cast<std::int32_t>(below(vocab_size)));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const bool ends =
          t + 1 == tokens || (row.document_starts.size() > 1 && row.document_starts[1] == t + 1);
      const bool masked = below(5) == 0;
      row.targets.push_back(ends || masked ? -100 : row.input_ids[static_cast<std::size_t>(t + 1)]);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

inline RunConfig tiny_run() {
  RunConfig run;
  run.compute_dtype = DType::f32;
  run.cutoff_len = 24;
  run.per_device_train_batch_size = 8;
  run.gradient_accumulation_steps = 1;
  run.chunk_tokens = 40;
  run.loss_tile_tokens = 16;
  run.optimizer_threads = 1;
  run.max_grad_norm = 1.0;
  return run;
}

/// All fp32 master weights, moments and losses of a run, for comparisons bit by bit.
struct RunRecord {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<std::vector<std::uint8_t>> slabs;  ///< hi, lo, exp_avg, exp_avg_sq of each block
  friend bool operator==(const RunRecord&, const RunRecord&) = default;
};

inline std::vector<std::vector<std::uint8_t>> slab_bytes(const ParameterStore& store) {
  std::vector<std::vector<std::uint8_t>> all;
  const auto copy = [&](const void* data, std::size_t bytes) {
    const auto* const first = static_cast<const std::uint8_t*>(data);
    all.emplace_back(first, first + bytes);
  };
  for (int block = 0; block < store.layout().num_blocks(); ++block) {
    const Slab& slab = store.slab(block);
    const auto n = static_cast<std::size_t>(slab.num_elements);
    copy(slab.hi, n * 2);
    copy(slab.lo, n * 2);
    if (slab.exp_avg == nullptr) continue;  // frozen
    copy(slab.exp_avg, n * 4);
    copy(slab.exp_avg_sq, n * 4);
  }
  return all;
}

inline StepSettings step_settings(const RunConfig& run, std::int64_t step, double learning_rate = 1e-2) {
  return {.adamw = {.learning_rate = learning_rate, .weight_decay = 0.1, .step = step},
          .max_grad_norm = run.max_grad_norm};
}

/// Trains `steps` steps from fixed weights on fixed rows.
inline RunRecord train(const ModelSpec& spec, const RunConfig& run, int steps,
                       const EngineDiagnostics& diagnostics = {}) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  Engine engine(spec, run, EngineMode::train, *device, diagnostics);
  engine.parameters().initialize(11, spec.initializer_range, engine.pool());
  RunRecord record;
  const int rows = static_cast<int>(run.per_device_train_batch_size * run.gradient_accumulation_steps);
  for (int step = 1; step <= steps; ++step) {
    const auto batch = random_rows(rows, run.cutoff_len, spec.vocab_size, static_cast<std::uint64_t>(step));
    const StepResult result = engine.train_step(batch, step_settings(run, step));
    record.losses.push_back(result.loss);
    record.norms.push_back(result.grad_norm);
  }
  engine.apply_pending();
  record.slabs = slab_bytes(engine.parameters());
  return record;
}

}  // namespace layerstream::test

// A whole training step on one long row: loss and gradients do not depend on where the row is cut. In bf16 on
// a GPU and a row of 16,384 tokens; in a CPU build the same in fp32 at a small size.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/engine/trained_model.hpp"

namespace layerstream::test {
namespace {

struct Scale {
  DType compute;
  std::int64_t tokens;
  std::vector<std::int64_t> chunk_tokens;
  std::int64_t hidden_size, intermediate_size, layers;
  std::size_t device_bytes;
  double loss_tolerance;    ///< relative
  double block_cosine;      ///< of the gradients of a block's parameters together, at least
  double parameter_cosine;  ///< of each parameter's alone
};

#ifdef LAYERSTREAM_TEST_ON_GPU
/// The contract of causal rows: loss within 1e-5, cosine above 0.9999. Errors of bf16 products, 2^-9 each and
/// independent, turn the gradient of a block by some 1e-5; a small parameter's, of fewer sums, by more.
const Scale scale{DType::bf16, 16384, {1024, 4096, 1000, 37}, 512, 1408, 4, std::size_t{24} << 30, 1e-5,
                  0.9999,      0.999};
#else
/// fp32 sums in another order: 1e-7 times the roots of their lengths.
const Scale scale{DType::f32,           256,  {16, 64, 100, 37}, 128,       352, 2,
                  std::size_t{1} << 30, 1e-6, 1.0 - 1e-9,        1.0 - 1e-8};
#endif

ModelSpec long_row_spec() {
  ModelSpec spec;
  spec.family = Family::qwen2;
  spec.vocab_size = 1024;
  spec.hidden_size = scale.hidden_size;
  spec.intermediate_size = scale.intermediate_size;
  spec.num_hidden_layers = scale.layers;
  spec.head_dim = 64;
  spec.num_attention_heads = scale.hidden_size / spec.head_dim;
  spec.num_key_value_heads = std::max<std::int64_t>(1, spec.num_attention_heads / 4);
  spec.max_position_embeddings = scale.tokens;
  spec.qkv_bias = true;
  spec.initializer_range =
      0.06;  // scores differ enough for attention to look at some keys more than at others
  return spec;
}

/// Random tokens; documents start at 0 and at `starts`.
TokenRow long_row(const std::vector<std::int64_t>& starts = {}) {
  TokenRow row;
  row.document_starts = {0};
  row.document_starts.insert(row.document_starts.end(), starts.begin(), starts.end());
  for (std::int64_t t = 0; t < scale.tokens; ++t) {
    row.input_ids.push_back(
        static_cast<std::int32_t>(1024.0 * uniform_at(3, 1, static_cast<std::uint64_t>(t))));
  }
  row.targets.assign(row.input_ids.begin() + 1, row.input_ids.end());
  row.targets.push_back(-100);
  for (const std::int64_t start : starts) row.targets[static_cast<std::size_t>(start) - 1] = -100;
  return row;
}

RunConfig long_row_run(std::int64_t chunk_tokens) {
  RunConfig run;
  run.compute_dtype = scale.compute;
  run.cutoff_len = scale.tokens;
  run.per_device_train_batch_size = 1;
  run.chunk_tokens = chunk_tokens;
  run.loss_tile_tokens = scale.tokens / 8;
  run.optimizer_threads = 1;
  run.activation_policy = ActivationPolicy::input;
  return run;
}

struct StepOutcome {
  double loss = 0.0;
  std::vector<std::vector<float>> gradients;  ///< of all parameters, in order
};

StepOutcome step_of(const ModelSpec& spec, const RunConfig& run, const TokenRow& row) {
  TrainedModel model(spec, run, scale.device_bytes);
  const StepResult result = model.engine.train_step({&row, 1}, step_settings(run, 1));
  EXPECT_TRUE(result.applied);
  return {result.loss, model.gradients()};
}

/// Sums over the elements of two vectors.
struct Products {
  double ab = 0.0, aa = 0.0, bb = 0.0;

  void add(const std::vector<float>& a, const std::vector<float>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double x = a[i], y = b[i];
      ab += x * y;
      aa += x * x;
      bb += y * y;
    }
  }
  double cosine() const { return ab / std::sqrt(aa * bb); }
};

/// Expects the loss and the direction of every gradient of `actual` to be those of `expected`; prints the
/// worst. @param slack times the scale's tolerances
void expect_same_step(const ModelSpec& spec, const StepOutcome& actual, const StepOutcome& expected,
                      const std::string& what, double slack = 1.0) {
  const double loss_error = std::abs(actual.loss / expected.loss - 1.0);
  EXPECT_LE(loss_error, slack * scale.loss_tolerance)
      << what << ": " << actual.loss << ", expected " << expected.loss;

  const ModelLayout layout = make_layout(spec);
  std::vector<Products> blocks(static_cast<std::size_t>(layout.num_blocks()));
  double worst_block = 1.0, worst_parameter = 1.0;
  std::string worst_name;
  std::size_t index = 0;
  for_each_parameter(layout, [&](int block, const Parameter& parameter) {
    Products alone;
    alone.add(actual.gradients[index], expected.gradients[index]);
    blocks[static_cast<std::size_t>(block)].add(actual.gradients[index], expected.gradients[index]);
    ++index;
    EXPECT_GT(alone.cosine(), 1.0 - slack * (1.0 - scale.parameter_cosine)) << what << ": " << parameter.name;
    if (alone.cosine() < worst_parameter) {
      worst_parameter = alone.cosine();
      worst_name = parameter.name;
    }
  });
  for (std::size_t block = 0; block < blocks.size(); ++block) {
    EXPECT_GT(blocks[block].cosine(), 1.0 - slack * (1.0 - scale.block_cosine))
        << what << ": block " << block;
    worst_block = std::min(worst_block, blocks[block].cosine());
  }
  std::printf(
      "%s: loss %.9g, relative difference %.1e; 1 - cosine of the worst block %.1e, of the worst parameter "
      "%.1e (%s)\n",
      what.c_str(), actual.loss, loss_error, 1.0 - worst_block, 1.0 - worst_parameter, worst_name.c_str());
}

TEST(ChunkInvariance, LossAndGradientsOfALongRowAreThoseOfTheWholeRow) {
  const ModelSpec spec = long_row_spec();
  const TokenRow row = long_row();
  const StepOutcome whole = step_of(spec, long_row_run(scale.tokens), row);
  for (const std::int64_t chunk_tokens : scale.chunk_tokens) {
    expect_same_step(spec, step_of(spec, long_row_run(chunk_tokens), row), whole,
                     fmt::format("{} tokens in chunks of {}", scale.tokens, chunk_tokens));
  }
}

TEST(ChunkInvariance, HoldsForPackedDocumentsUnderASlidingWindow) {
  // Longer than the smallest chunk, shorter than the next; documents of most of the row, of one token and of
  // few.
  const std::int64_t tokens = scale.tokens;
  ModelSpec spec = long_row_spec();
  spec.sliding_window = scale.chunk_tokens[0] + scale.chunk_tokens[0] / 2 + 1;
  const TokenRow row = long_row({tokens / 8 + 3, tokens / 8 + 4, tokens / 8 + 11, tokens - tokens / 16 - 5});
  const StepOutcome whole = step_of(spec, long_row_run(tokens), row);
  // Under a window the tiles of keys begin elsewhere for each chunk size, so that the bf16 roundings of
  // probabilities differ in the forward pass as well (causal rows have the same loss to the last bit).
  // Measured on an H200: loss within 1.3e-5, 1 - cosine 1.3e-4.
  constexpr double slack = 3.0;
  for (const std::int64_t chunk_tokens :
       {scale.chunk_tokens[0], scale.chunk_tokens[1], scale.chunk_tokens[2]}) {
    expect_same_step(spec, step_of(spec, long_row_run(chunk_tokens), row), whole,
                     fmt::format("{} tokens, packed, window {}, in chunks of {}", tokens, spec.sliding_window,
                                 chunk_tokens),
                     slack);
  }
  // The test can fail: the whole row without the window is another function.
  ModelSpec unlimited = spec;
  unlimited.sliding_window = 0;
  EXPECT_GT(std::abs(step_of(unlimited, long_row_run(tokens), row).loss / whole.loss - 1.0), 1e-4);
}

TEST(ChunkInvariance, SavedIntermediatesOfALongRowGiveTheBitsOfRecomputedOnes) {
  const ModelSpec spec = long_row_spec();
  const TokenRow row = long_row();
  RunConfig run = long_row_run(scale.chunk_tokens[1]);
  const StepOutcome recomputed = step_of(spec, run, row);
  for (const ActivationPolicy policy : {ActivationPolicy::input_attention, ActivationPolicy::all}) {
    run.activation_policy = policy;
    const StepOutcome saved = step_of(spec, run, row);
    EXPECT_EQ(saved.loss, recomputed.loss);
    EXPECT_TRUE(saved.gradients == recomputed.gradients);
  }
}

}  // namespace
}  // namespace layerstream::test

// Rotary embeddings that depend on the length of the row: it is the whole row's, wherever it is cut and
// however intermediates come back, and the angles change where the row outgrows the original positions.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "tests/engine/trained_model.hpp"

namespace layerstream::test {
namespace {

constexpr std::int64_t original_positions = 16;
constexpr std::int64_t long_row_tokens = 60;

struct Scaling {
  std::string name;
  RopeSpec rope;
};

void PrintTo(const Scaling& scaling, std::ostream* stream) {
  *stream << scaling.name;
}

Scaling dynamic_scaling() {
  return {"dynamic", {.type = RopeType::dynamic, .factor = 2.0}};
}
Scaling longrope_scaling() {
  return {"longrope",
          {.type = RopeType::longrope,
           .original_max_position_embeddings = original_positions,
           .short_factor = {1, 1, 1, 1, 1, 1},
           .long_factor = {1, 1.5, 2, 3, 4, 5}}};
}

ModelSpec spec_of(const RopeSpec& rope) {
  ModelSpec spec = tiny_spec();  // head_dim 12: 6 pairs
  spec.rope = rope;
  spec.max_position_embeddings =
      rope.type == RopeType::longrope ? 4 * original_positions : original_positions;
  return spec;
}

RunConfig run_of(std::int64_t cutoff_len, std::int64_t chunk_tokens) {
  RunConfig run = tiny_run();
  run.per_device_train_batch_size = 1;
  run.cutoff_len = cutoff_len;
  run.chunk_tokens = chunk_tokens;
  return run;
}

TokenRow row_of(std::int64_t tokens) {
  TokenRow row;
  row.document_starts = {0};
  for (std::int64_t t = 0; t < tokens; ++t) {
    row.input_ids.push_back(
        static_cast<std::int32_t>(61.0 * uniform_at(8, 1, static_cast<std::uint64_t>(t))));
  }
  row.targets.assign(row.input_ids.begin() + 1, row.input_ids.end());
  row.targets.push_back(-100);
  return row;
}

struct Step {
  double loss;
  std::vector<std::vector<float>> gradients;
};

Step step_of(const ModelSpec& spec, const RunConfig& run) {
  const TokenRow row = row_of(long_row_tokens);
  TrainedModel model(spec, run);
  const StepResult result = model.engine.train_step({&row, 1}, step_settings(run, 1));
  return {result.loss, model.gradients()};
}

/// ‖a − b‖ / ‖b‖ over the gradients of all parameters.
double distance(const Step& a, const Step& b) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t p = 0; p < b.gradients.size(); ++p) {
    for (std::size_t i = 0; i < b.gradients[p].size(); ++i) {
      const double x = a.gradients[p][i], y = b.gradients[p][i];
      difference += (x - y) * (x - y);
      norm += y * y;
    }
  }
  return std::sqrt(difference / norm);
}

class RopeOfLongRows : public ::testing::TestWithParam<Scaling> {
 protected:
  ModelSpec spec_ = spec_of(GetParam().rope);
};

INSTANTIATE_TEST_SUITE_P(Scalings, RopeOfLongRows, ::testing::Values(dynamic_scaling(), longrope_scaling()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RopeOfLongRows, AnglesAreTheWholeRowsInChunksShorterThanTheOriginalLength) {
  const Step whole = step_of(spec_, run_of(long_row_tokens, long_row_tokens));
  // fp32 sums in another order, a few times 1e-7 (the engine has no FP64).
  constexpr double tolerance = 5e-6;
  for (const std::int64_t chunk_tokens : {5, 13, 16}) {
    const Step chunked = step_of(spec_, run_of(long_row_tokens, chunk_tokens));
    EXPECT_NEAR(chunked.loss / whole.loss, 1.0, tolerance) << "chunks of " << chunk_tokens;
    EXPECT_LE(distance(chunked, whole), tolerance) << "chunks of " << chunk_tokens;
  }
  // What the angles of a chunk's length, those without scaling, would have given.
  EXPECT_GT(distance(step_of(spec_of({}), run_of(long_row_tokens, long_row_tokens)), whole), 1e3 * tolerance);
}

TEST_P(RopeOfLongRows, RecomputedIntermediatesTurnByTheAnglesOfTheForwardPass) {
  RunConfig run = run_of(long_row_tokens, 13);
  run.activation_policy = ActivationPolicy::all;
  const Step saved = step_of(spec_, run);
  run.activation_policy = ActivationPolicy::input;
  const Step recomputed = step_of(spec_, run);
  EXPECT_EQ(recomputed.loss, saved.loss);
  EXPECT_TRUE(recomputed.gradients == saved.gradients);
}

/// Of 8 tokens, in a run whose rows have up to `cutoff_len`.
double loss_of_a_short_row(const ModelSpec& spec, const RunConfig& run) {
  const TokenRow row = row_of(8);
  TrainedModel model(spec, run);
  return model.engine.evaluate({&row, 1});
}

TEST_P(RopeOfLongRows, AnglesChangeWhereFullRowsOutgrowTheOriginalLength) {
  const auto loss = [&](std::int64_t cutoff_len) {
    return loss_of_a_short_row(spec_, run_of(cutoff_len, 8));
  };
  const double at_original_length = loss(original_positions);
  EXPECT_EQ(loss(8), at_original_length);
  EXPECT_NE(loss(original_positions + 1), at_original_length);
}

TEST(RopeOfRows, AnglesOfOtherScalingsDependOnNoLength) {
  const RopeSpec yarn{
      .type = RopeType::yarn, .factor = 4.0, .original_max_position_embeddings = original_positions};
  const RopeSpec llama3{
      .type = RopeType::llama3, .factor = 8.0, .original_max_position_embeddings = original_positions};
  const RopeSpec linear{.type = RopeType::linear, .factor = 2.0};
  for (const RopeSpec& rope : {RopeSpec{}, linear, yarn, llama3}) {
    const ModelSpec spec = spec_of(rope);
    EXPECT_EQ(loss_of_a_short_row(spec, run_of(8, 8)), loss_of_a_short_row(spec, run_of(long_row_tokens, 8)));
  }
}

TEST(RopeOfRows, HfRoundsTheAnglesOfTheModelWithoutChangingThem) {
  RunConfig run = run_of(long_row_tokens, 13);
  const Step exact = step_of(spec_of({}), run);
  run.rope = RopePrecision::hf;
  const Step hf = step_of(spec_of({}), run);
  EXPECT_FALSE(hf.gradients == exact.gradients);
  // Angles of up to 60, rounded to fp32, err by 60 · 2^-24, times as much as a gradient depends on them.
  EXPECT_LE(distance(hf, exact), 1e-4);
}

}  // namespace
}  // namespace layerstream::test

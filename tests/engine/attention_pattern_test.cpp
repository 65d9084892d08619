// A sparse attention pattern in an engine: what must not change a bit, and what changes.

#include "core/attention_pattern.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

RunConfig window_run() {
  RunConfig run = tiny_run();
  run.attention_pattern.type = AttentionPatternType::window;
  run.attention_pattern.window = 5;
  run.attention_pattern.global_tokens = 2;
  return run;
}

RunConfig blocks_run() {
  RunConfig run = tiny_run();
  run.attention_pattern.type = AttentionPatternType::blocks;
  run.attention_pattern.block = 4;
  run.attention_pattern.local_blocks = 2;
  run.attention_pattern.global_tokens = 1;
  return run;
}

class SparseEngine : public ::testing::TestWithParam<RunConfig> {};

TEST_P(SparseEngine, TrainsToTheSameBitsWhateverItSaves) {
  RunConfig run = GetParam();
  run.chunk_tokens = 9;
  run.activation_policy = ActivationPolicy::input;
  const RunRecord recomputed = train(tiny_spec(), run, 2);
  run.activation_policy = ActivationPolicy::all;
  EXPECT_EQ(train(tiny_spec(), run, 2), recomputed);
  run.attention_pattern.type = AttentionPatternType::full;
  EXPECT_NE(train(tiny_spec(), run, 2).losses, recomputed.losses);
}

TEST_P(SparseEngine, HasTheLossAndNormOfTheWholeRowInChunks) {
  RunConfig run = GetParam();
  const RunRecord whole = train(tiny_spec(), run, 1);
  run.chunk_tokens = 7;
  const RunRecord chunked = train(tiny_spec(), run, 1);
  // fp32 sums in another order (DESIGN: 1e-5).
  EXPECT_NEAR(chunked.losses[0], whole.losses[0], 1e-5 * whole.losses[0]);
  EXPECT_NEAR(chunked.norms[0], whole.norms[0], 1e-5 * whole.norms[0]);
}

TEST_P(SparseEngine, GeneratesTokenByTokenWhatItComputesAtOnce) {
  const ModelSpec spec = tiny_spec();
  std::vector<std::int32_t> tokens;
  for (std::int32_t t = 0; t < 24; ++t) tokens.push_back((7 * t + 3) % 61);
  const auto logits = [&](const RunConfig& run, std::size_t at_once) {
    const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
    Engine engine(spec, run, EngineMode::generate, *device);
    engine.parameters().initialize(11, spec.initializer_range, engine.pool());
    std::vector<float> last;
    for (std::size_t begin = 0; begin < tokens.size(); begin += at_once) {
      last = engine.append(std::span(tokens).subspan(begin, at_once));
    }
    return last;
  };
  const std::vector<float> together = logits(GetParam(), 24), one_by_one = logits(GetParam(), 1);
  const std::vector<float> full = logits(tiny_run(), 24);
  double distance = 0.0, effect = 0.0;
  for (std::size_t i = 0; i < together.size(); ++i) {
    distance = std::max(distance, std::fabs(static_cast<double>(together[i] - one_by_one[i])));
    effect = std::max(effect, std::fabs(static_cast<double>(together[i] - full[i])));
  }
  // fp32 sums in another order, of logits of order one.
  EXPECT_LE(distance, 1e-4);
  EXPECT_GE(effect, 1e-2);
}

INSTANTIATE_TEST_SUITE_P(Patterns, SparseEngine, ::testing::Values(window_run(), blocks_run()),
                         [](const auto& info) { return info.index == 0 ? "window" : "blocks"; });

}  // namespace
}  // namespace layerstream::test

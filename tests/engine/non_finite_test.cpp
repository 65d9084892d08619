// A step with NaN, Inf or an overflow changes nothing.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/half.hpp"
#include "trained_model.hpp"

namespace layerstream::test {
namespace {

class NonFinite : public ::testing::TestWithParam<UpdateMode> {
 protected:
  NonFinite() {
    run_.max_grad_norm = 0.0;
    GetParam().turn(run_);
  }
  std::vector<TokenRow> rows(std::uint64_t seed) const {
    return random_rows(8, run_.cutoff_len, spec_.vocab_size, seed);
  }
  StepResult step(TrainedModel& model, int number) const {
    return model.engine.train_step(rows(static_cast<std::uint64_t>(number)), step_settings(run_, number));
  }
  /// One step that goes well and one that must not count, then further ones; all must be as if the bad one
  /// had never been.
  /// @param damage, repair of the weights around the bad step
  template <class Damage, class Repair>
  void expect_skipped(const Damage& damage, const Repair& repair) {
    TrainedModel model(spec_, run_);
    TrainedModel reference(spec_, run_);
    step(model, 1);
    step(reference, 1);
    model.engine.apply_pending();
    damage(model);
    const auto before = slab_bytes(model.engine.parameters());
    const StepResult bad = step(model, 2);
    EXPECT_FALSE(bad.applied);
    model.engine.apply_pending();
    EXPECT_TRUE(slab_bytes(model.engine.parameters()) == before);
    repair(model);
    for (int number = 2; number <= 4; ++number) {
      const StepResult good = step(model, number);
      const StepResult expected = step(reference, number);
      EXPECT_TRUE(good.applied);
      EXPECT_EQ(good.loss, expected.loss);
      EXPECT_EQ(good.grad_norm, expected.grad_norm);
    }
    model.engine.apply_pending();
    reference.engine.apply_pending();
    EXPECT_TRUE(slab_bytes(model.engine.parameters()) == slab_bytes(reference.engine.parameters()));
  }
  ModelSpec spec_ = tiny_spec(false);
  RunConfig run_ = tiny_run();
};

INSTANTIATE_TEST_SUITE_P(Modes, NonFinite, ::testing::ValuesIn(update_modes()),
                         [](const auto& info) { return info.param.name; });

TEST_P(NonFinite, AStepWithNanOrInfInAWeightIsSkippedWhole) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const int block : {0, 2, 5}) {
      const std::string_view tail = block == 0   ? "embed_tokens.weight"
                                    : block == 2 ? "mlp.up_proj.weight"
                                                 : "lm_head.weight";
      std::vector<float> saved;
      expect_skipped(
          [&](TrainedModel& model) {
            saved = values_of(model.engine.parameters(), block,
                              model.layout().blocks[static_cast<std::size_t>(block)].at(tail));
            model.fill(block, tail, poison);
          },
          [&](TrainedModel& model) {
            model.engine.parameters().write(
                block, model.layout().blocks[static_cast<std::size_t>(block)].at(tail), 0, saved);
            model.engine.parameters().bump_version(block);
          });
    }
  }
}

TEST_P(NonFinite, AGradientWhoseSquareOverflowsIsSkippedThoughItIsFinite) {
  // h is 2^-80 times smaller and W 2^80 times larger: the same logits, but the norm's gradient is of the
  // order 2^80, and its square, which the second moment would take, beyond fp32.
  const int head = 5;
  expect_skipped(
      [&](TrainedModel& model) {
        model.scale(head, "norm.weight", 0x1p-80F);
        model.scale(head, "lm_head.weight", 0x1p80F);
      },
      [&](TrainedModel& model) {
        model.scale(head, "norm.weight", 0x1p80F);
        model.scale(head, "lm_head.weight", 0x1p-80F);
      });
}

TEST(NonFiniteClipped, ALargeFiniteGradientIsClippedAndApplied) {
  const ModelSpec spec = tiny_spec(false);
  const RunConfig run = tiny_run();
  TrainedModel model(spec, run);
  model.scale(5, "norm.weight", 0x1p-80F);
  model.scale(5, "lm_head.weight", 0x1p80F);
  const StepResult result =
      model.engine.train_step(random_rows(8, run.cutoff_len, spec.vocab_size, 1), step_settings(run, 1));
  model.engine.apply_pending();
  EXPECT_TRUE(result.applied);
  EXPECT_GT(result.grad_norm, 0x1p70);
  for (int block = 0; block < model.layout().num_blocks(); ++block) {
    const Slab& slab = model.engine.parameters().slab(block);
    for (std::int64_t i = 0; i < slab.num_elements; ++i) {
      ASSERT_TRUE(std::isfinite(slab.exp_avg[i]) && std::isfinite(slab.exp_avg_sq[i]));
      ASSERT_TRUE(std::isfinite(merge(slab.hi[i], slab.lo[i])));
    }
  }
}

TEST(NonFiniteDeep, DeferredUpdateSkipsTheStepAndImmediateUpdateSaysThatItCannotUndo) {
  const ModelSpec spec = tiny_spec(false);
  RunConfig run = tiny_run();
  run.max_grad_norm = 0.0;
  // Down to block 3 all is well; its own gradient is too large.
  const auto damage = [](TrainedModel& model) {
    model.scale(3, "mlp.up_proj.weight", 0x1p80F);
    model.scale(3, "mlp.down_proj.weight", 0x1p-80F);
  };
  const auto rows = random_rows(8, run.cutoff_len, spec.vocab_size, 1);
  TrainedModel deferred(spec, run);
  damage(deferred);
  const auto before = slab_bytes(deferred.engine.parameters());
  EXPECT_FALSE(deferred.engine.train_step(rows, step_settings(run, 1)).applied);
  deferred.engine.apply_pending();
  EXPECT_TRUE(slab_bytes(deferred.engine.parameters()) == before);

  run.optimizer_update = OptimizerUpdate::immediate;
  TrainedModel immediate(spec, run);
  damage(immediate);
  try {
    immediate.engine.train_step(rows, step_settings(run, 1));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), exit_code::not_finite);
    EXPECT_NE(std::string(error.what()).find("the gradient of block 3 is not finite"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("optimizer_update: deferred"), std::string::npos);
  }
}

}  // namespace
}  // namespace layerstream::test

// What one optimizer step means, whatever the numbers of rows, chunks and targets: accumulation, steps that
// must change nothing, decay, packed documents.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/half.hpp"
#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

template <class Function>
void for_each_parameter(const ModelLayout& layout, const Function& function) {
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      function(block, parameter);
    }
  }
}

std::vector<float> values_of(const ParameterStore& store, int block, const Parameter& parameter) {
  std::vector<float> values(static_cast<std::size_t>(parameter.numel()));
  store.read(block, parameter, 0, values);
  return values;
}

/// An engine with weights from a fixed seed.
class TrainedModel {
 public:
  TrainedModel(const ModelSpec& spec, const RunConfig& run)
      : engine(spec, run, EngineMode::train, device_, {.poison = true}) {
    engine.parameters().initialize(11, spec.initializer_range, engine.pool());
  }

  const ModelLayout& layout() { return engine.parameters().layout(); }

  /// Of the last step, all parameters in order.
  std::vector<std::vector<float>> gradients() {
    std::vector<std::vector<float>> all;
    for_each_parameter(layout(), [&](int block, const Parameter& parameter) {
      all.push_back(engine.gradient(block, parameter));
    });
    return all;
  }

  void fill(int block, std::string_view tail, float value) {
    const Parameter& parameter = layout().blocks[static_cast<std::size_t>(block)].at(tail);
    engine.parameters().write(block, parameter, 0,
                              std::vector<float>(static_cast<std::size_t>(parameter.numel()), value));
    engine.parameters().bump_version(block);
  }

  void scale(int block, std::string_view tail, float factor) {
    const Parameter& parameter = layout().blocks[static_cast<std::size_t>(block)].at(tail);
    std::vector<float> values = values_of(engine.parameters(), block, parameter);
    for (float& value : values) value *= factor;
    engine.parameters().write(block, parameter, 0, values);
    engine.parameters().bump_version(block);
  }

 private:
  SimulatedDevice device_{std::size_t{1} << 30};

 public:
  Engine engine;
};

/// ‖a − b‖ / ‖b‖.
double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<double> in_double(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

/// Eight rows whose numbers of targets go from 1 to all of them.
std::vector<TokenRow> ragged_rows(const ModelSpec& spec, const RunConfig& run) {
  std::vector<TokenRow> rows = random_rows(8, run.cutoff_len, spec.vocab_size, 5);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::int64_t kept = 0;
    for (std::int32_t& target : rows[r].targets) {
      if (target >= 0 && kept++ >= static_cast<std::int64_t>(1 + 3 * r)) target = -100;
    }
  }
  return rows;
}

// --- 11: accumulation ---

// FP32 sums of at most 200 terms in another order: a few units of 6e-8; measured 4e-7 at most.
constexpr double sum_tolerance = 1e-6;

TEST(Accumulation, RaggedLabelsGiveTheSameLossAndGradientsHoweverTheRowsAreDivided) {
  const ModelSpec spec = tiny_spec(false);
  RunConfig run = tiny_run();
  run.chunk_tokens = 1000;
  const std::vector<TokenRow> rows = ragged_rows(spec, run);
  TrainedModel whole(spec, run);
  const StepResult expected = whole.engine.train_step(rows, step_settings(run, 1));
  const auto reference = whole.gradients();
  for (const auto& [batch, accumulation] : {std::pair{8, 1}, std::pair{1, 8}, std::pair{2, 4}}) {
    for (const std::int64_t chunk_tokens : {1000, 40, 7, 3}) {
      run.per_device_train_batch_size = batch;
      run.gradient_accumulation_steps = accumulation;
      run.chunk_tokens = chunk_tokens;
      TrainedModel divided(spec, run);
      const StepResult result = divided.engine.train_step(rows, step_settings(run, 1));
      EXPECT_EQ(result.num_targets, expected.num_targets);
      EXPECT_NEAR(result.loss / expected.loss, 1.0, sum_tolerance);
      EXPECT_NEAR(result.grad_norm / expected.grad_norm, 1.0, sum_tolerance);
      const auto gradients = divided.gradients();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_LT(relative_error(gradients[i], in_double(reference[i])), sum_tolerance)
            << "parameter " << i << ", " << batch << " x " << accumulation << ", chunks of " << chunk_tokens;
      }
    }
  }
}

TEST(Accumulation, TheDivisorIsTheNumberOfTargetsOfTheWholeStep) {
  const ModelSpec spec = tiny_spec(true);
  const RunConfig run = tiny_run();
  const std::vector<TokenRow> rows = ragged_rows(spec, run);
  TrainedModel together(spec, run);
  const StepResult result = together.engine.train_step(rows, step_settings(run, 1));
  const auto gradients = together.gradients();

  double nll = 0.0;
  std::int64_t targets = 0;
  std::vector<std::vector<double>> sums(gradients.size());
  for (const TokenRow& row : rows) {
    TrainedModel alone(spec, run);
    const StepResult single = alone.engine.train_step({&row, 1}, step_settings(run, 1));
    EXPECT_EQ(single.num_targets, row.num_targets());
    const auto weight = static_cast<double>(row.num_targets());
    nll += single.loss * weight;
    targets += row.num_targets();
    const auto parts = alone.gradients();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      sums[i].resize(parts[i].size());
      for (std::size_t j = 0; j < parts[i].size(); ++j) {
        sums[i][j] += static_cast<double>(parts[i][j]) * weight;
      }
    }
  }
  EXPECT_EQ(result.num_targets, targets);
  EXPECT_NEAR(result.loss * static_cast<double>(targets) / nll, 1.0, sum_tolerance);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    for (double& sum : sums[i]) sum /= static_cast<double>(targets);
    EXPECT_LT(relative_error(gradients[i], sums[i]), sum_tolerance) << "parameter " << i;
  }
}

// --- 12: small updates ---

TEST(FullPrecision, UpdatesTooSmallForBf16WeightsMoveTheMasterAndTheModelLearns) {
  const ModelSpec spec = tiny_spec(true);
  RunConfig run = tiny_run();
  run.compute_dtype = DType::bf16;
  run.max_grad_norm = 0.0;
  constexpr double learning_rate = 1e-5;
  constexpr int steps = 100;
  TrainedModel model(spec, run);
  ParameterStore& store = model.engine.parameters();
  std::vector<std::vector<float>> start;
  for_each_parameter(model.layout(), [&](int block, const Parameter& parameter) {
    std::vector<float> values = values_of(store, block, parameter);
    for (float& value : values) value = to_float(to_bf16(value));  // as a bf16 checkpoint loads
    store.write(block, parameter, 0, values);
    start.push_back(values);
  });
  const auto rows = random_rows(4, run.cutoff_len, spec.vocab_size, 3);
  double first_loss = 0.0;
  double last_loss = 0.0;
  for (int step = 1; step <= steps; ++step) {
    const StepResult result = model.engine.train_step(
        rows, {.adamw = {.learning_rate = learning_rate, .step = step}, .max_grad_norm = 0.0});
    (step == 1 ? first_loss : last_loss) = result.loss;
  }
  model.engine.apply_pending();

  std::int64_t large = 0;
  std::int64_t moved = 0;
  std::int64_t rounded_away = 0;
  std::size_t index = 0;
  for_each_parameter(model.layout(), [&](int block, const Parameter& parameter) {
    const std::vector<float> values = values_of(store, block, parameter);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float before = start[index][i];
      if (std::abs(before) < 0.125F) continue;  // spacing of bf16 from here on: at least 2^-10
      ++large;
      // AdamW's step is at most lr (1 - b1) / sqrt(1 - b2) = 3.2 lr.
      const auto step = static_cast<float>(3.2 * learning_rate);
      if (to_float(to_bf16(before - step)) == before && to_float(to_bf16(before + step)) == before) {
        ++rounded_away;
      }
      if (std::abs(values[i] - before) > 5.0F * static_cast<float>(learning_rate)) ++moved;
    }
    ++index;
  });
  ASSERT_GT(large, 1000);
  EXPECT_EQ(rounded_away, large) << "bf16 weights would not move at all";
  EXPECT_GT(moved, large / 2);
  EXPECT_LT(last_loss, first_loss - 0.01);
}

// --- 14: no target ---

class EveryUpdateMode : public ::testing::TestWithParam<OptimizerUpdate> {
 protected:
  EveryUpdateMode() {
    run_.optimizer_update = GetParam();
    run_.max_grad_norm = 0.0;
  }
  ModelSpec spec_ = tiny_spec(false);
  RunConfig run_ = tiny_run();
};

INSTANTIATE_TEST_SUITE_P(Modes, EveryUpdateMode,
                         ::testing::Values(OptimizerUpdate::deferred, OptimizerUpdate::immediate),
                         [](const auto& info) {
                           return info.param == OptimizerUpdate::deferred ? "deferred" : "immediate";
                         });

TEST_P(EveryUpdateMode, AStepWithoutTargetsChangesNothing) {
  TrainedModel with(spec_, run_);
  TrainedModel without(spec_, run_);
  auto masked = random_rows(8, run_.cutoff_len, spec_.vocab_size, 9);
  for (TokenRow& row : masked) std::fill(row.targets.begin(), row.targets.end(), -100);
  for (int step = 1; step <= 3; ++step) {
    // Also while the update of the step before is pending.
    const StepResult nothing = with.engine.train_step(masked, step_settings(run_, step));
    EXPECT_FALSE(nothing.applied);
    EXPECT_EQ(nothing.num_targets, 0);
    EXPECT_GT(nothing.num_tokens, 0);
    EXPECT_TRUE(std::isnan(nothing.loss)) << "a loss of 0 would look like success";
    const auto rows = random_rows(8, run_.cutoff_len, spec_.vocab_size, static_cast<std::uint64_t>(step));
    const StepResult a = with.engine.train_step(rows, step_settings(run_, step));
    const StepResult b = without.engine.train_step(rows, step_settings(run_, step));
    EXPECT_TRUE(a.applied);
    EXPECT_EQ(a.loss, b.loss);
  }
  with.engine.apply_pending();
  without.engine.apply_pending();
  const auto after = slab_bytes(with.engine.parameters());
  EXPECT_TRUE(after == slab_bytes(without.engine.parameters()));
  with.engine.train_step(masked, step_settings(run_, 4));
  with.engine.apply_pending();
  EXPECT_TRUE(slab_bytes(with.engine.parameters()) == after);
}

TEST(Accumulation, RowsWithoutTargetsBesideOthersAddNothing) {
  const ModelSpec spec = tiny_spec(false);
  RunConfig run = tiny_run();
  auto rows = random_rows(4, run.cutoff_len, spec.vocab_size, 2);
  TrainedModel model(spec, run);
  const StepResult few = model.engine.train_step(rows, step_settings(run, 1));
  auto more = rows;
  for (TokenRow row : random_rows(4, run.cutoff_len, spec.vocab_size, 3)) {
    std::fill(row.targets.begin(), row.targets.end(), -100);
    more.push_back(std::move(row));
  }
  TrainedModel other(spec, run);
  const StepResult all = other.engine.train_step(more, step_settings(run, 1));
  EXPECT_EQ(all.num_targets, few.num_targets);
  EXPECT_NEAR(all.loss / few.loss, 1.0, sum_tolerance);
  EXPECT_NEAR(all.grad_norm / few.grad_norm, 1.0, sum_tolerance);
}

// --- 15: decay ---

TEST_P(EveryUpdateMode, AZeroGradientDecaysMatricesAndLeavesNormsAndBiasesAlone) {
  for (const BackendChoice backend : {BackendChoice::explicit_copies, BackendChoice::coherent}) {
    run_.backend = backend;
    run_.allow_emulation = backend == BackendChoice::coherent;
    TrainedModel model(spec_, run_);
    ParameterStore& store = model.engine.parameters();
    // Biases and norms that decay would show.
    for_each_parameter(model.layout(), [&](int block, const Parameter& parameter) {
      if (parameter.is_matrix) return;
      std::vector<float> values = values_of(store, block, parameter);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] += 0.25F + 0.01F * static_cast<float>(i);
      store.write(block, parameter, 0, values);
    });
    // With neither norm nor projection the logits are 0 and nothing flows back.
    const int head = model.layout().head();
    model.fill(head, "lm_head.weight", 0.0F);
    model.fill(head, "norm.weight", 0.0F);
    std::vector<std::vector<float>> before;
    for_each_parameter(model.layout(), [&](int block, const Parameter& parameter) {
      before.push_back(values_of(store, block, parameter));
    });

    constexpr double learning_rate = 1e-2;
    constexpr double weight_decay = 0.1;
    const StepResult result = model.engine.train_step(
        random_rows(8, run_.cutoff_len, spec_.vocab_size, 1),
        {.adamw = {.learning_rate = learning_rate, .weight_decay = weight_decay, .step = 1},
         .max_grad_norm = 0.0});
    model.engine.apply_pending();
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.grad_norm, 0.0);
    EXPECT_NEAR(result.loss, std::log(static_cast<double>(spec_.vocab_size)), 1e-6);

    const auto decay = static_cast<float>(-learning_rate * weight_decay);
    std::int64_t decayed = 0;
    std::size_t index = 0;
    for_each_parameter(model.layout(), [&](int block, const Parameter& parameter) {
      const std::vector<float> after = values_of(store, block, parameter);
      const bool vector = parameter.name.ends_with("norm.weight") || parameter.name.ends_with(".bias");
      for (std::size_t i = 0; i < after.size(); ++i) {
        const float value = before[index][i];
        // The contract's formula, bit by bit.
        ASSERT_EQ(after[i], vector ? value : std::fma(decay, value, value)) << parameter.name << " " << i;
        decayed += after[i] != value ? 1 : 0;
      }
      ++index;
    });
    EXPECT_GT(decayed, 10'000);
    for (int block = 0; block < model.layout().num_blocks(); ++block) {
      const Slab& slab = store.slab(block);
      for (std::int64_t i = 0; i < slab.num_elements; ++i) {
        ASSERT_EQ(slab.exp_avg[i], 0.0F);
        ASSERT_EQ(slab.exp_avg_sq[i], 0.0F);
      }
    }
  }
}

// --- 17: packed documents ---

/// Two documents in one row.
struct PackedPair {
  TokenRow a, b;
  TokenRow packed() const {
    TokenRow row = a;
    row.input_ids.insert(row.input_ids.end(), b.input_ids.begin(), b.input_ids.end());
    row.targets.insert(row.targets.end(), b.targets.begin(), b.targets.end());
    row.document_starts.push_back(a.num_tokens());
    return row;
  }
};

TokenRow document(std::int64_t tokens, std::int64_t vocab_size, std::uint64_t seed) {
  TokenRow row;
  row.document_starts = {0};
  for (std::int64_t t = 0; t < tokens; ++t) {
    row.input_ids.push_back(static_cast<std::int32_t>(uniform_at(seed, 1, static_cast<std::uint64_t>(t)) *
                                                      static_cast<double>(vocab_size)));
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    row.targets.push_back(t + 1 < tokens ? row.input_ids[static_cast<std::size_t>(t + 1)] : -100);
  }
  return row;
}

struct Chunking {
  DType compute;
  std::int64_t chunk_tokens;  ///< rows here have 21 tokens, the first document 9 of them
};

void PrintTo(const Chunking& chunking, std::ostream* stream) {
  *stream << name_of(chunking.compute) << " " << chunking.chunk_tokens;
}

class Packed : public ::testing::TestWithParam<Chunking> {
 protected:
  Packed() {
    run_.compute_dtype = GetParam().compute;
    run_.chunk_tokens = GetParam().chunk_tokens;
  }
  ModelSpec spec_ = tiny_spec(false);
  RunConfig run_ = tiny_run();
  PackedPair pair_{document(9, spec_.vocab_size, 1), document(12, spec_.vocab_size, 2)};
};

INSTANTIATE_TEST_SUITE_P(Chunkings, Packed,
                         ::testing::Values(Chunking{DType::f32, 64}, Chunking{DType::f32, 9},
                                           Chunking{DType::f32, 5}, Chunking{DType::bf16, 64},
                                           Chunking{DType::bf16, 9}, Chunking{DType::bf16, 5}),
                         [](const auto& info) {
                           return std::string(name_of(info.param.compute)) + "_chunks_of_" +
                                  std::to_string(info.param.chunk_tokens);
                         });

TEST_P(Packed, EditingADocumentLeavesEveryLogitOfTheNextOneAsItIs) {
  TrainedModel model(spec_, run_);
  PackedPair edited = pair_;
  edited.a = document(9, spec_.vocab_size, 77);
  TokenRow row = pair_.packed();
  TokenRow other = edited.packed();
  ASSERT_NE(row.input_ids, other.input_ids);
  // −log p of each token of the vocabulary at a position tells its logits up to a constant, which p's sum
  // of 1 fixes.
  for (const std::size_t position : {std::size_t{9}, std::size_t{13}, std::size_t{20}}) {
    std::fill(row.targets.begin(), row.targets.end(), -100);
    std::fill(other.targets.begin(), other.targets.end(), -100);
    double probability = 0.0;
    for (std::int32_t token = 0; token < spec_.vocab_size; ++token) {
      row.targets[position] = token;
      other.targets[position] = token;
      const double nll = model.engine.evaluate({&row, 1});
      ASSERT_EQ(nll, model.engine.evaluate({&other, 1})) << "position " << position << ", token " << token;
      probability += std::exp(-nll);
    }
    EXPECT_NEAR(probability, 1.0, 1e-5);  // fp32 softmax
  }
  // The test can fail: the edit does reach the logits of the document itself.
  std::fill(row.targets.begin(), row.targets.end(), -100);
  std::fill(other.targets.begin(), other.targets.end(), -100);
  row.targets[8] = other.targets[8] = 3;
  EXPECT_NE(model.engine.evaluate({&row, 1}), model.engine.evaluate({&other, 1}));
}

TEST_P(Packed, EditingADocumentLeavesTheGradientsOfTheNextOneAsTheyAre) {
  PackedPair edited = pair_;
  edited.a = document(9, spec_.vocab_size, 77);
  TokenRow row = pair_.packed();
  TokenRow other = edited.packed();
  for (std::size_t t = 0; t < 9; ++t) row.targets[t] = other.targets[t] = -100;
  TrainedModel first(spec_, run_);
  TrainedModel second(spec_, run_);
  const StepResult a = first.engine.train_step({&row, 1}, step_settings(run_, 1));
  const StepResult b = second.engine.train_step({&other, 1}, step_settings(run_, 1));
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.grad_norm, b.grad_norm);
  EXPECT_TRUE(first.gradients() == second.gradients());
}

TEST_P(Packed, LossOfThePackedRowIsTheSumOfTheSeparateLosses) {
  TrainedModel model(spec_, run_);
  const TokenRow row = pair_.packed();
  const double packed = model.engine.evaluate({&row, 1});
  const double separate = model.engine.evaluate({&pair_.a, 1}) + model.engine.evaluate({&pair_.b, 1});
  EXPECT_NEAR(packed / separate, 1.0, 1e-6);
}

// --- 21: NaN and Inf ---

class NonFinite : public EveryUpdateMode {
 protected:
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
};

INSTANTIATE_TEST_SUITE_P(Modes, NonFinite,
                         ::testing::Values(OptimizerUpdate::deferred, OptimizerUpdate::immediate),
                         [](const auto& info) {
                           return info.param == OptimizerUpdate::deferred ? "deferred" : "immediate";
                         });

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

// What one optimizer step means, whatever the numbers of rows, chunks and targets: accumulation, steps that
// must change nothing, decay.

#include <gtest/gtest.h>

#include <cmath>

#include "core/half.hpp"
#include "tests/backends/forwarding_device.hpp"
#include "trained_model.hpp"

namespace layerstream::test {
namespace {

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

// The bound for FP32: loss, norm, and the gradient as a whole.
constexpr double sum_tolerance = 1e-6;
// A single parameter's: the terms of a key bias's gradient cancel (softmax does not see what all keys share),
// so that the same rounding is more of what is left. Measured: 1.4e-6.
constexpr double parameter_tolerance = 3e-6;

/// Initial weights as models have them: large ones amplify, layer by layer, what sums in another order
/// differ.
ModelSpec calm_spec(bool tied) {
  ModelSpec spec = tiny_spec(tied);
  spec.initializer_range = 0.05;
  return spec;
}

/// One by one and as a whole.
void expect_same(const std::vector<std::vector<float>>& gradients,
                 const std::vector<std::vector<double>>& reference) {
  std::vector<float> all;
  std::vector<double> all_reference;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_LT(relative_error(gradients[i], reference[i]), parameter_tolerance) << "parameter " << i;
    all.insert(all.end(), gradients[i].begin(), gradients[i].end());
    all_reference.insert(all_reference.end(), reference[i].begin(), reference[i].end());
  }
  EXPECT_LT(relative_error(all, all_reference), sum_tolerance);
}

TEST(Accumulation, RaggedLabelsGiveTheSameLossAndGradientsHoweverTheRowsAreDivided) {
  const ModelSpec spec = calm_spec(false);
  RunConfig run = tiny_run();
  run.chunk_tokens = 1000;
  const std::vector<TokenRow> rows = ragged_rows(spec, run);
  TrainedModel whole(spec, run);
  const StepResult expected = whole.engine.train_step(rows, step_settings(run, 1));
  std::vector<std::vector<double>> reference;
  for (const std::vector<float>& gradient : whole.gradients()) {
    reference.emplace_back(gradient.begin(), gradient.end());
  }
  for (const std::int64_t chunk_tokens : {1000, 40, 24, 7, 3}) {
    std::vector<std::vector<std::vector<float>>> divisions;
    for (const auto& [batch, accumulation] : {std::pair{8, 1}, std::pair{1, 8}, std::pair{2, 4}}) {
      SCOPED_TRACE(fmt::format("{} x {}, chunks of {}", batch, accumulation, chunk_tokens));
      run.per_device_train_batch_size = batch;
      run.gradient_accumulation_steps = accumulation;
      run.chunk_tokens = chunk_tokens;
      TrainedModel divided(spec, run);
      const StepResult result = divided.engine.train_step(rows, step_settings(run, 1));
      EXPECT_EQ(result.num_targets, expected.num_targets);
      EXPECT_NEAR(result.loss / expected.loss, 1.0, sum_tolerance);
      EXPECT_NEAR(result.grad_norm / expected.grad_norm, 1.0, sum_tolerance);
      divisions.push_back(divided.gradients());
      expect_same(divisions.back(), reference);
      EXPECT_TRUE(divisions.back() == divisions.front()) << "how rows are divided leaves no trace";
    }
  }
}

TEST(Accumulation, TheDivisorIsTheNumberOfTargetsOfTheWholeStep) {
  const ModelSpec spec = calm_spec(true);
  const RunConfig run = tiny_run();
  const std::vector<TokenRow> rows = ragged_rows(spec, run);
  TrainedModel together(spec, run);
  const StepResult result = together.engine.train_step(rows, step_settings(run, 1));

  double nll = 0.0;
  std::int64_t targets = 0;
  std::vector<std::vector<double>> sums;
  for (const TokenRow& row : rows) {
    TrainedModel alone(spec, run);
    const StepResult single = alone.engine.train_step({&row, 1}, step_settings(run, 1));
    EXPECT_EQ(single.num_targets, row.num_targets());
    const auto weight = static_cast<double>(row.num_targets());
    nll += single.loss * weight;
    targets += row.num_targets();
    const auto parts = alone.gradients();
    sums.resize(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      sums[i].resize(parts[i].size());
      for (std::size_t j = 0; j < parts[i].size(); ++j) {
        sums[i][j] += static_cast<double>(parts[i][j]) * weight;
      }
    }
  }
  EXPECT_EQ(result.num_targets, targets);
  EXPECT_NEAR(result.loss * static_cast<double>(targets) / nll, 1.0, sum_tolerance);
  for (std::vector<double>& sum : sums) {
    for (double& value : sum) value /= static_cast<double>(targets);
  }
  expect_same(together.gradients(), sums);
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

// --- state that lives on the device ---

/// Else the next step would take the host's older copy for what counts.
TEST(ResidentState, OfTheHostIsNotHandedOutWhileTheDeviceHasANewerOne) {
  const ModelSpec spec = tiny_spec(true);
  RunConfig run = tiny_run();
  run.resident_blocks = 2;
  TrainedModel model(spec, run);
  const auto rows = random_rows(8, run.cutoff_len, spec.vocab_size, 1);
  model.engine.train_step(rows, step_settings(run, 1));
  EXPECT_NO_THROW(model.engine.parameters()) << "the first update still waits";
  model.engine.train_step(rows, step_settings(run, 2));
  EXPECT_THROW(model.engine.parameters(), ContractError);
  model.engine.apply_pending();
  const auto after = slab_bytes(model.engine.parameters());

  TrainedModel straight(spec, run);
  straight.engine.train_step(rows, step_settings(run, 1));
  straight.engine.train_step(rows, step_settings(run, 2));
  straight.engine.apply_pending();
  EXPECT_TRUE(slab_bytes(straight.engine.parameters()) == after);
}

// --- the coherent backend ---

/// Counts what kernels copy.
class CountingDevice final : public ForwardingDevice {
 public:
  CountingDevice()
      : ForwardingDevice(make_test_device(std::size_t{1} << 30)), link_(ForwardingDevice::kernel_link()) {}
  Link& kernel_link() override { return link_; }
  std::size_t bytes() const { return link_.bytes; }

 private:
  struct CountingLink final : Link {
    explicit CountingLink(Link& link) : link(link) {}
    void copy(void* to, const void* from, std::size_t count, StreamView stream) override {
      bytes += count;
      link.copy(to, from, count, stream);
    }
    Link& link;
    std::size_t bytes = 0;
  };
  CountingLink link_;
};

TEST(Promotion, ByAKernelWhereItIsAskedFor) {
  const ModelSpec spec = tiny_spec(false);
  for (const bool by_kernel : {false, true}) {
    RunConfig run = tiny_run();
    run.backend = BackendChoice::coherent;
    run.allow_emulation = true;
    run.promotes_by_kernel = by_kernel;
    CountingDevice device;
    Engine engine(spec, run, EngineMode::train, device);
    const std::size_t before = device.bytes();
    engine.train_step(random_rows(8, run.cutoff_len, spec.vocab_size, 1), step_settings(run, 1));
    EXPECT_EQ(device.bytes() > before, by_kernel);
  }
}

TEST(Promotion, IsNotTheExplicitBackends) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  for (const bool in_place : {false, true}) {
    RunConfig run = tiny_run();
    run.backend = BackendChoice::explicit_copies;
    run.optimizer_device_share = 0.0;
    (in_place ? run.updates_in_place : run.promotes_by_kernel) = true;
    EXPECT_THROW(Engine(tiny_spec(false), run, EngineMode::train, *device), ConfigError);
  }
}

// --- 14: no target ---

class EveryUpdateMode : public ::testing::TestWithParam<UpdateMode> {
 protected:
  EveryUpdateMode() {
    run_.max_grad_norm = 0.0;
    GetParam().turn(run_);
  }
  ModelSpec spec_ = tiny_spec(false);
  RunConfig run_ = tiny_run();
};

INSTANTIATE_TEST_SUITE_P(Modes, EveryUpdateMode, ::testing::ValuesIn(update_modes()),
                         [](const auto& info) { return info.param.name; });

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
        // AdamW's formula with moments of 0, bit by bit.
        ASSERT_EQ(after[i], vector ? value : value + decay * value) << parameter.name << " " << i;
        decayed += after[i] != value ? 1 : 0;
      }
      ++index;
    });
    EXPECT_GT(decayed, 10'000);
    for (int block = 0; block < model.layout().num_blocks(); ++block) {
      const Slab& slab = store.slab(block);
      for (std::int64_t i = 0; i < slab.num_elements; ++i) {
        ASSERT_EQ(slab.exp_avg[i], 0.0F)
            << "block " << block << ", element " << i << " of " << slab.num_elements;
        ASSERT_EQ(slab.exp_avg_sq[i], 0.0F);
      }
    }
  }
}

}  // namespace
}  // namespace layerstream::test

#include "engine/step_prediction.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "backends/explicit/explicit_backend.hpp"
#include "backends/simulated_device.hpp"
#include "engine/memory_plan.hpp"
#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

using Resource = MachineResource;

HardwareProfile h200() {
  return load_hardware_profile(std::filesystem::path(std::getenv("LAYERSTREAM_TEST_DATA")).parent_path() /
                               "profiles" / "hardware" / "h200-pcie5-128g.yaml");
}

/// The settings of benches/results/2026-11-29-train-step-h200.md.
RunConfig recorded_run(std::int64_t step_tokens) {
  RunConfig run;
  run.cutoff_len = 1024;
  run.per_device_train_batch_size = step_tokens / 1024;
  run.gradients_on_host = false;
  run.resident_blocks = 3;
  run.optimizer_device_share = 0.35;
  return run;
}

StepPrediction predict(const HardwareProfile& profile, const ModelSpec& spec, const RunConfig& run) {
  SimulatedDevice device(std::size_t{1} << 40);
  ExplicitBackend backend(device.link());
  EngineShape shape = make_engine_shape(spec, run, EngineMode::train, device);
  plan_memory(shape, backend, device);
  const ChunkPlan chunks =
      uniform_chunk_plan(run.per_device_train_batch_size, run.cutoff_len, shape.bounds.chunk_tokens);
  return predict_step(profile, shape, chunks, planned_block_costs(shape, backend));
}

/// A single operation on its own or beside others, from the start.
double seconds_beside(const HardwareProfile& profile, const std::vector<Operation>& operations,
                      std::size_t which) {
  EngineShape shape;
  shape.layout = make_layout(qwen2_5_7b());
  const ChunkPlan chunks;
  const Schedule schedule{.operations = operations};
  const SimulatedRun run = simulate(schedule, OperationCosts(profile, shape, chunks).of(schedule));
  return run.times[which].end - run.times[which].begin;
}

TEST(OperationCosts, TheOptimizerAndFullDuplexCopiesSlowEachOtherAsMeasured) {
  // Measured on that machine: 4.4e9 parameters a second alone, 3.0e9 beside copies of state both ways, which
  // then move 76.8 GB/s.
  const HardwareProfile profile = h200();
  const Operation update{.kind = OperationKind::update,
                         .lane = Lane::host,
                         .block = 1,
                         .bytes = 28'000'000'000,
                         .dependencies = {}};
  const auto copy = [](OperationKind kind, Lane lane) {
    return Operation{.kind = kind, .lane = lane, .block = 1, .bytes = 200'000'000'000, .dependencies = {}};
  };
  const Operation in = copy(OperationKind::load_state, Lane::h2d);
  const Operation out = copy(OperationKind::store_state, Lane::update_out);
  EXPECT_NEAR(1.0 / seconds_beside(profile, {update}, 0), 4.4, 0.01);
  // The rates are built in; 2% for what rounds differ.
  EXPECT_NEAR(1.0 / seconds_beside(profile, {update, in, out}, 0), 3.0, 0.06);
  EXPECT_NEAR(200.0 / seconds_beside(profile, {in}, 0), 55.4, 0.1);
  // Both ways without the optimizer: 99 GB/s together.
  EXPECT_NEAR(400.0 / seconds_beside(profile, {in, out}, 1), 99.0, 1.0);
  // Copies run on alone after the update, so a longer update shows them beside it all the time.
  Operation long_update = update;
  long_update.bytes *= 100;
  EXPECT_NEAR(400.0 / seconds_beside(profile, {long_update, in, out}, 1), 76.8, 1.0);
}

TEST(OperationCosts, ACopyCostsItsLatencyBesideItsBytes) {
  // 17, 48 and 55 GB/s for 64 KiB, 1 MiB and 16 MiB measured there.
  for (const auto& [bytes, rate] : {std::pair{65536, 17e9}, {1 << 20, 48e9}, {16 << 20, 55e9}}) {
    const Operation load{
        .kind = OperationKind::load_input, .lane = Lane::h2d, .block = 1, .bytes = bytes, .dependencies = {}};
    EXPECT_NEAR(bytes / seconds_beside(h200(), {load}, 0) / rate, 1.0, 0.05) << bytes;
  }
}

TEST(StepPrediction, OneH200sRecordedStepsArePredictedWithinTenPercent) {
  // Medians of benches/results/2026-11-29-train-step-h200.md; the tolerance is the one that plans promise.
  for (const auto& [tokens, seconds] : {std::pair{8192, 1.912}, {32768, 3.547}, {65536, 6.023}}) {
    const StepPrediction prediction = predict(h200(), qwen2_5_7b(), recorded_run(tokens));
    std::printf("%d tokens: %.3f s, recorded %.3f\n%s", tokens, prediction.run.seconds, seconds,
                prediction.report.to_table().c_str());
    EXPECT_NEAR(prediction.run.seconds / seconds, 1.0, 0.10) << tokens << " tokens";
  }
}

TEST(StepPrediction, ATinyModelsStepIsAccountedForToTheLastMicrosecond) {
  const StepPrediction prediction = predict(h200(), tiny_spec(), tiny_run());
  EXPECT_DOUBLE_EQ(prediction.report.seconds, prediction.run.seconds);
  double whole = prediction.report.of(Lane::compute).busy;
  for (const WaitCause cause : all_wait_causes) whole += prediction.report.wait(cause);
  EXPECT_NEAR(whole, prediction.run.seconds, 1e-9);
  for (const double use : prediction.run.use) EXPECT_LE(use, 1.0 + 1e-9);
  const auto is_update = [](const Operation& operation) { return operation.kind == OperationKind::update; };
  EXPECT_TRUE(std::ranges::any_of(prediction.schedule.operations, is_update)) << "the step before's";
}

TEST(StepPrediction, AFasterMachineIsNeverSlower) {
  const RunConfig run = recorded_run(8192);
  const HardwareProfile base = h200();
  const double seconds = predict(base, qwen2_5_7b(), run).run.seconds;
  const auto faster = [&](const char* what, const std::function<void(HardwareProfile&)>& change) {
    HardwareProfile profile = base;
    change(profile);
    // Work conserving lanes in a fixed order, but for a thousandth from the feedback of the resting card.
    EXPECT_LE(predict(profile, qwen2_5_7b(), run).run.seconds, seconds * 1.001) << what;
  };
  for (const double factor : {1.1, 1.5, 4.0}) {
    faster("link", [&](HardwareProfile& p) {
      p.link.to_device_bytes_per_second.value *= factor;
      p.link.to_host_bytes_per_second.value *= factor;
      p.link.duplex_bytes_per_second.value *= factor;
    });
    faster("host", [&](HardwareProfile& p) {
      p.host.adamw_parameters_per_second.value *= factor;
      p.host.adamw_beside_copies_parameters_per_second.value *= factor;
      p.host.copies_beside_adamw_bytes_per_second.value *= factor;
    });
    faster("device memory", [&](HardwareProfile& p) { p.device.copy_bytes_per_second.value *= factor; });
    faster("no launches", [&](HardwareProfile& p) { p.device.kernel_seconds.value /= factor; });
  }
}

TEST(StepPrediction, APlannersSearchCanAskThousandsOfTimes) {
  const auto start = std::chrono::steady_clock::now();
  const StepPrediction prediction = predict(h200(), qwen2_5_7b(), recorded_run(65536));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  RecordProperty("operations", static_cast<int>(prediction.schedule.operations.size()));
  std::printf("%zu operations in %.1f ms\n", prediction.schedule.operations.size(), 1e3 * seconds);
  // Tens of milliseconds; the bound is for a loaded machine and a build with sanitizers.
  EXPECT_LT(seconds, 5.0);
}

}  // namespace
}  // namespace layerstream::test

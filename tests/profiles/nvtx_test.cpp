// Ranges as a profiler sees them: NVTX loads the stub as it would load Nsight Systems.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "nvtx_stub.hpp"
#include "ops/elementwise.hpp"
#include "ops/runtime.hpp"
#include "profiles/nvtx/annotation.hpp"
#include "tests/engine/engine_fixture.hpp"
#include "tests/support/shared_libraries.hpp"

namespace layerstream::test {
namespace {

/// Made before the runtime, by main.
ops::KernelLabels* kernel_labels = nullptr;

class NvtxTest : public ::testing::Test {
 protected:
  // NVTX looks at the environment at its first call.
  static void SetUpTestSuite() { ::setenv("NVTX_INJECTION64_PATH", LAYERSTREAM_NVTX_STUB, 1); }

  void SetUp() override {
    annotation_ = make_annotation();
    ASSERT_NE(annotation_, nullptr) << "the stub was not loaded";
    (void)take_nvtx_ranges();
  }
  void TearDown() override { EXPECT_EQ(nvtx_surplus_pops(), 0); }

  std::unique_ptr<ExecutionObserver> annotation_;
};

TEST_F(NvtxTest, EveryOperationOfAStepIsARangeWithAConstantNameAndItsPayload) {
  SimulatedDevice device(std::size_t{1} << 30);
  RunConfig run = tiny_run();
  run.optimizer_device_share = 0.5;  // lanes of the device's update too
  const ModelSpec spec = tiny_spec();
  Engine engine(spec, run, EngineMode::train, device, {.poison = false, .observer = annotation_.get()});
  engine.parameters().initialize(1, spec.initializer_range, engine.pool());
  const auto rows = random_rows(8, 24, spec.vocab_size, 1);
  for (std::int64_t step = 1; step <= 2; ++step) {
    (void)engine.train_step(rows, {.adamw = {.learning_rate = 1e-3, .step = step}, .max_grad_norm = 1.0});
    const std::vector<NvtxRange> ranges = take_nvtx_ranges();
    const Schedule& schedule = engine.schedule();
    ASSERT_EQ(ranges.size(), schedule.operations.size());
    // By lane in order, since lanes run beside each other.
    std::map<std::string, std::vector<const NvtxRange*>> by_lane;
    for (const NvtxRange& range : ranges) by_lane[range.category].push_back(&range);
    std::map<std::string, std::size_t> next;
    for (const Operation& operation : schedule.operations) {
      const std::string lane(name_of(operation.lane));
      ASSERT_LT(next[lane], by_lane[lane].size());
      const NvtxRange& range = *by_lane[lane][next[lane]++];
      EXPECT_EQ(range.domain, "layerstream");
      EXPECT_EQ(range.name, name_of(operation.kind)) << "numbers belong in the payload";
      EXPECT_TRUE(range.registered);
      EXPECT_TRUE(range.closed);
      EXPECT_EQ(range.thread, "layerstream " + lane);
      const std::map<std::string, double> payload{
          {"step", static_cast<double>(step)}, {"bytes", static_cast<double>(operation.bytes)},
          {"flops", operation.flops},          {"block", operation.block},
          {"chunk", operation.chunk},          {"piece", operation.piece}};
      EXPECT_EQ(range.payload, payload);
    }
    EXPECT_EQ(by_lane.size(), next.size());
    EXPECT_EQ(next.contains("update"), step == 2) << "the first step has nothing to update";
  }
}

TEST_F(NvtxTest, KernelsAreRangesInsideTheirOperationsWhileOperationsRun) {
  annotation_ = make_annotation(kernel_labels);
  SimulatedDevice device(std::size_t{1} << 30);
  const ModelSpec spec = tiny_spec();
  Engine engine(spec, tiny_run(), EngineMode::train, device,
                {.poison = false, .observer = annotation_.get()});
  engine.parameters().initialize(1, spec.initializer_range, engine.pool());
  const auto rows = random_rows(8, 24, spec.vocab_size, 1);
  (void)engine.train_step(rows, {.adamw = {.learning_rate = 1e-3, .step = 1}, .max_grad_norm = 1.0});
  const std::vector<NvtxRange> ranges = take_nvtx_ranges();
  std::set<std::string> kernels;
  for (const NvtxRange& range : ranges) {
    EXPECT_TRUE(range.closed);
    if (range.registered) continue;
    EXPECT_EQ(range.thread, "layerstream compute");
    kernels.insert(range.name);
  }
  EXPECT_EQ(ranges.size() - static_cast<std::size_t>(std::ranges::count_if(
                                ranges, [](const NvtxRange& range) { return !range.registered; })),
            engine.schedule().operations.size());
  EXPECT_GE(kernels.size(), 5U);
  for (const std::string& kernel : kernels) EXPECT_THAT(kernel, ::testing::StartsWith("layerstream::"));
  // Between steps nobody listens.
  std::vector<float> values(8, 1.0F);
  ops::fill_zero({.stream = StreamView::host(),
                  .workspace = nullptr,
                  .workspace_bytes = 0,
                  .libraries = shared_libraries()},
                 TensorView(values.data(), {8}));
  EXPECT_THAT(take_nvtx_ranges(), ::testing::IsEmpty());
}

/// Fails at one operation.
class FailingRunner final : public OperationRunner {
 public:
  void run(const Operation& operation, StreamView) override {
    if (operation.block == 2) throw Error("here");
  }
};

TEST_F(NvtxTest, RangesAreClosedWhenAnOperationFails) {
  for (const Lane failing : all_lanes) {
    SimulatedDevice device(std::size_t{1} << 20);
    Executor executor(device);
    Schedule schedule;
    for (int block = 0; block < 4; ++block) {
      schedule.operations.push_back(
          {.kind = OperationKind::backward, .lane = failing, .block = block, .dependencies = {}});
    }
    FailingRunner runner;
    EXPECT_THROW(executor.run(schedule, runner, annotation_.get()), Error);
    const std::vector<NvtxRange> ranges = take_nvtx_ranges();
    EXPECT_EQ(ranges.size(), 3U) << name_of(failing);
    for (const NvtxRange& range : ranges) EXPECT_TRUE(range.closed);
  }
}

}  // namespace
}  // namespace layerstream::test

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  layerstream::ops::KernelLabels labels;
  layerstream::test::kernel_labels = &labels;
  const layerstream::ops::Runtime runtime;
  const layerstream::test::SharedLibraries libraries;
  return RUN_ALL_TESTS();
}

// What a training step asks of the CUDA runtime once it is warm: no memory, and no thread waits for the
// device but the host lane's, for what it reads, and the caller's at the end of the step.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <mutex>
#include <set>

#include "core/cuda_error.hpp"
#include "cuda_calls.hpp"
#include "engine_fixture.hpp"

namespace layerstream::test {
namespace {

/// Tags calls with the number of operations that have been issued, and learns the threads of lanes.
class StepObserver final : public ExecutionObserver {
 public:
  void begin() {
    issued_ = 0;
    tag_cuda_calls(0);
  }
  void before(int, const Operation& operation) override {
    const std::lock_guard lock(mutex_);
    threads_[static_cast<std::size_t>(operation.lane)].insert(std::this_thread::get_id());
  }
  void after(int, const Operation&) override {
    const std::lock_guard lock(mutex_);
    tag_cuda_calls(++issued_);
  }

  std::set<std::thread::id> threads(Lane lane) const { return threads_[static_cast<std::size_t>(lane)]; }

 private:
  int issued_ = 0;
  std::mutex mutex_;
  std::array<std::set<std::thread::id>, all_lanes.size()> threads_;
};

struct Setting {
  std::string name;
  std::function<void(RunConfig&)> turn;
};

void PrintTo(const Setting& setting, std::ostream* stream) {
  *stream << setting.name;
}

class WarmStep : public ::testing::TestWithParam<Setting> {};

std::size_t free_device_memory() {
  std::size_t free = 0, total = 0;
  LAYERSTREAM_CUDA(cudaMemGetInfo(&free, &total));
  return free;
}

TEST_P(WarmStep, AllocatesNothingAndItsLanesOfKernelsNeverWait) {
  const ModelSpec spec = tiny_spec(true);
  RunConfig run = tiny_run();
  GetParam().turn(run);
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  StepObserver observer;
  Engine engine(spec, run, EngineMode::train, *device, {.observer = &observer});
  engine.parameters().initialize(11, spec.initializer_range, engine.pool());
  ASSERT_EQ(engine.host_pin()->shortfall(), "");
  // The same rows each time: what a new shape needs is made at its first use.
  const auto rows = random_rows(8, run.cutoff_len, spec.vocab_size, 1);
  const auto train = [&](int step) {
    observer.begin();
    EXPECT_TRUE(engine.train_step(rows, step_settings(run, step)).applied);
  };
  train(1);

  constexpr int last_step = 6;
  std::size_t free_when_warm = 0;
  for (int step = 2; step <= last_step; ++step) {
    SCOPED_TRACE(fmt::format("step {}", step));
    record_cuda_calls();
    train(step);
    const std::vector<CudaCall> calls = recorded_cuda_calls();
    const int operations = static_cast<int>(engine.schedule().operations.size());
    int stream_waits = 0;
    for (const CudaCall& call : calls) {
      SCOPED_TRACE(fmt::format("{} after {} of {} operations", call.name, call.tag, operations));
      switch (call.kind) {
        case CudaCall::Kind::stream_wait:
          ++stream_waits;
          EXPECT_EQ(call.tag, operations) << "inside the step";
          EXPECT_EQ(call.thread, std::this_thread::get_id());
          break;
        case CudaCall::Kind::event_wait:
          EXPECT_FALSE(observer.threads(Lane::compute).contains(call.thread) ||
                       observer.threads(Lane::update).contains(call.thread))
              << "on a lane of kernels";
          break;
        case CudaCall::Kind::synchronous_copy:
          // Kokkos brings tables to the device when a source file's kernels are first launched.
          if (step == 2) break;
          [[fallthrough]];
        case CudaCall::Kind::allocation:
        case CudaCall::Kind::device_wait:
        case CudaCall::Kind::pageable_copy:
          ADD_FAILURE() << "not in a warm step";
          break;
      }
    }
    // One for each lane but the host's: the calls are seen, and the step ends once.
    EXPECT_EQ(stream_waits, static_cast<int>(all_lanes.size()) - 1);
    // Step 2 is the first that updates: its kernels are loaded then, which takes memory.
    if (step == 2) free_when_warm = free_device_memory();
    if (step > 2) {
      EXPECT_EQ(free_device_memory(), free_when_warm) << "libraries took device memory";
    }
  }
  EXPECT_EQ(observer.threads(Lane::host).size(), 1U);
  EXPECT_FALSE(observer.threads(Lane::host).contains(std::this_thread::get_id()));
}

INSTANTIATE_TEST_SUITE_P(Settings, WarmStep,
                         ::testing::Values(Setting{"bf16",
                                                   [](RunConfig& run) { run.compute_dtype = DType::bf16; }},
                                           Setting{"fp32", [](RunConfig&) {}},
                                           Setting{"long_rows_all_activations_saved_on_the_host",
                                                   [](RunConfig& run) {
                                                     run.compute_dtype = DType::bf16;
                                                     run.chunk_tokens = 7;
                                                     run.activation_policy = ActivationPolicy::all;
                                                   }},
                                           Setting{"all_updates_by_the_device_gradients_there",
                                                   [](RunConfig& run) {
                                                     run.compute_dtype = DType::bf16;
                                                     run.optimizer_device_share = 1.0;
                                                     run.gradients_on_host = false;
                                                   }},
                                           Setting{"all_updates_by_the_host",
                                                   [](RunConfig& run) { run.optimizer_device_share = 0.0; }},
                                           Setting{"immediate_updates",
                                                   [](RunConfig& run) {
                                                     run.optimizer_update = OptimizerUpdate::immediate;
                                                     run.max_grad_norm = 0.0;
                                                   }},
                                           Setting{"coherent_emulated",
                                                   [](RunConfig& run) {
                                                     run.backend = BackendChoice::coherent;
                                                     run.allow_emulation = true;
                                                   }}),
                         [](const auto& info) { return info.param.name; });

/// The counter sees what it is there for.
TEST(CudaCalls, AreSeenFromThisProgramAndFromTheLibrariesItIsLinkedWith) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 20);
  const auto names = [](const auto& function) {
    record_cuda_calls();
    function();
    std::vector<std::string> all;
    for (const CudaCall& call : recorded_cuda_calls()) all.push_back(call.name);
    return all;
  };
  std::unique_ptr<DeviceRegion> region;
  EXPECT_EQ(names([&] { region = device->allocate(64); }), std::vector<std::string>{"cudaMalloc"});
  std::vector<float> pageable(16);
  const auto copy = [&] {
    LAYERSTREAM_CUDA(cudaMemcpyAsync(pageable.data(), region->data(), 64, cudaMemcpyDefault,
                                     static_cast<cudaStream_t>(device->stream(Lane::d2h).native())));
  };
  EXPECT_EQ(names(copy), std::vector<std::string>{"cudaMemcpyAsync"});
  EXPECT_EQ(names([&] { LAYERSTREAM_CUDA(cudaDeviceSynchronize()); }),
            std::vector<std::string>{"cudaDeviceSynchronize"});
  EXPECT_EQ(names([&] { device->synchronize(); }),
            std::vector<std::string>(all_lanes.size() - 1, "cudaStreamSynchronize"));
  EXPECT_EQ(names([&] { region.reset(); }), std::vector<std::string>{"cudaFree"});
}

}  // namespace
}  // namespace layerstream::test

// An engine that is made around the state of another: placement changes, nothing of the result does.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <set>
#include <utility>

#include "core/signals.hpp"
#include "engine_fixture.hpp"
#include "tests/backends/forwarding_device.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::HasSubstr;

struct Placement {
  std::string name;
  std::function<void(RunConfig&)> set;
};

/// What is placed differently in each of them is the next one's opposite.
std::vector<Placement> placements() {
  return {{"streams_all", [](RunConfig&) {}},
          {"resident_two_all_saved_on_device",
           [](RunConfig& run) {
             run.resident_blocks = 2;
             run.weight_slots = 3;
             run.activation_policy = ActivationPolicy::all;
             run.device_activation_blocks = 4;
             run.optimizer_device_share = 0.9;
             run.gradients_on_host = false;
           }},
          {"all_saved_on_host",
           [](RunConfig& run) {
             run.weight_slots = 1;
             run.activation_policy = ActivationPolicy::all;
             run.optimizer_device_share = 0.9;
             run.optimizer_threads = 2;
           }},
          {"micro_batch_major_all_resident",
           [](RunConfig& run) {
             run.loop_order = LoopOrder::micro_batch_major;
             run.resident_blocks = 6;
           }},
          {"host_alone", [](RunConfig& run) { run.optimizer_device_share = 0.0; }}};
}

/// The same of engines whose kernels reach host memory. Without tied embeddings most bring only the used rows
/// of the embedding's gradient to the host, where gradients of other blocks or activations lay in those that
/// do not.
std::vector<Placement> coherent_placements() {
  std::vector<Placement> all{
      {"host_alone", [](RunConfig& run) { run.optimizer_device_share = 0.0; }},
      {"resident_two_gradients_of_others_on_host",
       [](RunConfig& run) {
         run.resident_blocks = 2;
         run.optimizer_device_share = 0.0;
       }},
      {"in_place_all",
       [](RunConfig& run) {
         run.optimizer_device_share = 1.0;
         run.updates_in_place = true;
       }},
      {"in_place_gradients_on_device_all_saved_on_host",
       [](RunConfig& run) {
         run.optimizer_device_share = 1.0;
         run.updates_in_place = true;
         run.gradients_on_host = false;
         run.activation_policy = ActivationPolicy::all;
       }},
      {"in_place_promoted_by_kernels_saved_on_device",
       [](RunConfig& run) {
         run.optimizer_device_share = 0.9;
         run.updates_in_place = true;
         run.promotes_by_kernel = true;
         run.device_activation_blocks = 4;
         run.weight_slots = 3;
       }},
  };
  for (Placement& placement : all) {
    placement.set = [set = placement.set](RunConfig& run) {
      set(run);
      run.backend = BackendChoice::coherent;
      run.allow_emulation = true;
    };
  }
  return all;
}

RunConfig placed(const Placement& placement) {
  RunConfig run = tiny_run();
  placement.set(run);
  return run;
}

TEST(ReplannedEngine, TheStateIsLaidOutFirstAndAlikeInEveryPlacement) {
  for (const bool tied : {true, false}) {
    const ModelSpec spec = tiny_spec(tied);
    std::set<std::vector<std::ptrdiff_t>> layouts;
    std::set<std::size_t> sizes;
    for (const Placement& placement : placements()) {
      const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
      auto engine = std::make_unique<Engine>(spec, placed(placement), EngineMode::train, *device);
      const ParameterStore& store = std::as_const(*engine).parameters();
      std::vector<std::ptrdiff_t> places;
      const void* const first = store.slab(0).hi;
      for (int block = 0; block < store.layout().num_blocks(); ++block) {
        const Slab& slab = store.slab(block);
        for (const void* const part :
             {static_cast<const void*>(slab.hi), static_cast<const void*>(slab.lo),
              static_cast<const void*>(slab.exp_avg), static_cast<const void*>(slab.exp_avg_sq)}) {
          places.push_back(static_cast<const std::byte*>(part) - static_cast<const std::byte*>(first));
        }
      }
      const Slab& last = store.slab(store.layout().num_blocks() - 1);
      const std::size_t end = static_cast<std::size_t>(places.back()) +
                              static_cast<std::size_t>(last.num_elements) * sizeof(float);
      EXPECT_LE(end, ParameterStore::bytes(make_layout(spec)));
      EXPECT_LT(ParameterStore::bytes(make_layout(spec)), end + Arena::alignment);
      layouts.insert(places);
      const std::shared_ptr<HostRegion> state = Engine::release_state(std::move(engine));
      EXPECT_EQ(state->data(), first);
      EXPECT_EQ(state.use_count(), 1);
      sizes.insert(state->bytes());
    }
    EXPECT_EQ(layouts.size(), 1U);
    EXPECT_GE(sizes.size(), 3U) << "placements of one size prove little";
  }
}

/// A device that is asked for a rehearsal like a GPU.
class RehearsingDevice final : public ForwardingDevice {
 public:
  RehearsingDevice() : ForwardingDevice(make_test_device(std::size_t{1} << 30)) {}
  bool uses_host_memory() const override { return false; }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override {
    if (is_taken_) throw ResourceError("another process was faster");
    return ForwardingDevice::allocate(bytes);
  }
  void take_memory() { is_taken_ = true; }

 private:
  bool is_taken_ = false;
};

using Training = std::tuple<DType, bool, bool, bool, bool>;

class ReplannedTraining : public ::testing::TestWithParam<Training> {};

std::string name_of_training(const ::testing::TestParamInfo<Training>& info) {
  const auto [compute, tied, coherent, rehearses, poison] = info.param;
  return fmt::format("{}_{}_{}{}{}", compute == DType::f32 ? "fp32" : "bf16", tied ? "tied" : "untied",
                     coherent ? "coherent" : "explicit", rehearses ? "_rehearsing" : "",
                     poison ? "_poisoned" : "");
}

/// Every placement after every other.
TEST_P(ReplannedTraining, IsTheUninterruptedOneBitForBit) {
  const auto [compute, tied, coherent, rehearses, poison] = GetParam();
  const ModelSpec spec = tiny_spec(tied);
  std::vector<RunConfig> runs;
  for (const Placement& placement : coherent ? coherent_placements() : placements()) {
    runs.push_back(placed(placement));
    runs.back().compute_dtype = compute;
  }
  // Of a prime number, each stride goes round all.
  ASSERT_EQ(runs.size(), 5U);
  std::vector<std::size_t> order{0};
  for (std::size_t stride = 1; stride < runs.size(); ++stride) {
    for (std::size_t i = 0; i < runs.size(); ++i) order.push_back((order.back() + stride) % runs.size());
  }
  static std::map<std::pair<DType, bool>, RunRecord> references;  // of one placement, which changes no bit
  const auto [reference, is_new] = references.try_emplace({compute, tied});
  if (is_new) reference->second = train(spec, runs[0], static_cast<int>(order.size()));
  const RunRecord& expected = reference->second;

  const std::unique_ptr<Device> device = rehearses
                                             ? std::unique_ptr<Device>(std::make_unique<RehearsingDevice>())
                                             : make_test_device(std::size_t{1} << 30);
  std::unique_ptr<Engine> engine;
  RunRecord record;
  std::set<std::size_t> sizes;
  int emitting = 0;
  int step = 0;
  for (const std::size_t index : order) {
    EngineMemory memory;
    if (engine) {
      engine->apply_pending();
      memory.state = Engine::release_state(std::move(engine));
      if (device->overhead_bytes() == 0) {
        EXPECT_EQ(device->used_bytes(), 0U);
      }
    }
    const RunConfig& run = runs[index];
    engine = std::make_unique<Engine>(spec, run, EngineMode::train, *device,
                                      EngineDiagnostics{.poison = poison}, memory);
    if (memory.state) sizes.insert(memory.state->bytes());
    if (engine->shape().schedule.emits_embedding_rows()) ++emitting;
    if (!memory.state) engine->parameters().initialize(11, spec.initializer_range, engine->pool());
    ++step;
    const auto rows = random_rows(8, run.cutoff_len, spec.vocab_size, static_cast<std::uint64_t>(step));
    const StepResult result = engine->train_step(rows, step_settings(run, step));
    record.losses.push_back(result.loss);
    record.norms.push_back(result.grad_norm);
  }
  engine->apply_pending();
  record.slabs = slab_bytes(engine->parameters());
  EXPECT_EQ(record.losses, expected.losses);
  EXPECT_EQ(record.norms, expected.norms);
  EXPECT_TRUE(record.slabs == expected.slabs);
  EXPECT_EQ(emitting > 0, coherent && !tied);
  EXPECT_GE(sizes.size(), 3U) << "memory that does not change its size proves little";
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ReplannedTraining,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16), ::testing::Bool(),
                                            ::testing::Bool(), ::testing::Bool(), ::testing::Bool()),
                         name_of_training);

TEST(ReplannedEngine, StateThatIsStillOnTheDeviceIsNotGivenUp) {
  const ModelSpec spec = tiny_spec();
  RunConfig run = tiny_run();
  run.resident_blocks = 2;
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  auto engine = std::make_unique<Engine>(spec, run, EngineMode::train, *device);
  engine->parameters().initialize(11, spec.initializer_range, engine->pool());
  engine->train_step(random_rows(8, run.cutoff_len, spec.vocab_size, 1), step_settings(run, 1));
  EXPECT_THAT(message_of<ContractError>([&] { Engine::release_state(std::move(engine)); }),
              HasSubstr("apply_pending"));
}

TEST(ReplannedEngine, MemoryThatCannotHoldTheStateIsRefused) {
  const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
  const EngineMemory memory{.progress = {}, .state = std::make_shared<HostRegion>(4096)};
  EXPECT_THAT(message_of<ContractError>(
                  [&] { Engine(tiny_spec(), tiny_run(), EngineMode::train, *device, {}, memory); }),
              HasSubstr("4096 B of memory"));
}

TEST(ReplannedEngine, WhereDeviceMemoryIsRefusedTheHostsHasKeptItsSize) {
  const ModelSpec spec = tiny_spec();
  RunConfig run = tiny_run();
  run.activation_policy = ActivationPolicy::all;
  RehearsingDevice device;
  std::shared_ptr<HostRegion> state =
      Engine::release_state(std::make_unique<Engine>(spec, run, EngineMode::train, device));
  const std::size_t bytes = state->bytes();
  run.device_activation_blocks = 4;
  device.take_memory();
  EXPECT_EQ(message_of<ResourceError>([&] {
              Engine(spec, run, EngineMode::train, device, {}, EngineMemory{.progress = {}, .state = state});
            }),
            "another process was faster");
  EXPECT_EQ(state->bytes(), bytes);
}

TEST(Rehearsal, AStopIsHonouredBetweenItsOperations) {
  RehearsingDevice device;
  RunConfig run = tiny_run();
  run.pin_memory = PinMemory::off;
  std::map<std::string, std::size_t, std::less<>> told;
  std::size_t operations = 0;
  const auto make = [&](std::size_t stop_at) {
    told.clear();
    const EngineMemory memory{.progress =
                                  [&](std::string_view phase, std::size_t done, std::size_t total) {
                                    ++told[std::string(phase)];
                                    if (phase != "rehearsing a step") return;
                                    operations = total;
                                    // Asked once, it stays asked for.
                                    if (told[std::string(phase)] >= stop_at)
                                      throw Interrupted("stopped by SIGTERM");
                                    EXPECT_LT(done, total);
                                  },
                              .state = {}};
    const Engine engine(tiny_spec(), run, EngineMode::train, device, {}, memory);
  };
  make(SIZE_MAX);
  EXPECT_GT(told["rehearsing a step"], 20U);
  EXPECT_GT(operations, told["rehearsing a step"]);
  for (const std::size_t stop_at : {1, 5, 20}) {
    EXPECT_EQ(message_of<Interrupted>([&] { make(stop_at); }), "stopped by SIGTERM");
    EXPECT_EQ(told["rehearsing a step"], stop_at + 1) << "once more to learn what stopped it";
    if (device.overhead_bytes() == 0) {
      EXPECT_EQ(device.used_bytes(), 0U);
    }
  }
}

}  // namespace
}  // namespace layerstream::test

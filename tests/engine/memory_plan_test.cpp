// The ledger that `plan` prints is the ledger of the run, and what cannot fit is refused before anything is
// allocated.

#include "engine/memory_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numa.h>

#include <functional>
#include <set>

#include "backends/simulated_device.hpp"
#include "engine_fixture.hpp"
#include "tests/backends/forwarding_device.hpp"

namespace layerstream::test {
namespace {

using ::testing::HasSubstr;

/// What `plan` computes for a run: no memory.
Ledger planned_ledger(const ModelSpec& spec, const RunConfig& run, EngineMode mode, Device& device) {
  const std::unique_ptr<MemoryBackend> backend = make_backend(run, device);
  EngineShape shape = make_engine_shape(spec, run, mode, device);
  return plan_memory(shape, *backend, device);
}

/// For a simulated device, which every build has.
Ledger planned_ledger(const ModelSpec& spec, const RunConfig& run, EngineMode mode) {
  SimulatedDevice device(0);
  return planned_ledger(spec, run, mode, device);
}

std::size_t bytes_of(const Ledger& ledger, Space space, const std::string& component) {
  for (const LedgerLine& line : ledger.lines()) {
    if (line.space == space && line.component == component) return line.bytes;
  }
  ADD_FAILURE() << "no line '" << component << "' in\n" << ledger.to_table();
  return 0;
}

std::vector<std::string> lines_of(const Ledger& ledger) {
  std::vector<std::string> lines;
  for (const LedgerLine& line : ledger.lines()) {
    lines.push_back(fmt::format("{} {}: {}", name_of(line.space), line.component, line.bytes));
  }
  return lines;
}

struct Updates {
  const char* name;
  OptimizerUpdate when;
  double device_share;
  bool gradients_on_host;
  int resident_blocks = 0;
};
constexpr Updates all_updates[] = {
    {"immediate", OptimizerUpdate::immediate, 0.0, true},
    {"deferred", OptimizerUpdate::deferred, 0.0, true},
    {"half by the device", OptimizerUpdate::deferred, 0.5, false},
    {"all by the device, gradients on the host", OptimizerUpdate::deferred, 1.0, true},
    {"all by the device", OptimizerUpdate::deferred, 1.0, false},
    {"two blocks resident", OptimizerUpdate::deferred, 0.5, true, 2},
};

/// Elements of the gradients of all blocks that wait on the device.
std::size_t kept_elements(const ModelSpec& spec, const RunConfig& run) {
  SimulatedDevice device(0);
  const EngineShape shape = make_engine_shape(spec, run, EngineMode::train, device);
  std::size_t sum = 0;
  for (int block = 0; block < shape.layout.num_blocks(); ++block) {
    sum += static_cast<std::size_t>(shape.schedule.device_update.kept(block));
  }
  return sum;
}

/// Calls function(spec, run, mode, description) for the product of all that changes a buffer.
void for_each_run(
    const std::function<void(const ModelSpec&, const RunConfig&, EngineMode, const std::string&)>& function) {
  for (const EngineMode mode : {EngineMode::train, EngineMode::generate}) {
    for (const bool tied : {true, false}) {
      for (const DType compute : {DType::f32, DType::bf16}) {
        for (const BackendChoice backend : {BackendChoice::explicit_copies, BackendChoice::coherent}) {
          for (const ActivationPolicy policy :
               {ActivationPolicy::input, ActivationPolicy::input_attention, ActivationPolicy::all}) {
            for (const int on_device : {0, 1, 100}) {
              for (const Updates& updates : all_updates) {
                for (const std::int64_t chunk_tokens : {7, 40}) {
                  RunConfig run = tiny_run();
                  run.compute_dtype = compute;
                  run.backend = backend;
                  run.allow_emulation = true;
                  run.activation_policy = policy;
                  run.device_activation_blocks = on_device;
                  run.activation_chunks = on_device == 1 ? 2 : 100;
                  run.optimizer_update = updates.when;
                  run.max_grad_norm = updates.when == OptimizerUpdate::immediate ? 0.0 : 1.0;
                  run.optimizer_device_share = updates.device_share;
                  run.gradients_on_host = updates.gradients_on_host;
                  run.resident_blocks = updates.resident_blocks;
                  run.chunk_tokens = chunk_tokens;
                  run.weight_slots = chunk_tokens == 7 ? 3 : 2;
                  function(
                      tiny_spec(tied), run, mode,
                      fmt::format(
                          "generate {}, tied {}, {}, coherent {}, policy {}, {} on the device, {}, chunks of {}",
                          mode == EngineMode::generate, tied, name_of(compute),
                          backend == BackendChoice::coherent, static_cast<int>(policy), on_device,
                          updates.name, chunk_tokens));
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(MemoryPlan, LedgerOfTheRunEqualsThePlanLineByLine) {
  std::set<std::size_t> device_totals;
  for_each_run(
      [&](const ModelSpec& spec, const RunConfig& run, EngineMode mode, const std::string& description) {
        SCOPED_TRACE(description);
        const std::unique_ptr<Device> device = make_test_device(std::size_t{1} << 30);
        const Engine engine(spec, run, mode, *device);
        const Ledger planned = planned_ledger(spec, run, mode, *device);
        EXPECT_EQ(lines_of(engine.ledger()), lines_of(planned));
        device_totals.insert(planned.total(Space::device));
      });
  EXPECT_GT(device_totals.size(), 40U);  // the settings do change something
}

TEST(MemoryPlan, PlanOfAProcessAddsDataAndProcessToTheEngine) {
  SimulatedDevice device(0);  // plans are made for any device
  const RunPlan plan = plan_run(tiny_spec(), tiny_run(), device, 12'345);
  const std::vector<std::string> engine_lines =
      lines_of(planned_ledger(tiny_spec(), tiny_run(), EngineMode::train));
  std::vector<std::string> lines = lines_of(plan.ledger);
  ASSERT_GT(lines.size(), engine_lines.size());
  lines.resize(engine_lines.size());
  EXPECT_EQ(lines, engine_lines);
  EXPECT_EQ(bytes_of(plan.ledger, Space::host, "training data"), 12'345U);
  EXPECT_GT(bytes_of(plan.ledger, Space::host, "process (code, libraries, stacks)"), 0U);
  EXPECT_EQ(plan.shape.slot_bytes % 256, 0U);
}

TEST(MemoryPlan, DeviceThatHasExactlyThePlannedBytesIsEnough) {
  const RunConfig run = tiny_run();
  const auto any = make_test_device(0);
  const Ledger planned = planned_ledger(tiny_spec(), run, EngineMode::train, *any);
  const auto device = make_test_device(planned.total(Space::device) - any->overhead_bytes());
  Engine engine(tiny_spec(), run, EngineMode::train, *device);
  engine.parameters().initialize(11, 0.2, engine.pool());
  EXPECT_TRUE(engine.train_step(random_rows(8, run.cutoff_len, 61, 1), step_settings(run, 1)).applied);
  EXPECT_THROW(device->allocate(1), ResourceError);  // all of it is in use
}

/// Parameters of a model, and the most that padding can add to the elements of its slabs.
struct Count {
  explicit Count(const ModelSpec& spec) {
    const ModelLayout layout = make_layout(spec);
    parameters = static_cast<std::size_t>(layout.num_parameters());
    blocks = layout.blocks.size();
  }
  /// 63 elements behind the matrices and 63 behind the vectors of each block, and 255 B behind each array.
  std::size_t padding(std::size_t bytes_per_element, std::size_t arrays) const {
    return blocks * (126 * bytes_per_element + 255 * arrays);
  }
  std::size_t parameters = 0;
  std::size_t blocks = 0;
};

TEST(MemoryPlan, StateTakesTwelveBytesPerParameter) {
  for_each_run(
      [](const ModelSpec& spec, const RunConfig& run, EngineMode mode, const std::string& description) {
        SCOPED_TRACE(description);
        const Ledger ledger = planned_ledger(spec, run, mode);
        const Count count(spec);
        std::size_t state = bytes_of(ledger, Space::host, "weights, upper halves (bf16)") +
                            bytes_of(ledger, Space::host, "weights, lower halves");
        const bool train = mode == EngineMode::train;
        if (train) state += bytes_of(ledger, Space::host, "Adam moments (fp32)");
        const std::size_t per_parameter = train ? 12 : 4;
        EXPECT_GE(state, per_parameter * count.parameters);
        EXPECT_LE(state, per_parameter * count.parameters + count.padding(per_parameter, 4));
      });
}

TEST(MemoryPlan, HostGradientsTakeFourBytesPerParameterOrAShortRing) {
  for_each_run(
      [](const ModelSpec& spec, const RunConfig& run, EngineMode mode, const std::string& description) {
        SCOPED_TRACE(description);
        const Ledger ledger = planned_ledger(spec, run, mode);
        if (mode == EngineMode::generate) {
          for (const LedgerLine& line : ledger.lines())
            EXPECT_THAT(line.component, ::testing::Not(HasSubstr("gradient")));
          return;
        }
        const std::size_t gradients = bytes_of(ledger, Space::host, "gradients (fp32)");
        const Count count(spec);
        if (run.optimizer_update == OptimizerUpdate::deferred) {
          const std::size_t kept = 4 * kept_elements(spec, run);
          EXPECT_GE(gradients + kept, 4 * count.parameters);
          EXPECT_LE(gradients + kept, 4 * count.parameters + count.padding(4, 1));
          if (kept == 0) return;
          const std::size_t on_device =
              bytes_of(ledger, Space::device, "gradients that stay on the device (fp32)");
          EXPECT_GE(on_device, kept);
          EXPECT_LE(on_device, kept + 255 * count.blocks);
          return;
        }
        // Two slabs of the largest block, and beside them a tied embedding's own.
        const ModelLayout layout = make_layout(spec);
        std::size_t largest = 0;
        for (const BlockLayout& block : layout.blocks) {
          largest = std::max(largest, static_cast<std::size_t>(block.num_elements));
        }
        const auto embedding = static_cast<std::size_t>(layout.blocks[0].num_elements);
        EXPECT_LE(gradients, 4 * (2 * largest + (spec.tie_word_embeddings ? embedding : 0)) + 3 * 255);
        EXPECT_LT(gradients, 4 * count.parameters);
      });
}

/// A model of 120 billion parameters, and the machine of the paper.
ModelSpec large_spec() {
  ModelSpec spec;
  spec.vocab_size = 128'256;
  spec.hidden_size = 12'288;
  spec.intermediate_size = 36'864;
  spec.num_hidden_layers = 69;
  spec.num_attention_heads = 96;
  spec.num_key_value_heads = 8;
  spec.head_dim = 128;
  spec.max_position_embeddings = 131'072;
  return spec;
}

RunConfig large_run() {
  RunConfig run;
  run.cutoff_len = 131'072;
  run.per_device_train_batch_size = 1;
  run.optimizer_threads = 1;
  return run;
}

TEST(MemoryPlan, StateInTransitTakesThreePiecesHoweverLargeTheModel) {
  RunConfig run = large_run();
  for (const bool on_host : {true, false}) {
    run.gradients_on_host = on_host;
    run.optimizer_device_share = 0.5;
    const Ledger ledger = planned_ledger(large_spec(), run, EngineMode::train);
    // 16 Mi elements each, of two halves, two moments and a gradient that comes from the host.
    EXPECT_EQ(bytes_of(ledger, Space::device, "optimizer state in transit"),
              3 * (std::size_t{16} << 20) * (on_host ? 16 : 12));
  }
  run.optimizer_device_share = 0.0;
  run.gradients_on_host = false;  // of no share
  const Ledger none = planned_ledger(large_spec(), run, EngineMode::train);
  for (const LedgerLine& line : none.lines()) {
    EXPECT_THAT(line.component, ::testing::Not(HasSubstr("transit")));
    EXPECT_THAT(line.component, ::testing::Not(HasSubstr("kept")));
  }
}

TEST(MemoryPlan, IsMadeForMachinesThatAreNotHere) {
  const std::size_t parameters = Count(large_spec()).parameters;
  ASSERT_GT(parameters, 110'000'000'000U);
  const Ledger ledger = planned_ledger(large_spec(), large_run(), EngineMode::train);
  const std::size_t state = bytes_of(ledger, Space::host, "weights, upper halves (bf16)") +
                            bytes_of(ledger, Space::host, "weights, lower halves") +
                            bytes_of(ledger, Space::host, "Adam moments (fp32)");
  EXPECT_NEAR(static_cast<double>(state) / static_cast<double>(parameters), 12.0, 1e-3);
}

/// Counts what is asked of it.
class CountingDevice final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes) override {
    ++num_allocations;
    return ForwardingDevice::allocate(bytes);
  }
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>& progress) override {
    ++num_pins;
    return ForwardingDevice::pin(data, bytes, required, progress);
  }

  DeviceCapabilities capabilities() const override { return {shares_pages, shares_pages}; }

  int num_allocations = 0;
  int num_pins = 0;
  bool shares_pages = false;
};

/// The message with which the engine refuses a run. Expects exit code 2 and no allocation.
std::string refusal_of(const ModelSpec& spec, const RunConfig& run, std::size_t device_limit) {
  CountingDevice device(device_limit);
  std::string message;
  try {
    const Engine engine(spec, run, EngineMode::train, device);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), exit_code::refused);
    message = error.what();
  }
  EXPECT_EQ(device.num_allocations, 0);
  EXPECT_EQ(device.num_pins, 0);
  return message;
}

TEST(MemoryCheck, DeviceLimitThatIsTooSmallIsNamedWithNeedAndHave) {
  const Ledger planned = planned_ledger(tiny_spec(), tiny_run(), EngineMode::train);
  const std::size_t need = planned.total(Space::device);
  const std::string message = refusal_of(tiny_spec(), tiny_run(), need - 1);
  EXPECT_THAT(message, HasSubstr(fmt::format("device memory: need {}", format_bytes(need))));
  EXPECT_THAT(message, HasSubstr(fmt::format("have {}", format_bytes(need - 1))));
  EXPECT_THAT(message, HasSubstr(": 1 B short"));
  EXPECT_THAT(message, HasSubstr("device_memory_limit"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("host memory: need")));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("host_memory_limit")));
}

TEST(MemoryCheck, HostLimitThatIsTooSmallIsNamedWithNeedAndHave) {
  const Ledger planned = planned_ledger(tiny_spec(), tiny_run(), EngineMode::train);
  // A simulated device is host memory too.
  const std::size_t need = planned.total(Space::host) + planned.total(Space::device);
  RunConfig run = tiny_run();
  run.host_memory_limit = need - 1;
  const std::string message = refusal_of(tiny_spec(), run, std::size_t{1} << 30);
  EXPECT_THAT(message, HasSubstr(fmt::format("host memory: need {}", format_bytes(need))));
  EXPECT_THAT(message, HasSubstr(fmt::format("have {} (host_memory_limit)", format_bytes(need - 1))));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("device memory: need")));

  run.host_memory_limit = need;
  SimulatedDevice device(std::size_t{1} << 30);
  EXPECT_NO_THROW(Engine(tiny_spec(), run, EngineMode::train, device));
}

TEST(MemoryCheck, BothLimitsAreNamedAtOnceWithEveryComponentAndARemedy) {
  RunConfig run = large_run();
  run.host_memory_limit = std::size_t{1} << 30;
  const std::string message = refusal_of(large_spec(), run, std::size_t{1} << 20);
  EXPECT_THAT(message, HasSubstr("device memory: need"));
  EXPECT_THAT(message, HasSubstr("have 1.00 MiB (simulated device"));
  EXPECT_THAT(message, HasSubstr("host memory: need"));
  EXPECT_THAT(message, HasSubstr("have 1.00 GiB (host_memory_limit)"));
  const Ledger planned = planned_ledger(large_spec(), run, EngineMode::train);
  for (const LedgerLine& line : planned.lines()) {
    EXPECT_THAT(message, HasSubstr(line.component));
  }
  EXPECT_THAT(message, HasSubstr("lower chunk_tokens"));
}

TEST(MemoryCheck, WithoutAHostLimitTheFileThatBindsIsNamed) {
  const std::string message = refusal_of(large_spec(), large_run(), std::size_t{1} << 50);
  EXPECT_THAT(message, HasSubstr("host memory: need"));
  EXPECT_THAT(message, ::testing::ContainsRegex("have .*\\(/(proc|sys)/"));
}

TEST(MemoryCheck, CoherentBackendMustBeAskedForTwiceOnADeviceWithoutCoherentMemory) {
  RunConfig run = tiny_run();
  run.backend = BackendChoice::coherent;
  const std::string message = refusal_of(tiny_spec(), run, std::size_t{1} << 30);
  EXPECT_THAT(message, HasSubstr("backend: coherent"));
  EXPECT_THAT(message, HasSubstr("allow_emulation"));
}

TEST(MemoryCheck, AnAttentionPatternOverAWindowOfTheModelsOwnIsRefused) {
  RunConfig run = tiny_run();
  run.attention_pattern.type = AttentionPatternType::window;
  run.attention_pattern.window = 5;
  ModelSpec spec = tiny_spec();
  spec.sliding_window = 8;
  spec.first_window_layer = spec.num_hidden_layers - 1;
  EXPECT_THAT(refusal_of(spec, run, std::size_t{1} << 30),
              ::testing::AllOf(HasSubstr("attention_pattern"), HasSubstr("sliding_window: 8"),
                               HasSubstr("set attention_pattern: full")));
}

TEST(MemoryPlan, OfAnAttentionPatternNeedsNoMoreThanTheJoiningOfItsRanges) {
  const CountingDevice device(std::size_t{80} << 30);
  const auto workspace = [&](const RunConfig& run) {
    EngineShape shape = make_engine_shape(qwen2_5_7b(), run, EngineMode::train, device);
    return decoder_workspace(shape.spec, shape.bounds.chunk_tokens, shape.bounds.group_tokens, DType::bf16,
                             true, shape.bounds.row_tokens, true);
  };
  RunConfig run;
  run.cutoff_len = 65536;
  const std::size_t full = workspace(run);
  run.attention_pattern.type = AttentionPatternType::blocks;
  run.attention_pattern.block = 1024;
  run.attention_pattern.local_blocks = 4;
  EXPECT_EQ(workspace(run), full);
  run.attention_pattern.global_tokens = 64;
  EXPECT_EQ(workspace(run), full);  // chunks of 8,192 tokens are no longer than a tile of attention
  run.chunk_tokens = 16384;
  EXPECT_LE(workspace(run), full + (std::size_t{400} << 20));
}

TEST(MemoryCheck, ImmediateUpdatesByTheDeviceAreRefused) {
  RunConfig run = tiny_run();
  run.optimizer_update = OptimizerUpdate::immediate;
  run.max_grad_norm = 0.0;
  run.optimizer_device_share = 0.5;
  const std::string message = refusal_of(tiny_spec(), run, std::size_t{1} << 30);
  EXPECT_THAT(message, HasSubstr("optimizer_device_share"));
  EXPECT_THAT(message, HasSubstr("optimizer_update: deferred"));
}

TEST(MemoryCheck, HostMemoryIsPinnedUnlessTurnedOff) {
  for (const PinMemory pin : {PinMemory::automatic, PinMemory::required, PinMemory::off}) {
    RunConfig run = tiny_run();
    run.pin_memory = pin;
    CountingDevice device(std::size_t{1} << 30);
    const Engine engine(tiny_spec(), run, EngineMode::train, device);
    EXPECT_EQ(device.num_pins, pin == PinMemory::off ? 0 : 1);
    EXPECT_EQ(engine.host_pin() == nullptr, pin == PinMemory::off);
  }
}

TEST(MemoryCheck, HostMemoryThatTheDeviceReachesAnywayIsPinnedOnlyIfRequired) {
  for (const PinMemory pin : {PinMemory::automatic, PinMemory::required, PinMemory::off}) {
    RunConfig run = tiny_run();
    run.pin_memory = pin;
    CountingDevice device(std::size_t{1} << 30);
    device.shares_pages = true;
    const Engine engine(tiny_spec(), run, EngineMode::train, device);
    EXPECT_EQ(engine.backend().name(), "coherent");
    EXPECT_EQ(device.num_pins, pin == PinMemory::required ? 1 : 0);
  }
}

TEST(MemoryCheck, AMemoryNodeThatIsNotThereIsRefusedNamingThoseThatAre) {
  RunConfig run = tiny_run();
  run.numa = "977";
  const std::string message = refusal_of(tiny_spec(), run, std::size_t{1} << 30);
  EXPECT_THAT(message, HasSubstr("977"));
  EXPECT_THAT(message, HasSubstr("node 0"));
}

TEST(MemoryCheck, HostMemoryLiesOnTheNodeItIsBoundTo) {
  if (numa_available() < 0) GTEST_SKIP() << "this system has no NUMA support";
  RunConfig run = tiny_run();
  run.numa = "0";
  CountingDevice device(std::size_t{1} << 30);
  const Engine engine(tiny_spec(), run, EngineMode::train, device);
  EXPECT_EQ(engine.host_node().node, 0);
  EXPECT_THAT(engine.host_memory_warnings(), ::testing::IsEmpty());
  const PageResidency& residency = engine.host_residency();
  if (!residency.known()) GTEST_SKIP() << residency.to_text();
  EXPECT_EQ(residency.absent, 0u);
  EXPECT_EQ(residency.share_elsewhere(0), 0.0);
}

TEST(MemoryCheck, ImmediateUpdateWithClippingIsRefused) {
  RunConfig run = tiny_run();
  run.optimizer_update = OptimizerUpdate::immediate;
  const std::string message = refusal_of(tiny_spec(), run, std::size_t{1} << 30);
  EXPECT_THAT(message, HasSubstr("optimizer_update: immediate"));
  EXPECT_THAT(message, HasSubstr("max_grad_norm: 0"));
}

}  // namespace
}  // namespace layerstream::test

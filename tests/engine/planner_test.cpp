#include "engine/planner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "backends/described_device.hpp"
#include "core/error.hpp"
#include "engine/longest_row.hpp"
#include "engine/machine_table.hpp"
#include "engine_fixture.hpp"
#include "profiles/hardware/shipped_profiles.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint64_t gib = 1ULL << 30;

RunConfig run_of(std::int64_t step_tokens, std::optional<std::uint64_t> device_limit = {}) {
  RunConfig run;
  run.cutoff_len = 1024;
  run.per_device_train_batch_size = step_tokens / 1024;
  run.device_memory_limit = device_limit;
  return run;
}

Plan plan_on(const std::string& machine, const ModelSpec& spec, const RunConfig& run) {
  const HardwareProfile profile = find_hardware_profile(machine);
  DescribedDevice device = described_device(profile, run);
  return plan_placement(spec, run,
                        {.profile = profile, .device = device, .host = described_host(profile, run)}, 0);
}

std::string refusal_on(const std::string& machine, const ModelSpec& spec, const RunConfig& run) {
  try {
    (void)plan_on(machine, spec, run);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), exit_code::refused);
    return error.what();
  }
  return "";
}

TEST(Planner, A7BModelLivesOnAnH200AndStreamsThroughASmallCard) {
  const Plan large = plan_on("h200-pcie5-128g", qwen2_5_7b(), run_of(32768));
  EXPECT_GE(*large.config.resident_blocks, 25);
  EXPECT_EQ(*large.config.loop_order, LoopOrder::micro_batch_major);
  EXPECT_EQ(*large.config.activation_policy, ActivationPolicy::all);
  const Plan small = plan_on("h200-pcie5-128g", qwen2_5_7b(), run_of(32768, 16 * gib));
  EXPECT_LE(*small.config.resident_blocks, 2);
  EXPECT_EQ(*small.config.loop_order, LoopOrder::layer_major);
  EXPECT_LT(small.tokens_per_second(), large.tokens_per_second());
}

TEST(Planner, EveryKeyIsDecidedAndEverythingFits) {
  for (const std::string& machine : shipped_profile_names()) {
    const HardwareProfile profile = find_hardware_profile(machine);
    // Less than the state of 8 layers, so that some stream.
    const RunConfig run = run_of(8192, 16 * gib);
    const ModelSpec spec = qwen2_5_7b(8);
    const Plan plan = plan_on(machine, spec, run);
    const RunConfig& c = plan.config;
    EXPECT_TRUE(c.chunk_tokens && c.weight_slots && c.loop_order && c.activation_policy &&
                c.activation_blocks && c.activation_chunks && c.device_activation_blocks &&
                c.optimizer_device_share && c.resident_blocks && c.gradients_on_host)
        << machine;
    EXPECT_LE(plan.memory.ledger.total(Space::device), described_device(profile, run).memory_limit());
    EXPECT_LE(plan.memory.ledger.total(Space::host), described_host(profile, run).bytes);
    EXPECT_FALSE(plan.bottleneck.what.empty());
    EXPECT_FALSE(plan.bottleneck.relief.empty());
    EXPECT_THAT(plan.placement_yaml(), AllOf(HasSubstr("resident_blocks: "), HasSubstr("loop_order: ")));
    // The same question has the same answer.
    EXPECT_EQ(plan.placement_yaml(), plan_on(machine, spec, run).placement_yaml());
  }
}

TEST(Planner, MoreDeviceMemoryNeverMakesAStepMuchSlower) {
  for (const std::int64_t step_tokens : {8192, 16384}) {
    double fastest = 0.0;
    // From a model that streams to one that is resident with all that it keeps.
    for (const std::uint64_t limit : {13, 16, 24, 36, 56, 80}) {
      const double speed =
          plan_on("h200-pcie5-128g", qwen2_5_7b(10), run_of(step_tokens, limit * gib)).tokens_per_second();
      // The search finds a local optimum: within 2% of what a smaller card has.
      EXPECT_GE(speed, 0.98 * fastest) << limit << " GiB, " << step_tokens << " tokens";
      fastest = std::max(fastest, speed);
    }
  }
}

TEST(Planner, GivenKeysAreObeyed) {
  // Left alone it would choose 2 slots, input+attention of 1 block, 10 blocks' on the device, 45%, 8 resident
  // blocks and gradients on the device.
  const std::vector<std::function<void(RunConfig&)>> settings{
      [](RunConfig& run) { run.weight_slots = 3; },
      [](RunConfig& run) { run.loop_order = LoopOrder::layer_major; },
      [](RunConfig& run) { run.loop_order = LoopOrder::micro_batch_major; },
      [](RunConfig& run) { run.activation_policy = ActivationPolicy::all; },
      [](RunConfig& run) { run.activation_blocks = 7; },
      [](RunConfig& run) { run.activation_chunks = 1; },
      [](RunConfig& run) { run.device_activation_blocks = 9; },
      [](RunConfig& run) { run.optimizer_device_share = 0.7; },
      [](RunConfig& run) { run.resident_blocks = 4; },
      [](RunConfig& run) { run.gradients_on_host = true; }};
  for (const auto& set : settings) {
    RunConfig run = run_of(16384, 48 * gib);
    set(run);
    const RunConfig planned = plan_on("h200-pcie5-128g", qwen2_5_7b(10), run).config;
    const auto obeyed = [](const auto& given, const auto& decided) { return !given || given == decided; };
    EXPECT_TRUE(obeyed(run.weight_slots, planned.weight_slots));
    EXPECT_TRUE(obeyed(run.loop_order, planned.loop_order));
    EXPECT_TRUE(obeyed(run.activation_policy, planned.activation_policy));
    EXPECT_TRUE(obeyed(run.activation_blocks, planned.activation_blocks));
    EXPECT_TRUE(obeyed(run.activation_chunks, planned.activation_chunks));
    EXPECT_TRUE(obeyed(run.device_activation_blocks, planned.device_activation_blocks));
    EXPECT_TRUE(obeyed(run.optimizer_device_share, planned.optimizer_device_share));
    EXPECT_TRUE(obeyed(run.resident_blocks, planned.resident_blocks));
    EXPECT_TRUE(obeyed(run.gradients_on_host, planned.gradients_on_host));
  }
}

TEST(Planner, WhatCannotFitIsRefusedWithWhatItNeeds) {
  // 7B of state are 91 GB.
  EXPECT_THAT(refusal_on("rtx3090", qwen2_5_7b(), run_of(8192)),
              AllOf(HasSubstr("host memory: need"), HasSubstr("have"), HasSubstr(" short"),
                    HasSubstr("host_memory_limit"), HasSubstr("optimizer_update: immediate"),
                    Not(HasSubstr("device memory: need")), Not(HasSubstr("weight_slots"))));
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run_of(8192, 2 * gib)),
              AllOf(HasSubstr("device memory: need"), HasSubstr("have 2.00 GiB"),
                    HasSubstr("device_memory_limit"), Not(HasSubstr("optimizer_update"))));
  RunConfig too_many = run_of(8192, 24 * gib);
  too_many.resident_blocks = 20;
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), too_many),
              AllOf(HasSubstr("device memory: need"), HasSubstr("resident")));
}

TEST(Planner, ARefusalOfARowThatIsTooLongNamesTheLongestThatFits) {
  RunConfig run = run_of(1024);
  run.cutoff_len = 1 << 20;
  run.per_device_train_batch_size = 1;
  const std::string message = refusal_on("h200-pcie5-128g", qwen2_5_7b(), run);
  EXPECT_THAT(message, AllOf(HasSubstr("one row a step of up to"), HasSubstr("cutoff_len is 1048576")));
  // A model whose states alone do not fit has no such row.
  EXPECT_THAT(refusal_on("rtx3090", qwen2_5_7b(), run_of(8192)), Not(HasSubstr("one row a step")));
}

TEST(Planner, WhatFitsInTheSmallestPlacementsOnlyIsFound) {
  // A card that holds one slot of the head and little else; a host that holds states, and gradients only if
  // the device keeps them; and one where the host has room only once many blocks are resident.
  for (const std::uint64_t limit : {11, 12, 13}) {
    EXPECT_EQ(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run_of(8192, limit * gib)), "") << limit;
  }
  EXPECT_EQ(refusal_on("h200-pcie5-128g", qwen2_5_7b(41), run_of(8192)), "");
  RunConfig run = run_of(8192);
  run.gradients_on_host = true;
  EXPECT_EQ(refusal_on("h200-pcie5-128g", qwen2_5_7b(37), run), "");
}

TEST(Planner, ChunksThatAreNotGivenAreAsLongAsFits) {
  const ModelSpec spec = qwen2_5_7b(8);  // scratch and slots do not depend on the number of layers
  const auto with_chunks = [](std::int64_t tokens) {
    RunConfig run = run_of(8192, 9 * gib);
    run.chunk_tokens = tokens;
    return run;
  };
  EXPECT_EQ(plan_on("h200-pcie5-128g", spec, run_of(8192, 40 * gib)).config.chunk_tokens,
            default_chunk_tokens);
  const std::int64_t chosen = *plan_on("h200-pcie5-128g", spec, run_of(8192, 9 * gib)).config.chunk_tokens;
  EXPECT_LT(chosen, default_chunk_tokens);
  EXPECT_EQ(refusal_on("h200-pcie5-128g", spec, with_chunks(chosen)), "");
  EXPECT_NE(refusal_on("h200-pcie5-128g", spec, with_chunks(2 * chosen)), "");
}

TEST(Planner, ALongRowFillsBothMemoriesWithTheAttentionOfItsLastChunks) {
  // Neither side holds the inputs of all blocks beside what else it must.
  RunConfig run = run_of(131072, 24 * gib);
  run.cutoff_len = 131072;
  run.per_device_train_batch_size = 1;
  run.deterministic = false;
  run.optimizer_update = OptimizerUpdate::immediate;
  run.max_grad_norm = 0.0;
  const auto plan_with = [&](const std::function<void(RunConfig&)>& set) {
    RunConfig given = run;
    set(given);
    return plan_on("h200-pcie5-128g", qwen2_5_7b(), given);
  };
  const Plan plan = plan_with([](RunConfig&) {});
  EXPECT_EQ(plan.config.activation_policy, ActivationPolicy::input_attention);
  EXPECT_THAT(*plan.config.device_activation_blocks, AllOf(testing::Gt(0), testing::Lt(28)));
  EXPECT_THAT(*plan.config.activation_chunks, AllOf(testing::Gt(1), testing::Lt(16)));
  // All chunks of some blocks spare less than some chunks of all.
  const Plan whole_rows = plan_with([](RunConfig& given) { given.activation_chunks = 16; });
  EXPECT_LT(plan.prediction.run.seconds, 0.98 * whole_rows.prediction.run.seconds);
}

TEST(Planner, AModelThatFitsWithItsGradientsDividedOnlyIsFound) {
  // 32B: 12 B a parameter and all gradients are too much for 480 GB, all gradients too much for 96 GB.
  ModelSpec spec = qwen2_5_7b();
  spec.num_hidden_layers = 64;
  spec.hidden_size = 5120;
  spec.num_attention_heads = 40;
  spec.num_key_value_heads = 8;
  spec.intermediate_size = 27648;
  const Plan plan = plan_on("gh200-96g-480g", spec, run_of(8192));
  EXPECT_FALSE(*plan.config.gradients_on_host);
  EXPECT_GT(*plan.config.optimizer_device_share, 0.0);
  EXPECT_LT(*plan.config.optimizer_device_share, 1.0);
}

TEST(Planner, UpdatesInPlaceWhereTheBackendIsCoherentOnly) {
  RunConfig run = run_of(4096);
  run.resident_blocks = 0;
  run.updates_in_place = true;
  run.optimizer_device_share = 1.0;
  const Plan plan = plan_on("gh200-96g-480g", qwen2_5_7b(), run);
  EXPECT_TRUE(plan.memory.shape.schedule.device_update.in_place);
  EXPECT_EQ(*plan.config.device_update_blocks, 8);
  for (const Operation& operation : plan.prediction.schedule.operations) {
    EXPECT_NE(operation.kind, OperationKind::load_state);
    EXPECT_NE(operation.kind, OperationKind::store_state);
  }
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run),
              AllOf(HasSubstr("device_update: in_place"), HasSubstr("backend: coherent")));
  run.updates_in_place = false;
  run.promotes_by_kernel = true;
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run), HasSubstr("weight_promotion: kernel"));
}

TEST(LongestRow, FitsAndOneUnitMoreDoesNot) {
  const HardwareProfile profile = find_hardware_profile("rtx4090-128g");
  std::int64_t before = 0;
  for (const std::uint64_t limit : {12 * gib, 20 * gib}) {
    RunConfig run = run_of(1024, limit);
    run.host_memory_limit = 110 * gib;
    DescribedDevice device = described_device(profile, run);
    const Machine machine{.profile = profile, .device = device, .host = described_host(profile, run)};
    ModelSpec spec = qwen2_5_7b();
    spec.num_hidden_layers = 14;
    const LongestRow longest = find_longest_row(spec, run, machine, 0);
    EXPECT_GT(longest.tokens, before);
    before = longest.tokens;
    ASSERT_TRUE(longest.plan);
    EXPECT_EQ(longest.plan->chunks.num_tokens(), longest.tokens);
    EXPECT_LE(longest.plan->memory.ledger.total(Space::device), limit);
    EXPECT_THAT(longest.limit, HasSubstr("memory"));
    run.per_device_train_batch_size = 1;
    run.cutoff_len = longest.tokens + longest_row_unit;
    EXPECT_FALSE(can_be_placed(spec, run, machine, 0));
  }
}

TEST(Planner, ARefusalNamesTheGivenKeysThatNarrowTheChoice) {
  RunConfig run = run_of(8192, 24 * gib);
  run.resident_blocks = 20;
  run.device_activation_blocks = 28;
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run),
              AllOf(HasSubstr("resident_blocks: 20"), HasSubstr("device_activation_blocks: 28")));
}

TEST(Planner, ContradictoryKeysAreRefused) {
  RunConfig run = run_of(8192);
  run.optimizer_update = OptimizerUpdate::immediate;
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run), HasSubstr("max_grad_norm: 0"));
  run.max_grad_norm = 0.0;
  EXPECT_EQ(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run), "");
  run.resident_blocks = 3;
  EXPECT_THAT(refusal_on("h200-pcie5-128g", qwen2_5_7b(), run), HasSubstr("resident_blocks"));
  EXPECT_THROW((void)find_hardware_profile("h300"), ConfigError);
}

TEST(Planner, ProfilesAreFoundByTheDriversDescription) {
  const auto name = [](std::string_view description, double device, double host) {
    const auto profile = shipped_profile_for(description, device, host);
    return profile ? profile->name : "none";
  };
  EXPECT_EQ(name("NVIDIA H200 (sm_90), 139.28 GiB of 139.80 GiB", 1.49e11, 1.3e11), "h200-pcie5-128g");
  EXPECT_EQ(name("NVIDIA H200 (sm_90), 139.28 GiB of 139.80 GiB", 1.49e11, 1.4e12), "h200-1500g");
  EXPECT_EQ(name("NVIDIA GH200 480GB (sm_90)", 1.0e11, 4.8e11), "gh200-96g-480g");
  EXPECT_EQ(name("NVIDIA GH200 144G HBM3e (sm_90)", 1.5e11, 4.8e11), "gh200-144g-480g");
  EXPECT_EQ(name("simulated device, 2.00 GiB", 2e9, 8e9), "none");
  EXPECT_EQ(name("NVIDIA H200 NVL (sm_90)", 1.49e11, 1.3e11), "none");
  EXPECT_EQ(name("NVIDIA GeForce RTX 4090 D (sm_89)", 2.5e10, 1.3e11), "none");
}

TEST(Planner, WhatARunMayUseOfADeviceDoesNotMakeItAnother) {
  for (const std::string name : {"gh200-144g-480g", "gh200-96g-480g"}) {
    DescribedDevice device = described_device(find_hardware_profile(name), {});
    for (const std::size_t limit : {90 * gib, 10 * gib}) {
      device.set_memory_limit(limit);
      const auto profile = profile_of_run({}, device);
      EXPECT_EQ(profile ? profile->name : "none", name) << limit;
    }
  }
}

TEST(Planner, MachinesWithACoherentLinkAreGivenTheCoherentBackend) {
  int coherent = 0;
  for (const std::string& name : shipped_profile_names()) {
    const HardwareProfile profile = find_hardware_profile(name);
    DescribedDevice device = described_device(profile, {});
    EXPECT_EQ(make_backend({}, device)->name(), profile.link.coherent ? "coherent" : "explicit") << name;
    coherent += profile.link.coherent ? 1 : 0;
  }
  EXPECT_GE(coherent, 1);
}

TEST(MachineTable, HasALineForEachMachineWithTheLargestModel) {
  // Few layers, and wide, so that few more fit.
  ModelSpec spec = qwen2_5_7b(4);
  spec.hidden_size = 8192;
  spec.num_attention_heads = 64;
  spec.intermediate_size = 29568;
  const std::string table = machine_table(spec, run_of(8192), 0);
  for (const std::string& name : shipped_profile_names()) EXPECT_THAT(table, HasSubstr("| " + name + " |"));
  EXPECT_THAT(table, HasSubstr("refused"));  // the RTX 3090's host
  // What one machine refuses is its line.
  RunConfig coherent = run_of(8192);
  coherent.backend = BackendChoice::coherent;
  const std::string of_coherent = machine_table(spec, coherent, 0);
  EXPECT_THAT(of_coherent,
              AllOf(HasSubstr("| h200-pcie5-128g | refused"), HasSubstr("share the host's page tables")));
  EXPECT_THAT(of_coherent, ::testing::Not(HasSubstr("| gh200-96g-480g | refused")));
}

/// Plans for cards of different sizes place a model differently, and train it to the same bits.
TEST(Planner, AtLeastSixPlansOfOneModelTrainToTheSameBits) {
  const HardwareProfile profile = find_hardware_profile("h200-pcie5-128g");
  const ModelSpec spec = tiny_spec();
  RunConfig run = tiny_run();
  const std::unique_ptr<Device> any = make_test_device(std::size_t{1} << 30);
  std::set<std::string> placements;
  std::optional<RunRecord> reference;
  RunConfig least = run;
  least.weight_slots = 1;
  least.resident_blocks = 0;
  const std::size_t smallest =
      plan_run(spec, least, *any, 0).ledger.total(Space::device) - any->overhead_bytes();
  for (int step = 0; step < 16; ++step) {
    const std::size_t limit = any->overhead_bytes() + smallest + static_cast<std::size_t>(step) * 60'000;
    DescribedDevice device({.name = "a card",
                            .memory_limit = limit,
                            .uses_host_memory = any->uses_host_memory(),
                            .capabilities = {}});
    for (const int loops : {0, 1}) {
      RunConfig asked = run;
      if (loops == 1) asked.loop_order = LoopOrder::micro_batch_major;
      Plan plan;
      try {
        plan = plan_placement(
            spec, asked, {.profile = profile, .device = device, .host = {std::size_t{1} << 40, "test"}}, 0);
      } catch (const ResourceError&) {
        continue;
      }
      if (!placements.insert(plan.placement_yaml()).second) continue;
      const RunRecord record = train(spec, plan.config, 4);
      if (!reference) reference = record;
      EXPECT_TRUE(record == *reference) << plan.placement_yaml();
    }
  }
  EXPECT_GE(placements.size(), 6U);
}

}  // namespace
}  // namespace layerstream::test

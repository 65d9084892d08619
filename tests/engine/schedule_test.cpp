// Properties of schedules over many settings, checked by an independent model of what operations touch.

#include "engine/schedule.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "schedule_checker.hpp"
#include "schedule_replay.hpp"
#include "schedule_settings.hpp"

namespace layerstream::test {
namespace {

TEST(Schedule, ConflictingAccessesAreOrderedUnderAnyTiming) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      EXPECT_EQ(find_race(schedule, settings, chunks), "") << describe(settings, chunks) << '\n'
                                                           << schedule.to_text();
    });
  }
}

TEST(Schedule, EveryOperationFindsWhatItNeedsAndTheStepIsComplete) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      const std::vector<BlockCost> costs = costs_of(settings);
      StepReplay replay(schedule, settings, chunks, costs);
      EXPECT_EQ(replay.run(), "") << describe(settings, chunks) << '\n' << schedule.to_text();
    });
  }
}

TEST(Schedule, DependenciesAreEarlierOperationsOfOtherLanesOnePerLane) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
      const Operation& operation = schedule.operations[i];
      int previous = -1;
      std::set<Lane> lanes{operation.lane};
      for (const int dependency : operation.dependencies) {
        EXPECT_GT(dependency, previous) << describe(settings, chunks);
        EXPECT_LT(dependency, static_cast<int>(i)) << describe(settings, chunks);
        EXPECT_TRUE(lanes.insert(schedule.operations[static_cast<std::size_t>(dependency)].lane).second)
            << describe(settings, chunks);
        previous = dependency;
      }
    }
  });
}

TEST(Schedule, EachBlocksWeightsAreFetchedOncePerPass) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      // The last weight_slots − 1 decoder blocks stay in their slots until the backward pass comes back.
      const int streamed = settings.num_streamed_blocks();
      const int layers = std::clamp(streamed - 1, 0, settings.num_blocks - 2);
      const int retained = std::min(layers, settings.weight_slots - 1);
      const int expected = streamed + (settings.train ? layers - retained : 0);
      const std::vector<BlockCost> costs = costs_of(settings);
      StepReplay replay(schedule, settings, chunks, costs);
      replay.run();
      if (settings.loop_order == LoopOrder::layer_major || chunks.groups.size() == 1) {
        EXPECT_EQ(replay.num_fetches(), expected) << describe(settings, chunks);
      } else {  // blocks may stay from one micro-batch to the next
        EXPECT_GE(replay.num_fetches(), expected) << describe(settings, chunks);
        EXPECT_LE(replay.num_fetches(), expected * static_cast<int>(chunks.groups.size()))
            << describe(settings, chunks);
      }
    });
  }
}

TEST(Schedule, EachBlockEmitsOnceAndClearsOnceWhateverTheNumberOfChunks) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    for (int block = 0; block < settings.num_blocks; ++block) {
      EXPECT_EQ(indices_of(schedule, OperationKind::emit_gradient, block).size(), 1U)
          << describe(settings, chunks);
      const bool loads =
          block == 0 && settings.head_uses_embedding && !settings.has_own_gradient_buffer(block);
      EXPECT_EQ(indices_of(schedule, OperationKind::clear_gradient, block).size(), loads ? 0U : 1U)
          << describe(settings, chunks);
      EXPECT_EQ(indices_of(schedule, OperationKind::load_gradient, block).size(), loads ? 1U : 0U)
          << describe(settings, chunks);
    }
  });
}

/// The blocks in the order in which their weights are used, with the operations of each visit.
struct Visit {
  int block;
  int first_compute;
  int fetch;  ///< the last one of the block before it is used; −1: it lives on the device
};

std::vector<Visit> visits_of(const Schedule& schedule) {
  std::vector<Visit> visits;
  std::map<int, int> last_fetch;
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.kind == OperationKind::fetch_weights) last_fetch[operation.block] = static_cast<int>(i);
    if (!computes_with_weights(operation)) continue;
    if (!visits.empty() && visits.back().block == operation.block) continue;
    const auto fetch = last_fetch.find(operation.block);
    visits.push_back({operation.block, static_cast<int>(i), fetch == last_fetch.end() ? -1 : fetch->second});
  }
  return visits;
}

TEST(Schedule, WithTwoSlotsTheNextBlocksWeightsDoNotWaitForThisBlocksKernels) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      if (settings.fetch_lane != Lane::h2d || settings.weight_slots < 2) return;
      const HappensBefore order(schedule);
      const std::vector<Visit> visits = visits_of(schedule);
      for (std::size_t k = 1; k < visits.size(); ++k) {
        if (visits[k].fetch < 0) continue;
        EXPECT_FALSE(order.ordered(visits[k - 1].first_compute, visits[k].fetch))
            << "fetch of block " << visits[k].block << " waits for block " << visits[k - 1].block << ": "
            << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
    });
  }
}

TEST(Schedule, WithTwoGradientSlotsTheNextBlocksBackwardDoesNotWaitForTheGradientToLeave) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (settings.gradient_slots < 2 || settings.loop_order != LoopOrder::layer_major) return;
    const HappensBefore order(schedule);
    for (int block = settings.num_blocks - 1; block > 1; --block) {
      const int emit = indices_of(schedule, OperationKind::emit_gradient, block).at(0);
      const int backward = indices_of(schedule, OperationKind::backward, block - 1).at(0);
      EXPECT_FALSE(order.ordered(emit, backward)) << describe(settings, chunks) << '\n' << schedule.to_text();
      EXPECT_FALSE(order.ordered(backward, emit)) << describe(settings, chunks) << '\n' << schedule.to_text();
    }
  });
}

/// Removing any one dependency that no other path implies leaves a race: there is no wait too many, and the
/// check of races sees what it should see.
TEST(Schedule, NoDependencyCanBeLeftOut) {
  int removed = 0;
  int of_device_updates = 0;
  int count = 0;
  for_each_schedule(true, [&](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (count++ % 17 != 0) return;  // a sample; each schedule is checked once per dependency
    for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
      for (const int dependency : schedule.operations[i].dependencies) {
        Schedule mutant = schedule;
        std::erase(mutant.operations[i].dependencies, dependency);
        if (HappensBefore(mutant).ordered(dependency, static_cast<int>(i))) continue;
        ++removed;
        if (schedule.operations[i].update_slot >= 0) ++of_device_updates;
        EXPECT_NE(find_race(mutant, settings, chunks), "")
            << to_string(schedule, static_cast<int>(i)) << " waits for " << to_string(schedule, dependency)
            << " for nothing: " << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
    }
  });
  EXPECT_GT(removed, 1000);
  EXPECT_GT(of_device_updates, 200);
}

TEST(Schedule, ReplayNoticesAStepWithoutOneOfItsOperations) {
  const ChunkPlan chunks = plan_of({24, 8}, 8);
  for (const DeviceShare share : {DeviceShare::none, DeviceShare::some, DeviceShare::all}) {
    for (const bool gradients_on_device : {false, true}) {
      // All is streamed, or the first blocks live on the device.
      for (const int resident_blocks : {0, 2}) {
        ScheduleSettings settings{.num_blocks = 5,
                                  .head_uses_embedding = true,
                                  .pending_update = true,
                                  .frozen = {},
                                  .intermediate_slots = 1,
                                  .activation_policy = ActivationPolicy::all,
                                  .activation_chunks = 2,
                                  .device_activation_blocks = 1,
                                  .device_update = {}};
        settings.device_update =
            device_update_of(settings, share, [](int low, int high) { return (low + high) / 2; });
        settings.device_update.gradients_on_device = gradients_on_device;
        if (share != DeviceShare::none && resident_blocks > 0) {
          settings.device_update.resident_blocks = resident_blocks;
          settings.device_update.elements[0] = 120;
          settings.device_update.elements[1] = 128;
          settings.load_resident = true;
        }
        const std::vector<BlockCost> costs = costs_of(settings);
        const Schedule schedule = build_schedule(settings, chunks, costs);
        for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
          Schedule mutant = schedule;
          mutant.operations.erase(mutant.operations.begin() + static_cast<std::ptrdiff_t>(i));
          StepReplay replay(mutant, settings, chunks, costs);
          EXPECT_NE(replay.run(), "")
              << to_string(schedule, static_cast<int>(i)) << ": " << describe(settings, chunks);
        }
      }
    }
  }
}

TEST(Schedule, BytesAndFlopsAreThoseOfTheCosts) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    const std::vector<BlockCost> costs = costs_of(settings);
    const DeviceUpdate& device = settings.device_update;
    std::map<int, double> forward_flops;
    std::map<int, std::int64_t> saved_bytes, loaded_state, updated_state, stored_state;
    const auto kept = [&](int block) {
      const bool carries_embedding = settings.head_uses_embedding && !settings.has_own_gradient_buffer(0) &&
                                     block + 1 == settings.num_blocks;
      return device.kept(block) + (carries_embedding ? device.kept(0) : 0);
    };
    for (const Operation& operation : schedule.operations) {
      if (operation.block < 0) continue;
      const BlockCost& cost = costs[static_cast<std::size_t>(operation.block)];
      switch (operation.kind) {
        case OperationKind::fetch_weights:
          EXPECT_FALSE(device.is_resident(operation.block)) << describe(settings, chunks);
          if (settings.head_uses_embedding && operation.block + 1 == settings.num_blocks &&
              device.is_resident(0)) {
            EXPECT_EQ(operation.bytes, cost.fetch_bytes - costs[0].fetch_bytes) << describe(settings, chunks);
          } else {
            EXPECT_EQ(operation.bytes, cost.fetch_bytes);
          }
          break;
        case OperationKind::emit_gradient:
        case OperationKind::load_gradient:
          EXPECT_EQ(operation.bytes, cost.gradient_bytes - 4 * kept(operation.block))
              << describe(settings, chunks);
          break;
        case OperationKind::keep_gradient:
          EXPECT_EQ(operation.bytes, 4 * kept(operation.block)) << describe(settings, chunks);
          break;
        case OperationKind::update:
          EXPECT_EQ(operation.bytes, 28 * (cost.num_elements - device.of(operation.block)))
              << describe(settings, chunks);
          break;
        case OperationKind::load_state:
          loaded_state[operation.block] += operation.bytes;
          break;
        case OperationKind::update_on_device:
          updated_state[operation.block] += operation.bytes;
          break;
        case OperationKind::store_state:
          stored_state[operation.block] += operation.bytes;
          break;
        case OperationKind::forward:
          forward_flops[operation.block] += operation.flops;
          break;
        case OperationKind::save_intermediates:
          saved_bytes[operation.block] += operation.bytes;
          break;
        default:
          break;
      }
    }
    for (int block = 0; block < settings.num_blocks; ++block) {
      // hi, lo and two moments: 12 bytes an element each way; the gradient's 4 if it waits on the host.
      const std::int64_t elements = settings.pending_update ? device.of(block) : 0;
      const bool resident = device.is_resident(block);
      EXPECT_EQ(loaded_state[block], resident ? (settings.load_resident ? 12 * device.of(block) : 0)
                                              : (device.gradients_on_device ? 12 : 16) * elements);
      EXPECT_EQ(updated_state[block], 28 * elements);
      EXPECT_EQ(stored_state[block], resident ? 0 : 12 * elements);
    }
    // Causal pairs of whole rows, in however many chunks they go.
    double pairs = 0.0;
    for (const ChunkGroup& group : chunks.groups) {
      if (group.num_chunks == 1) {
        for (const auto& segment : chunks.chunks[static_cast<std::size_t>(group.first_chunk)].segments) {
          pairs += static_cast<double>(segment.num_keys * (segment.num_keys + 1) / 2);
        }
      } else {
        pairs += static_cast<double>(group.num_tokens * (group.num_tokens + 1) / 2);
      }
    }
    for (int block = 1; block + 1 < settings.num_blocks; ++block) {
      EXPECT_DOUBLE_EQ(forward_flops[block], 100.0 * static_cast<double>(chunks.num_tokens()) + 10.0 * pairs)
          << describe(settings, chunks);
      const int from_last = settings.num_blocks - 1 - block;
      const bool leaves = settings.activation_policy != ActivationPolicy::input &&
                          from_last <= settings.activation_blocks &&
                          from_last > settings.device_activation_blocks;
      std::int64_t tokens = 0;  // of the last chunks of each row
      for (const ChunkGroup& group : chunks.groups) {
        for (int chunk = group.num_chunks; chunk-- > 0;) {
          if (group.num_chunks - chunk > settings.activation_chunks) break;
          tokens += chunks.chunks[static_cast<std::size_t>(group.first_chunk + chunk)].num_tokens;
        }
      }
      EXPECT_EQ(saved_bytes[block], leaves ? 64 * tokens : 0) << describe(settings, chunks);
    }
  });
}

TEST(Schedule, RowsAreVisitedInTheSameOrderForwardAndBackwardAndChunksOfARowDescend) {
  const ChunkPlan chunks = plan_of({8, 24, 8}, 8);
  const ScheduleSettings settings{.num_blocks = 3, .frozen = {}, .device_update = {}};
  const Schedule schedule = build_schedule(settings, chunks, costs_of(settings));
  std::vector<int> forward, backward;
  for (const Operation& operation : schedule.operations) {
    if (operation.block != 1) continue;
    if (operation.kind == OperationKind::forward) forward.push_back(operation.chunk);
    if (operation.kind == OperationKind::backward) backward.push_back(operation.chunk);
  }
  EXPECT_THAT(forward, ::testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(backward, ::testing::ElementsAre(0, 3, 2, 1, 4));
}

TEST(Schedule, MicroBatchMajorAGroupGoesThroughAllBlocksBeforeTheNextAndGradientsStay) {
  const ChunkPlan chunks = plan_of({8, 24}, 8);
  const ScheduleSettings settings{
      .num_blocks = 4, .frozen = {}, .loop_order = LoopOrder::micro_batch_major, .device_update = {}};
  const Schedule schedule = build_schedule(settings, chunks, costs_of(settings));
  std::vector<std::string> order;
  for (const Operation& operation : schedule.operations) {
    if (operation.lane != Lane::compute || operation.block > 1 || operation.chunk < 0) continue;
    order.push_back(fmt::format("{} {} {}", name_of(operation.kind), operation.block, operation.chunk));
    EXPECT_EQ(operation.gradient_slot, -1);
  }
  EXPECT_THAT(
      order, ::testing::ElementsAre("forward 0 0", "forward 1 0", "rebuild_key_value 1 0", "backward 1 0",  //
                                    "forward 0 1", "forward 0 2", "forward 0 3",                            //
                                    "forward 1 1", "forward 1 2", "forward 1 3",                            //
                                    "rebuild_key_value 1 1", "rebuild_key_value 1 2", "rebuild_key_value 1 3",
                                    "backward 1 3", "backward 1 2", "backward 1 1",  //
                                    "backward 0 0", "backward 0 1", "backward 0 2", "backward 0 3"));
}

TEST(Schedule, SettingsThatCannotWorkAreRefused) {
  const ChunkPlan chunks = plan_of({8}, 8);
  const auto build = [&](const std::function<void(ScheduleSettings&)>& change) {
    ScheduleSettings settings{.num_blocks = 4, .frozen = {}, .device_update = {}};
    std::vector<BlockCost> costs = costs_of(settings);
    change(settings);
    build_schedule(settings, chunks, costs);
  };
  EXPECT_NO_THROW(build([](ScheduleSettings&) {}));
  EXPECT_THROW(build([](ScheduleSettings& settings) { settings.weight_slots = 0; }), ContractError);
  EXPECT_THROW(build([](ScheduleSettings& settings) { settings.gradient_slots = 0; }), ContractError);
  EXPECT_THROW(build([](ScheduleSettings& settings) { settings.intermediate_slots = 0; }), ContractError);
  EXPECT_THROW(build([](ScheduleSettings& settings) { settings.num_blocks = 5; }),
               ContractError);  // four costs
  EXPECT_THROW(build([](ScheduleSettings& settings) { settings.num_blocks = 2; }), ContractError);
  const auto build_with = [&](const DeviceUpdate& device,
                              OptimizerUpdate update = OptimizerUpdate::deferred) {
    build([&](ScheduleSettings& settings) {
      settings.device_update = device;
      settings.optimizer_update = update;
    });
  };
  const DeviceUpdate good{.elements = {120, 0, 1, 144}, .piece_elements = 1, .slots = 1};
  EXPECT_NO_THROW(build_with(good));
  EXPECT_THROW(build_with(good, OptimizerUpdate::immediate), ContractError);
  DeviceUpdate bad = good;
  bad.slots = 0;
  EXPECT_THROW(build_with(bad), ContractError);
  bad = good;
  bad.piece_elements = 0;
  EXPECT_THROW(build_with(bad), ContractError);
  bad = good;
  bad.elements = {120, 0, 1};  // four blocks
  EXPECT_THROW(build_with(bad), ContractError);
  bad.elements = {120, 0, 1, 145};  // the last block has 144
  EXPECT_THROW(build_with(bad), ContractError);
  bad.elements = {119, 0, 1, 144};  // a block lives on the device whole or not at all
  bad.resident_blocks = 1;
  EXPECT_THROW(build_with(bad), ContractError);
  EXPECT_NO_THROW(
      build_with({.elements = {120, 0, 0, 0}, .piece_elements = 1, .slots = 0, .resident_blocks = 1}));
}

TEST(Schedule, TextHasALineForEachOperationWithItsPlaceAndWaits) {
  const ChunkPlan chunks = plan_of({16}, 8);
  const ScheduleSettings settings{
      .num_blocks = 3, .frozen = {}, .activation_policy = ActivationPolicy::all, .device_update = {}};
  const Schedule schedule = build_schedule(settings, chunks, costs_of(settings));
  const std::string text = schedule.to_text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'),
            static_cast<std::ptrdiff_t>(schedule.operations.size()));
  EXPECT_THAT(text, ::testing::ContainsRegex("h2d +fetch_weights +block 0 weights@0\n"));
  EXPECT_THAT(text,
              ::testing::ContainsRegex(
                  "compute +backward +block 1 chunk 1 weights@1 gradient@1 intermediates@[01] after [0-9]+"));
}

}  // namespace
}  // namespace layerstream::test

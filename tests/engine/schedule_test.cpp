// Properties of schedules over many settings, checked by an independent model of what operations touch.

#include "engine/schedule.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/random.hpp"
#include "schedule_checker.hpp"
#include "schedule_replay.hpp"

namespace layerstream::test {
namespace {

ChunkPlan plan_of(const std::vector<std::int64_t>& row_lengths, std::int64_t chunk_tokens) {
  std::vector<TokenRow> rows;
  for (const std::int64_t length : row_lengths) {
    rows.push_back({.input_ids = std::vector<std::int32_t>(static_cast<std::size_t>(length), 1),
                    .targets = std::vector<std::int32_t>(static_cast<std::size_t>(length), 1),
                    .document_starts = {0}});
  }
  return make_chunk_plan(rows, chunk_tokens);
}

/// One to four chunks: rows together in a chunk, rows apart, long rows, and mixtures.
std::vector<ChunkPlan> chunk_plans() {
  return {plan_of({4, 4}, 8),     plan_of({8, 8}, 8),   plan_of({8, 8, 8}, 8), plan_of({30}, 8),
          plan_of({8, 12, 8}, 8), plan_of({16, 16}, 8), plan_of({24, 8}, 8)};
}

std::vector<BlockCost> costs_of(const ScheduleSettings& settings) {
  std::vector<BlockCost> costs;
  for (int block = 0; block < settings.num_blocks; ++block) {
    const bool decoder = block > 0 && block + 1 < settings.num_blocks;
    costs.push_back({.fetch_bytes = 1000 + block,
                     .gradient_bytes = 2000 + block,
                     .update_bytes = 3000 + block,
                     .input_bytes_per_token = decoder ? 16 : 0,
                     .intermediate_bytes_per_token = decoder ? 64 : 0,
                     .forward_flops_per_token = 100.0,
                     .attention_flops_per_pair = decoder ? 10.0 : 0.0});
  }
  return costs;
}

std::string describe(const ScheduleSettings& settings, const ChunkPlan& chunks) {
  return fmt::format(
      "blocks {}, chunks {} in {} groups, tied {}, train {}, pending {}, immediate {}, fetch on {}, slots "
      "{}, "
      "gradient slots {}, intermediate slots {}, host ring {}, policy {}, on host {}",
      settings.num_blocks, chunks.num_chunks(), chunks.groups.size(), settings.head_uses_embedding,
      settings.train, settings.pending_update, settings.optimizer_update == OptimizerUpdate::immediate,
      name_of(settings.fetch_lane), settings.weight_slots, settings.gradient_slots,
      settings.intermediate_slots, settings.host_gradient_ring, static_cast<int>(settings.activation_policy),
      settings.activations_on_host);
}

/// Calls function(settings, chunks, schedule) for the product of all that matters; the sizes of rings and
/// the number of layers are drawn.
void for_each_schedule(
    bool train,
    const std::function<void(const ScheduleSettings&, const ChunkPlan&, const Schedule&)>& function) {
  enum class Gradients { fresh, pending, immediate };
  const std::vector<ChunkPlan> plans = chunk_plans();
  std::uint64_t index = 0;
  const auto between = [&](int low, int high) {
    return low + static_cast<int>(uniform_at(5, 0, index++) * (high - low + 1));
  };
  for (const int weight_slots : {1, 2, 3, 4, 5}) {
    for (const ChunkPlan& chunks : plans) {
      for (const ActivationPolicy policy :
           {ActivationPolicy::input, ActivationPolicy::input_attention, ActivationPolicy::all}) {
        for (const bool on_host : {true, false}) {
          for (const Gradients gradients : {Gradients::fresh, Gradients::pending, Gradients::immediate}) {
            for (const bool tied : {true, false}) {
              for (const Lane fetch_lane : {Lane::h2d, Lane::compute}) {
                const ScheduleSettings settings{.num_blocks = 2 + between(1, 5),
                                                .head_uses_embedding = tied,
                                                .train = train,
                                                .pending_update = gradients == Gradients::pending,
                                                .fetch_lane = fetch_lane,
                                                .weight_slots = weight_slots,
                                                .gradient_slots = between(1, 3),
                                                .intermediate_slots = between(1, 3),
                                                .host_gradient_ring = between(1, 3),
                                                .activation_policy = policy,
                                                .activations_on_host = on_host,
                                                .optimizer_update = gradients == Gradients::immediate
                                                                        ? OptimizerUpdate::immediate
                                                                        : OptimizerUpdate::deferred};
                const Schedule schedule = build_schedule(settings, chunks, costs_of(settings));
                function(settings, chunks, schedule);
                if (::testing::Test::HasFailure()) return;  // one schedule is enough to read
              }
            }
          }
        }
      }
    }
  }
}

std::vector<int> indices_of(const Schedule& schedule, const std::function<bool(const Operation&)>& matches) {
  std::vector<int> indices;
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    if (matches(schedule.operations[i])) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

std::vector<int> indices_of(const Schedule& schedule, OperationKind kind, int block) {
  return indices_of(schedule, [&](const Operation& operation) {
    return operation.kind == kind && operation.block == block;
  });
}

bool computes_with_weights(const Operation& operation) {
  return operation.weight_slot >= 0 && operation.chunk >= 0;
}

TEST(Schedule, ConflictingAccessesAreOrderedUnderAnyTiming) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      EXPECT_EQ(find_race(schedule, settings), "") << describe(settings, chunks) << '\n'
                                                   << schedule.to_text();
    });
  }
}

TEST(Schedule, EveryOperationFindsWhatItNeedsAndTheStepIsComplete) {
  for (const bool train : {true, false}) {
    for_each_schedule(train, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
      StepReplay replay(schedule, settings, chunks);
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
      const int layers = settings.num_blocks - 2;
      const int retained = std::min(layers, settings.weight_slots - 1);
      const int expected = settings.num_blocks + (settings.train ? layers - retained : 0);
      StepReplay replay(schedule, settings, chunks);
      replay.run();
      EXPECT_EQ(replay.num_fetches(), expected) << describe(settings, chunks);
    });
  }
}

TEST(Schedule, EachBlockEmitsOnceAndClearsOnceWhateverTheNumberOfChunks) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    for (int block = 0; block < settings.num_blocks; ++block) {
      EXPECT_EQ(indices_of(schedule, OperationKind::emit_gradient, block).size(), 1U)
          << describe(settings, chunks);
      const bool loads = block == 0 && settings.head_uses_embedding;
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
  int fetch;  ///< the last one of the block before it is used
};

std::vector<Visit> visits_of(const Schedule& schedule) {
  std::vector<Visit> visits;
  std::map<int, int> last_fetch;
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.kind == OperationKind::fetch_weights) last_fetch[operation.block] = static_cast<int>(i);
    if (!computes_with_weights(operation)) continue;
    if (!visits.empty() && visits.back().block == operation.block) continue;
    visits.push_back({operation.block, static_cast<int>(i), last_fetch.at(operation.block)});
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
        EXPECT_FALSE(order.ordered(visits[k - 1].first_compute, visits[k].fetch))
            << "fetch of block " << visits[k].block << " waits for block " << visits[k - 1].block << ": "
            << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
    });
  }
}

TEST(Schedule, PendingUpdatesComeBeforeTheFetchAndWaitForNoKernel) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (!settings.pending_update) return;
    const HappensBefore order(schedule);
    int previous = -1;
    for (int block = 0; block < settings.num_blocks; ++block) {
      const std::vector<int> updates = indices_of(schedule, OperationKind::update, block);
      ASSERT_EQ(updates.size(), 1U) << describe(settings, chunks);
      EXPECT_GT(updates[0], previous) << "updates out of block order: " << describe(settings, chunks);
      previous = updates[0];
      for (const int fetch : indices_of(schedule, OperationKind::fetch_weights, block)) {
        EXPECT_TRUE(order.ordered(updates[0], fetch)) << describe(settings, chunks);
      }
      const auto kernels = indices_of(schedule, computes_with_weights);
      EXPECT_FALSE(order.ordered(kernels.front(), updates[0])) << describe(settings, chunks);
      // Earlier blocks compute while this one is updated.
      if (block == 0 || settings.fetch_lane != Lane::h2d) continue;
      EXPECT_FALSE(order.ordered(updates[0], indices_of(schedule, OperationKind::forward, block - 1).front()))
          << describe(settings, chunks);
    }
  });
}

TEST(Schedule, WithTwoGradientSlotsTheNextBlocksBackwardDoesNotWaitForTheGradientToLeave) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (settings.gradient_slots < 2) return;
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
  int count = 0;
  for_each_schedule(true, [&](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (count++ % 17 != 0) return;  // a sample; each schedule is checked once per dependency
    for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
      for (const int dependency : schedule.operations[i].dependencies) {
        Schedule mutant = schedule;
        std::erase(mutant.operations[i].dependencies, dependency);
        if (HappensBefore(mutant).ordered(dependency, static_cast<int>(i))) continue;
        ++removed;
        EXPECT_NE(find_race(mutant, settings), "")
            << to_string(schedule, static_cast<int>(i)) << " waits for " << to_string(schedule, dependency)
            << " for nothing: " << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
    }
  });
  EXPECT_GT(removed, 1000);
}

TEST(Schedule, ReplayNoticesAStepWithoutOneOfItsOperations) {
  const ChunkPlan chunks = plan_of({24, 8}, 8);
  const ScheduleSettings settings{.num_blocks = 5,
                                  .head_uses_embedding = true,
                                  .pending_update = true,
                                  .intermediate_slots = 1,
                                  .activation_policy = ActivationPolicy::all};
  const Schedule schedule = build_schedule(settings, chunks, costs_of(settings));
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    Schedule mutant = schedule;
    mutant.operations.erase(mutant.operations.begin() + static_cast<std::ptrdiff_t>(i));
    StepReplay replay(mutant, settings, chunks);
    EXPECT_NE(replay.run(), "") << to_string(schedule, static_cast<int>(i));
  }
}

TEST(Schedule, BytesAndFlopsAreThoseOfTheCosts) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    const std::vector<BlockCost> costs = costs_of(settings);
    std::map<int, double> forward_flops;
    std::map<int, std::int64_t> saved_bytes;
    for (const Operation& operation : schedule.operations) {
      if (operation.block < 0) continue;
      const BlockCost& cost = costs[static_cast<std::size_t>(operation.block)];
      switch (operation.kind) {
        case OperationKind::fetch_weights:
          EXPECT_EQ(operation.bytes, cost.fetch_bytes);
          break;
        case OperationKind::emit_gradient:
        case OperationKind::load_gradient:
          EXPECT_EQ(operation.bytes, cost.gradient_bytes);
          break;
        case OperationKind::update:
          EXPECT_EQ(operation.bytes, cost.update_bytes);
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
      const bool leaves =
          settings.activations_on_host && settings.activation_policy != ActivationPolicy::input;
      EXPECT_EQ(saved_bytes[block], leaves ? 64 * chunks.num_tokens() : 0) << describe(settings, chunks);
    }
  });
}

TEST(Schedule, RowsAreVisitedInTheSameOrderForwardAndBackwardAndChunksOfARowDescend) {
  const ChunkPlan chunks = plan_of({8, 24, 8}, 8);
  const ScheduleSettings settings{.num_blocks = 3};
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

TEST(Schedule, UpdatesAloneAreOnePerBlockInOrder) {
  const ScheduleSettings settings{.num_blocks = 6, .pending_update = true};
  const Schedule schedule = build_update_schedule(settings, costs_of(settings));
  ASSERT_EQ(schedule.operations.size(), 6U);
  for (int block = 0; block < 6; ++block) {
    const Operation& operation = schedule.operations[static_cast<std::size_t>(block)];
    EXPECT_EQ(operation.kind, OperationKind::update);
    EXPECT_EQ(operation.lane, Lane::host);
    EXPECT_EQ(operation.block, block);
    EXPECT_EQ(operation.bytes, 3000 + block);
  }
}

TEST(Schedule, SettingsThatCannotWorkAreRefused) {
  const ChunkPlan chunks = plan_of({8}, 8);
  const auto build = [&](const std::function<void(ScheduleSettings&)>& change) {
    ScheduleSettings settings{.num_blocks = 4};
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
}

TEST(Schedule, TextHasALineForEachOperationWithItsPlaceAndWaits) {
  const ChunkPlan chunks = plan_of({16}, 8);
  const ScheduleSettings settings{.num_blocks = 3, .activation_policy = ActivationPolicy::all};
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

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

/// Blocks of different sizes, with the bytes that their elements make.
std::vector<BlockCost> costs_of(const ScheduleSettings& settings) {
  std::vector<BlockCost> costs;
  for (int block = 0; block < settings.num_blocks; ++block) {
    const bool decoder = block > 0 && block + 1 < settings.num_blocks;
    const std::int64_t elements = 120 + 8 * block;
    const bool carries_embedding = settings.head_uses_embedding && !settings.head_adds_to_embedding() &&
                                   block + 1 == settings.num_blocks;
    costs.push_back({.num_elements = elements,
                     .fetch_bytes = 1000 + block,
                     .gradient_bytes = 4 * (elements + (carries_embedding ? costs[0].num_elements : 0)),
                     .update_bytes = 28 * elements,
                     .input_bytes_per_token = decoder ? 16 : 0,
                     .intermediate_bytes_per_token = decoder ? 64 : 0,
                     .forward_flops_per_token = 100.0,
                     .attention_flops_per_pair = decoder ? 10.0 : 0.0});
  }
  return costs;
}

std::string describe(const ScheduleSettings& settings, const ChunkPlan& chunks) {
  const DeviceUpdate& device = settings.device_update;
  return fmt::format(
      "blocks {}, chunks {} in {} groups, tied {}, train {}, pending {}, immediate {}, fetch on {}, slots "
      "{}, gradient slots {}, intermediate slots {}, host ring {}, micro-batch-major {}, policy {} for {} "
      "blocks {} chunks, {} blocks on the device, device updates "
      "[{}] in pieces of {} through {} slots, their gradients on the device {}, {} blocks resident, to load {}",
      settings.num_blocks, chunks.num_chunks(), chunks.groups.size(), settings.head_uses_embedding,
      settings.train, settings.pending_update, settings.optimizer_update == OptimizerUpdate::immediate,
      name_of(settings.fetch_lane), settings.weight_slots, settings.gradient_slots,
      settings.intermediate_slots, settings.host_gradient_ring,
      settings.loop_order == LoopOrder::micro_batch_major, static_cast<int>(settings.activation_policy),
      settings.activation_blocks, settings.activation_chunks, settings.device_activation_blocks,
      fmt::join(device.elements, " "), device.piece_elements, device.slots, device.gradients_on_device,
      device.resident_blocks, settings.load_resident);
}

/// What part of the updates is the device's.
enum class DeviceShare { none, some, all, mixed };

/// @param between draws an integer from a range, ends included
DeviceUpdate device_update_of(const ScheduleSettings& settings, DeviceShare share,
                              const std::function<int(int, int)>& between) {
  if (share == DeviceShare::none) return {};
  DeviceUpdate update{.elements = {},
                      .piece_elements = between(30, 130),  // one to six pieces
                      .slots = between(1, 4),
                      .gradients_on_device = between(0, 1) == 1};
  // Now and then the first blocks, or all, live on the device.
  update.resident_blocks = std::max(0, between(-settings.num_blocks, settings.num_blocks));
  for (const BlockCost& cost : costs_of(settings)) {
    const auto all = static_cast<int>(cost.num_elements);
    if (update.is_resident(static_cast<int>(update.elements.size()))) {
      update.elements.push_back(all);
      continue;
    }
    const int kind = share == DeviceShare::mixed ? between(0, 2) : share == DeviceShare::some ? 1 : 2;
    update.elements.push_back(kind == 0 ? 0 : kind == 1 ? between(1, all - 1) : all);
  }
  return update;
}

/// Calls function(settings, chunks, schedule) for the product of all that matters; the sizes of rings and
/// the number of layers are drawn, and so is the device's share of the updates.
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
        for (const bool homes_differ : {true, false}) {
          for (const Gradients gradients : {Gradients::fresh, Gradients::pending, Gradients::immediate}) {
            for (const bool tied : {true, false}) {
              for (const Lane fetch_lane : {Lane::h2d, Lane::compute}) {
                ScheduleSettings settings{
                    .num_blocks = 2 + between(1, 5),
                    .head_uses_embedding = tied,
                    .train = train,
                    .pending_update = gradients == Gradients::pending,
                    .frozen = {},
                    .fetch_lane = fetch_lane,
                    .weight_slots = weight_slots,
                    .gradient_slots = between(1, 3),
                    .intermediate_slots = between(1, 3),
                    .host_gradient_ring = between(1, 3),
                    .loop_order = between(0, 1) == 1 ? LoopOrder::micro_batch_major : LoopOrder::layer_major,
                    .activation_policy = policy,
                    .activation_blocks = between(0, 6),
                    .activation_chunks = between(1, 4),
                    .device_activation_blocks = homes_differ ? between(0, 5) : between(0, 1) * 6,
                    .optimizer_update = gradients == Gradients::immediate ? OptimizerUpdate::immediate
                                                                          : OptimizerUpdate::deferred,
                    .device_update = {}};
                if (gradients != Gradients::immediate) {
                  settings.device_update =
                      device_update_of(settings, static_cast<DeviceShare>(between(0, 3)), between);
                  settings.load_resident = between(0, 1) == 1;
                }
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
  const bool embedding_backward = operation.kind == OperationKind::backward && operation.block == 0;
  return operation.lane == Lane::compute && operation.chunk >= 0 && !embedding_backward;
}

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

/// The last operation of each part of the block's update.
std::vector<int> ends_of_update(const Schedule& schedule, int block) {
  std::vector<int> ends = indices_of(schedule, OperationKind::update, block);
  for (const OperationKind kind : {OperationKind::update_on_device, OperationKind::store_state}) {
    for (const int index : indices_of(schedule, kind, block)) {
      // State that lives on the device is updated in place.
      const bool in_slot = schedule.operations[static_cast<std::size_t>(index)].update_slot >= 0;
      if (kind == OperationKind::store_state || !in_slot) ends.push_back(index);
    }
  }
  return ends;
}

TEST(Schedule, PendingUpdatesComeBeforeTheFetchAndRunBesideTheKernelsOfEarlierBlocks) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    if (!settings.pending_update) return;
    const HappensBefore order(schedule);
    const std::vector<BlockCost> costs = costs_of(settings);
    std::map<Lane, int> previous;
    for (int block = 0; block < settings.num_blocks; ++block) {
      const std::int64_t elements = costs[static_cast<std::size_t>(block)].num_elements;
      EXPECT_EQ(indices_of(schedule, OperationKind::update, block).size(),
                settings.device_update.of(block) < elements ? 1U : 0U)
          << describe(settings, chunks);
      const std::vector<int> ends = ends_of_update(schedule, block);
      ASSERT_FALSE(ends.empty()) << describe(settings, chunks);
      for (const int end : ends) {
        const Operation& operation = schedule.operations[static_cast<std::size_t>(end)];
        EXPECT_GT(end + 1, previous[operation.lane])
            << "updates out of block order: " << describe(settings, chunks);
        previous[operation.lane] = end + 1;
        for (const int fetch : indices_of(schedule, OperationKind::fetch_weights, block)) {
          EXPECT_TRUE(order.ordered(end, fetch)) << describe(settings, chunks);
        }
        const int use = indices_of(schedule, [&](const Operation& operation) {
                          return operation.block == block && computes_with_weights(operation);
                        }).front();
        EXPECT_TRUE(order.ordered(end, use)) << describe(settings, chunks);
        // The host's threads wait for no kernel.
        if (operation.kind == OperationKind::update) {
          const auto kernels = indices_of(schedule, computes_with_weights);
          EXPECT_FALSE(order.ordered(kernels.front(), end)) << describe(settings, chunks);
        }
        if (block == 0 || settings.fetch_lane != Lane::h2d) continue;
        const int earlier = indices_of(schedule, OperationKind::forward, block - 1).front();
        EXPECT_FALSE(order.ordered(end, earlier) || order.ordered(earlier, end))
            << to_string(schedule, end) << " and " << to_string(schedule, earlier)
            << " wait for each other: " << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
    }
  });
}

TEST(Schedule, PiecesOfTheDevicesShareAreEachLoadedUpdatedAndStoredOnce) {
  int in_several_pieces = 0;
  for_each_schedule(true, [&](const auto& settings, const auto& chunks, const Schedule& schedule) {
    const DeviceUpdate& device = settings.device_update;
    for (int block = 0; block < settings.num_blocks; ++block) {
      const int pieces = settings.pending_update ? device.num_pieces(block) : 0;
      if (pieces > 1) ++in_several_pieces;
      for (const OperationKind kind :
           {OperationKind::load_state, OperationKind::update_on_device, OperationKind::store_state}) {
        int expected = pieces;
        if (device.is_resident(block) && kind == OperationKind::load_state) expected = settings.load_resident;
        if (device.is_resident(block) && kind == OperationKind::store_state) expected = 0;
        int piece = 0;
        for (const int index : indices_of(schedule, kind, block)) {
          EXPECT_EQ(schedule.operations[static_cast<std::size_t>(index)].piece, piece++)
              << describe(settings, chunks);
        }
        EXPECT_EQ(piece, expected) << name_of(kind) << ": " << describe(settings, chunks);
      }
      const bool carries_embedding = block + 1 == settings.num_blocks && settings.head_uses_embedding &&
                                     !settings.has_own_gradient_buffer(0);
      const bool keeps = !settings.has_own_gradient_buffer(block) &&
                         (device.kept(block) > 0 || (carries_embedding && device.kept(0) > 0));
      EXPECT_EQ(indices_of(schedule, OperationKind::keep_gradient, block).size(), keeps ? 1U : 0U)
          << describe(settings, chunks);
    }
  });
  EXPECT_GT(in_several_pieces, 300);
}

/// With s slots a piece arrives while the s − 1 before it are updated or leave, also within a block: in its
/// lane it waits for its slot and for nothing else.
TEST(Schedule, APieceOfStateWaitsForItsSlotAndForNothingElse) {
  for_each_schedule(true, [](const auto& settings, const auto& chunks, const Schedule& schedule) {
    const HappensBefore order(schedule);
    const auto of_kind = [&](OperationKind kind) {
      return indices_of(schedule, [&](const Operation& operation) {
        return operation.kind == kind && (kind == OperationKind::update || operation.update_slot >= 0);
      });
    };
    const std::vector<int> loads = of_kind(OperationKind::load_state);
    const std::vector<int> updates = of_kind(OperationKind::update_on_device);
    const std::vector<int> stores = of_kind(OperationKind::store_state);
    const auto slots = static_cast<std::size_t>(settings.device_update.slots);
    for (std::size_t k = 0; k < loads.size(); ++k) {
      const Operation& load = schedule.operations[static_cast<std::size_t>(loads[k])];
      if (k >= slots) {
        EXPECT_TRUE(order.ordered(stores[k - slots], loads[k])) << describe(settings, chunks);
      }
      // What the lane has waited for already: its last operation, weights that it fetches among them.
      const std::vector<int> before = indices_of(schedule, [&](const Operation& operation) {
        return operation.lane == load.lane && &operation < &load;
      });
      const auto waits_itself = [&](int other) {
        return order.ordered(other, loads[k]) && (before.empty() || !order.ordered(other, before.back()));
      };
      for (std::size_t other = k < slots ? 0 : k - slots + 1; other < k; ++other) {
        EXPECT_FALSE(waits_itself(updates[other]))
            << to_string(schedule, loads[k]) << " waits for " << to_string(schedule, updates[other]) << ": "
            << describe(settings, chunks) << '\n'
            << schedule.to_text();
      }
      // The host's updates go on beside it, and it beside them.
      for (const int update : of_kind(OperationKind::update)) {
        EXPECT_FALSE(waits_itself(update)) << describe(settings, chunks);
        EXPECT_FALSE(order.ordered(loads[k], update)) << describe(settings, chunks);
      }
    }
  });
}

/// Where weights and state cross the link on one lane, a fetch waits for the last stores of its block. Pieces
/// of the next blocks go before it, as many as there are slots: more would have to wait for each other.
TEST(Schedule, BeforeAFetchThePiecesOfTheNextBlocksFillTheSlotsAndNoMore) {
  int full = 0;
  for_each_schedule(true, [&](const auto& settings, const auto& chunks, const Schedule& schedule) {
    const DeviceUpdate& device = settings.device_update;
    if (settings.fetch_lane != Lane::h2d || !settings.pending_update || device.elements.empty()) return;
    const auto streamed = [&](int block) { return device.is_resident(block) ? 0 : device.num_pieces(block); };
    int total = 0;
    for (int block = 0; block < settings.num_blocks; ++block) total += streamed(block);
    int loaded = 0;
    int needed = 0;
    int next = device.resident_blocks;  // block that has not been fetched yet
    for (const Operation& operation : schedule.operations) {
      if (operation.kind == OperationKind::load_state && operation.update_slot >= 0) ++loaded;
      if (operation.kind != OperationKind::fetch_weights || operation.block != next) continue;
      needed += streamed(next++);
      const int most = std::min(total, needed + device.slots);
      EXPECT_EQ(loaded, most) << "before the fetch of block " << operation.block << ": "
                              << describe(settings, chunks) << '\n'
                              << schedule.to_text();
      if (loaded == needed + device.slots) ++full;
    }
  });
  EXPECT_GT(full, 100);
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

TEST(Schedule, UpdatesAloneAreOnePerBlockInOrder) {
  const ScheduleSettings settings{.num_blocks = 6, .pending_update = true, .frozen = {}, .device_update = {}};
  const Schedule schedule = build_update_schedule(settings, costs_of(settings));
  ASSERT_EQ(schedule.operations.size(), 6U);
  for (int block = 0; block < 6; ++block) {
    const Operation& operation = schedule.operations[static_cast<std::size_t>(block)];
    EXPECT_EQ(operation.kind, OperationKind::update);
    EXPECT_EQ(operation.lane, Lane::host);
    EXPECT_EQ(operation.block, block);
    EXPECT_EQ(operation.bytes, 28 * (120 + 8 * block));
  }
}

TEST(Schedule, UpdatesAloneAreAlsoTheDevices) {
  ScheduleSettings settings{.num_blocks = 4, .pending_update = true, .frozen = {}, .device_update = {}};
  // All of a block, the half of one in two pieces, nothing of one, one element of the last.
  settings.device_update = {.elements = {120, 64, 0, 1}, .piece_elements = 40, .slots = 2};
  const Schedule schedule = build_update_schedule(settings, costs_of(settings));
  std::vector<std::string> operations;
  for (const Operation& operation : schedule.operations) {
    std::string text = fmt::format("{} {}", name_of(operation.kind), operation.block);
    if (operation.piece >= 0) text += fmt::format(" {}@{}", operation.piece, operation.update_slot);
    operations.push_back(text);
  }
  EXPECT_THAT(operations,
              ::testing::ElementsAre("update 1", "update 2", "update 3",                                 //
                                     "load_state 0 0@0", "update_on_device 0 0@0", "store_state 0 0@0",  //
                                     "load_state 0 1@1", "update_on_device 0 1@1", "store_state 0 1@1",  //
                                     "load_state 0 2@0", "update_on_device 0 2@0", "store_state 0 2@0",  //
                                     "load_state 1 0@1", "update_on_device 1 0@1", "store_state 1 0@1",  //
                                     "load_state 1 1@0", "update_on_device 1 1@0", "store_state 1 1@0",  //
                                     "load_state 3 0@1", "update_on_device 3 0@1", "store_state 3 0@1"));
  // A whole piece, and the rest of the share: 24 elements.
  EXPECT_EQ(schedule.operations[12].bytes, 16 * 40);
  EXPECT_EQ(schedule.operations[15].bytes, 16 * 24);
}

TEST(Schedule, UpdatesAloneAreOrderedUnderAnyTimingAndBringResidentStateToTheHost) {
  std::uint64_t index = 0;
  const auto between = [&](int low, int high) {
    return low + static_cast<int>(uniform_at(6, 0, index++) * (high - low + 1));
  };
  for (int round = 0; round < 500; ++round) {
    ScheduleSettings settings{.num_blocks = 2 + between(1, 5), .frozen = {}, .device_update = {}};
    settings.pending_update = between(0, 1) == 1;
    settings.load_resident = between(0, 1) == 1;
    settings.device_update = device_update_of(settings, static_cast<DeviceShare>(between(1, 3)), between);
    const Schedule schedule = build_update_schedule(settings, costs_of(settings));
    const std::string description = describe(settings, {}) + '\n' + schedule.to_text();
    EXPECT_EQ(find_race(schedule, settings, {}), "") << description;
    const HappensBefore order(schedule);
    for (int block = 0; block < settings.device_update.resident_blocks; ++block) {
      const auto of = [&](OperationKind kind) { return indices_of(schedule, kind, block); };
      const auto loads = of(OperationKind::load_state);
      const auto updates = of(OperationKind::update_on_device);
      const auto stores = of(OperationKind::store_state);
      EXPECT_EQ(loads.size(), settings.load_resident ? 1U : 0U) << description;
      EXPECT_EQ(updates.size(), settings.pending_update ? 1U : 0U) << description;
      ASSERT_EQ(stores.size(), 1U) << description;
      for (const int load : loads) EXPECT_TRUE(order.ordered(load, stores[0])) << description;
      for (const int update : updates) {
        EXPECT_TRUE(order.ordered(update, stores[0])) << description;
        for (const int load : loads) EXPECT_TRUE(order.ordered(load, update)) << description;
      }
    }
    if (HasFailure()) return;
  }
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

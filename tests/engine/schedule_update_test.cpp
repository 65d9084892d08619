// The optimizer in the schedule: where updates stand, and how pieces of the device's share go through it.

#include "engine/schedule.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "schedule_checker.hpp"
#include "schedule_replay.hpp"
#include "schedule_settings.hpp"

namespace layerstream::test {
namespace {

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

}  // namespace
}  // namespace layerstream::test

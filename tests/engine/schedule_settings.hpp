// Schedules over many settings, for tests of their properties.
#pragma once

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "engine/schedule.hpp"

namespace layerstream::test {

inline ChunkPlan plan_of(const std::vector<std::int64_t>& row_lengths, std::int64_t chunk_tokens) {
  std::vector<TokenRow> rows;
  for (const std::int64_t length : row_lengths) {
    rows.push_back({.input_ids = std::vector<std::int32_t>(static_cast<std::size_t>(length), 1),
                    .targets = std::vector<std::int32_t>(static_cast<std::size_t>(length), 1),
                    .document_starts = {0}});
  }
  return make_chunk_plan(rows, chunk_tokens);
}

/// One to four chunks: rows together in a chunk, rows apart, long rows, and mixtures.
inline std::vector<ChunkPlan> chunk_plans() {
  return {plan_of({4, 4}, 8),     plan_of({8, 8}, 8),   plan_of({8, 8, 8}, 8), plan_of({30}, 8),
          plan_of({8, 12, 8}, 8), plan_of({16, 16}, 8), plan_of({24, 8}, 8)};
}

/// Blocks of different sizes, with the bytes that their elements make.
inline std::vector<BlockCost> costs_of(const ScheduleSettings& settings) {
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

inline std::string describe(const ScheduleSettings& settings, const ChunkPlan& chunks) {
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
inline DeviceUpdate device_update_of(const ScheduleSettings& settings, DeviceShare share,
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
inline void for_each_schedule(
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

inline std::vector<int> indices_of(const Schedule& schedule,
                                   const std::function<bool(const Operation&)>& matches) {
  std::vector<int> indices;
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    if (matches(schedule.operations[i])) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

inline std::vector<int> indices_of(const Schedule& schedule, OperationKind kind, int block) {
  return indices_of(schedule, [&](const Operation& operation) {
    return operation.kind == kind && operation.block == block;
  });
}

inline bool computes_with_weights(const Operation& operation) {
  const bool embedding_backward = operation.kind == OperationKind::backward && operation.block == 0;
  return operation.lane == Lane::compute && operation.chunk >= 0 && !embedding_backward;
}

}  // namespace layerstream::test

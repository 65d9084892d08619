#include "engine/update_operations.hpp"

#include "core/error.hpp"

namespace layerstream {
namespace {

using Kind = Resource::Kind;

/// Two halves of the weight and two moments.
constexpr std::int64_t state_bytes_per_element = 12;
/// AdamW reads the gradient, and reads and writes the state.
constexpr std::int64_t update_bytes_per_element = 2 * state_bytes_per_element + 4;

}  // namespace

UpdateOperations::UpdateOperations(const ScheduleSettings& settings, const std::vector<BlockCost>& costs,
                                   HazardTracker& tracker)
    : settings_(settings), costs_(costs), tracker_(tracker) {
  const DeviceUpdate& device = settings.device_update;
  if (device.elements.empty()) return;
  LAYERSTREAM_EXPECT(
      device.elements.size() == costs.size() && device.piece_elements >= 1 && device.resident_blocks >= 0,
      "device updates of {} blocks out of {}, {} of them resident, in pieces of {}", device.elements.size(),
      costs.size(), device.resident_blocks, device.piece_elements);
  for (int block = 0; block < settings.num_blocks; ++block) {
    const std::int64_t elements = device.of(block);
    LAYERSTREAM_EXPECT(elements >= 0 && elements <= cost(block).num_elements &&
                           (!device.is_resident(block) || elements == cost(block).num_elements),
                       "device updates of {} elements of block {}, which has {}", elements, block,
                       cost(block).num_elements);
    LAYERSTREAM_EXPECT(elements == 0 || device.in_one_piece(block) || device.slots >= 1,
                       "device updates of block {} without a slot", block);
  }
  LAYERSTREAM_EXPECT(settings.optimizer_update == OptimizerUpdate::deferred,
                     "immediate updates are the host's alone");
}

void UpdateOperations::hosts_shares() {
  for (int block = 0; block < settings_.num_blocks; ++block) hosts_share(block);
}

void UpdateOperations::hosts_share(int block) {
  if (settings_.is_frozen(block)) return;
  const Resource gradient{Kind::host_gradient, host_gradient_slab(settings_, block)};
  const std::int64_t elements = cost(block).num_elements;
  const std::int64_t own = elements - settings_.device_update.of(block);
  if (own == 0) return;
  const double bytes = static_cast<double>(cost(block).update_bytes) * static_cast<double>(own) /
                       static_cast<double>(elements);
  tracker_.append({.kind = OperationKind::update,
                   .lane = Lane::host,
                   .block = block,
                   .bytes = static_cast<std::int64_t>(bytes),
                   .dependencies = {}},
                  {gradient, {Kind::host_statistics, block}},
                  {{Kind::host_weights, block, StatePart::of_host}});
}

void UpdateOperations::devices_shares(int block) {
  const DeviceUpdate& device = settings_.device_update;
  const int ahead = device.slots + uses_through(block);
  while (next_block_ < settings_.num_blocks && (next_block_ <= block || device.in_place || uses_ < ahead)) {
    if (next_piece_ == device.num_pieces(next_block_)) {
      ++next_block_;
      next_piece_ = 0;
      continue;
    }
    update_on_device(next_block_, next_piece_++);
  }
}

int UpdateOperations::uses_through(int block) const {
  int pieces = 0;
  for (int b = settings_.device_update.resident_blocks; b <= block; ++b) {
    pieces += settings_.device_update.num_pieces(b);
  }
  return pieces;
}

Operation UpdateOperations::state_operation(OperationKind kind, Lane lane, int block, int piece, int slot,
                                            std::int64_t bytes_per_element) const {
  return {.kind = kind,
          .lane = lane,
          .block = block,
          .piece = piece,
          .update_slot = slot,
          .bytes = bytes_per_element * settings_.device_update.piece(block, piece).count,
          .dependencies = {}};
}

void UpdateOperations::move_resident(OperationKind kind, Lane lane) {
  for (int block = 0; block < settings_.device_update.resident_blocks; ++block) {
    const Resource state{Kind::host_weights, block, StatePart::of_piece(0)};
    const Operation operation = state_operation(kind, lane, block, 0, -1, state_bytes_per_element);
    if (kind == OperationKind::load_state) {
      tracker_.append(operation, {}, {state});
    } else {
      tracker_.append(operation, {state}, {});
    }
  }
}

void UpdateOperations::update_on_device(int block, int piece) {
  const DeviceUpdate& device = settings_.device_update;
  if (device.in_one_piece(block)) {
    const bool kept = device.kept(block) > 0;
    tracker_.append(state_operation(OperationKind::update_on_device, Lane::update, block, piece, -1,
                                    update_bytes_per_element),
                    {kept ? Resource{Kind::device_gradient, block}
                          : Resource{Kind::host_gradient, host_gradient_slab(settings_, block)}},
                    {{Kind::host_weights, block, StatePart::of_piece(piece)}});
    return;
  }
  const int slot = uses_++ % device.slots;
  const auto operation = [&](OperationKind kind, Lane lane, std::int64_t bytes_per_element) {
    return state_operation(kind, lane, block, piece, slot, bytes_per_element);
  };
  const Resource state{Kind::host_weights, block, StatePart::of_piece(piece)};
  const Operation update = operation(OperationKind::update_on_device, Lane::update, update_bytes_per_element);
  if (device.gradients_on_device) {
    tracker_.append(operation(OperationKind::load_state, Lane::h2d, state_bytes_per_element), {state},
                    {{Kind::update_slot, slot}});
    tracker_.append(update, {{Kind::device_gradient, block}}, {{Kind::update_slot, slot}});
  } else {
    const Resource gradient{Kind::host_gradient, host_gradient_slab(settings_, block)};
    tracker_.append(operation(OperationKind::load_state, Lane::h2d, state_bytes_per_element + 4),
                    {state, gradient}, {{Kind::update_slot, slot}});
    tracker_.append(update, {}, {{Kind::update_slot, slot}});
  }
  tracker_.append(operation(OperationKind::store_state, Lane::update_out, state_bytes_per_element),
                  {{Kind::update_slot, slot}}, {state});
}

}  // namespace layerstream

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/step_runner.hpp"
#include "ops/elementwise.hpp"

// Of StepRunner: gradients, their norm, and the optimizer.

namespace layerstream {
namespace {

/// Whether AdamW can take gradients of this sum of squares (fp64) times `scale`: no element is NaN or Inf,
/// and the square of none, which the second moment takes in fp32, overflows.
bool is_usable(double sum_of_squares, double scale = 1.0) {
  return sum_of_squares * scale * scale < static_cast<double>(std::numeric_limits<float>::max());
}

/// Calls copy(to, from, bytes) for each array of a slice but the gradient.
template <class Copy>
void move_state(const ops::AdamWSlice& to, const ops::AdamWSlice& from, const Copy& copy) {
  const auto n = static_cast<std::size_t>(from.n);
  copy(to.hi, from.hi, n * sizeof(bf16));
  copy(to.lo, from.lo, n * sizeof(std::int16_t));
  copy(to.exp_avg, from.exp_avg, n * sizeof(float));
  copy(to.exp_avg_sq, from.exp_avg_sq, n * sizeof(float));
}

}  // namespace

void StepRunner::clear_gradient(const Operation& operation, StreamView stream) {
  // The first products write the gradients of matrices. What is between them and the rest is only added to,
  // and so are the rows of an embedding that no head multiplies with.
  const ModelLayout& layout = parts_.shape.layout;
  std::int64_t cleared = 0;  // up to here, or about to be written
  const auto clear_until = [&](std::int64_t end) {
    if (end > cleared) ops::fill_zero(context(stream), gradient_of(operation, cleared, end - cleared));
    cleared = end;
  };
  const auto clear_slab = [&](const BlockLayout& slab, bool has_products) {
    const std::int64_t slab_begin = cleared;
    for (const Parameter& parameter : slab.parameters) {
      if (!has_products || !parameter.is_matrix) continue;
      clear_until(slab_begin + parameter.offset);
      cleared += parameter.numel();
    }
    clear_until(slab_begin + slab.num_elements);
  };
  const BlockLayout& own = layout_of(operation.block);
  clear_slab(own, operation.block != layout.embedding() || layout.head_uses_embedding);
  if (parts_.shape.gradient_elements(operation.block) > own.num_elements) {
    clear_slab(layout_of(layout.embedding()), true);
  }
}

void StepRunner::load_gradient(const Operation& operation, StreamView stream) {
  const ScheduleSettings& schedule = parts_.shape.schedule;
  const int block = operation.block;
  const TensorView gradient = gradient_of(operation, 0, layout_of(block).num_elements);
  const std::int64_t kept = schedule.device_update.kept(block);
  if (kept > 0) {
    const TensorView home = block_gradient(block);
    parts_.device.link().copy(gradient.data(), home.data(), home.bytes(), stream);
  }
  const TensorView rest = gradient.rows(kept, gradient.numel() - kept);
  const auto slab = static_cast<std::size_t>(host_gradient_slab(schedule, block));
  parts_.backend.copy_to_device(rest.data(), parts_.host_buffers.gradients[slab].data(), rest.bytes(),
                                stream);
}

void StepRunner::keep_gradient(const Operation& operation, StreamView stream) {
  const int block = operation.block;
  const TensorView gradient = gradient_of(operation, 0, parts_.shape.gradient_elements(block));
  const auto keep = [&](int home, std::int64_t first) {
    const std::int64_t kept = parts_.shape.schedule.device_update.kept(home);
    if (kept == 0) return;
    parts_.device.link().copy(block_gradient(home).data(), gradient.rows(first, kept).data(),
                              static_cast<std::size_t>(kept) * sizeof(float), stream);
  };
  const std::int64_t own = layout_of(block).num_elements;
  keep(block, 0);
  if (gradient.numel() > own) keep(parts_.shape.layout.embedding(), own);
}

void StepRunner::gradient_norm(const Operation& operation, StreamView stream) {
  // A tied head's share of the embedding's gradient is counted with the embedding.
  const BlockLayout& block = layout_of(operation.block);
  const TensorView gradient = gradient_of(operation, 0, block.num_elements);
  for (const Parameter& parameter : block.parameters) {
    if (parameter.is_frozen)
      ops::fill_zero(context(stream), gradient.rows(parameter.offset, parameter.numel()));
  }
  ops::sum_of_squares(context(stream), parts_.device_buffers.norm_partials + operation.block, gradient);
}

void StepRunner::emit_gradient(const Operation& operation, StreamView stream) {
  const int block = operation.block;
  const ScheduleSettings& schedule = parts_.shape.schedule;
  if (block == parts_.shape.layout.head()) {
    parts_.backend.copy_to_host(parts_.host_buffers.nll_sum, parts_.device_buffers.nll_sum, sizeof(double),
                                stream);
  }
  if (schedule.is_frozen(block)) return;
  const TensorView gradient = gradient_of(operation, 0, parts_.shape.gradient_elements(block));
  const auto emit = [&](int home, std::int64_t first, std::int64_t count) {
    const std::size_t slab = static_cast<std::size_t>(host_gradient_slab(schedule, home));
    const std::int64_t kept = schedule.device_update.kept(home);
    const TensorView piece = gradient.rows(first + kept, count - kept);
    parts_.backend.copy_to_host(parts_.host_buffers.gradients[slab].data(), piece.data(), piece.bytes(),
                                stream);
  };
  const std::int64_t own = layout_of(block).num_elements;
  if (block == parts_.shape.layout.embedding() && schedule.emits_embedding_rows()) {
    const Shape table{parts_.shape.spec.vocab_size, parts_.shape.spec.hidden_size};
    const auto slab = static_cast<std::size_t>(host_gradient_slab(schedule, block));
    float* const home = parts_.host_buffers.gradients[slab].as<float>();
    const DeviceBuffers& device = parts_.device_buffers;
    ops::emit_rows(context_without_workspace(stream), TensorView(home, table),
                   TensorView(gradient.as<float>(), table), device.embedding_rows_written,
                   device.input_ids.rows(0, chunks_->num_tokens()));
    // What pads the slab is updated as well.
    const TensorView padding = gradient.rows(table.numel(), own - table.numel());
    if (padding.numel() > 0) {
      parts_.backend.copy_to_host(home + table.numel(), padding.data(), padding.bytes(), stream);
    }
  } else {
    emit(block, 0, own);
  }
  if (gradient.numel() > own) emit(parts_.shape.layout.embedding(), own, gradient.numel() - own);
  parts_.backend.copy_to_host(&parts_.host_buffers.norm_partials[block],
                              parts_.device_buffers.norm_partials + block, sizeof(double), stream);
}

void StepRunner::update(const Operation& operation) {
  const int block = operation.block;
  if (parts_.shape.schedule.optimizer_update == OptimizerUpdate::immediate) {
    // No verdict yet: this block's own gradient, and those before it in the backward pass, must do.
    const bool finite =
        std::isfinite(*parts_.host_buffers.nll_sum) && is_usable(parts_.host_buffers.norm_partials[block]);
    if (!finite || !verdict_.finite) {
      verdict_.finite = false;
      if (num_updated_ == 0) return;
      throw Error(
          fmt::format("the gradient of block {} is not finite in fp32 after {} later blocks were updated, so "
                      "this step cannot be undone; "
                      "the newest checkpoint is intact. Resume from it, with optimizer_update: "
                      "deferred to have such steps "
                      "skipped whole",
                      block, num_updated_),
          exit_code::not_finite);
    }
  }
  const Slab& slab = parts_.store.slab(block);
  const DeviceUpdate& device = parts_.shape.schedule.device_update;
  const std::int64_t first = device.of(block);
  const auto home = static_cast<std::size_t>(host_gradient_slab(parts_.shape.schedule, block));
  parts_.optimizer.update(
      {.hi = slab.hi + first,
       .lo = slab.lo + first,
       .exp_avg = slab.exp_avg + first,
       .exp_avg_sq = slab.exp_avg_sq + first,
       .gradient = parts_.host_buffers.gradients[home].as<float>() + (first - device.kept(block)),
       .n = slab.num_elements - first},
      update_ranges(block, first, slab.num_elements - first), optimizer_settings_);
  parts_.store.bump_version(block);
  ++num_updated_;
}

/// The piece's place in the host's slabs; its gradient too, unless that waits on the device.
ops::AdamWSlice StepRunner::host_piece(const Operation& operation) const {
  const DeviceUpdate& device = parts_.shape.schedule.device_update;
  const Slab& slab = parts_.store.slab(operation.block);
  const auto [first, count] = device.piece(operation.block, operation.piece);
  const bool kept = device.kept(operation.block) > 0;
  const auto home = static_cast<std::size_t>(host_gradient_slab(parts_.shape.schedule, operation.block));
  return {.hi = slab.hi + first,
          .lo = slab.lo + first,
          .exp_avg = slab.exp_avg + first,
          .exp_avg_sq = slab.exp_avg_sq + first,
          .gradient = kept ? nullptr : parts_.host_buffers.gradients[home].as<float>() + first,
          .n = count};
}

ops::AdamWSlice StepRunner::device_piece(const Operation& operation) const {
  const DeviceUpdate& device = parts_.shape.schedule.device_update;
  const DeviceBuffers& buffers = parts_.device_buffers;
  const auto [first, count] = device.piece(operation.block, operation.piece);
  const bool kept = device.kept(operation.block) > 0;
  float* const gradient = kept ? block_gradient(operation.block).as<float>() + first : nullptr;
  if (device.is_in_place(operation.block)) {
    ops::AdamWSlice in_place = host_piece(operation);
    if (kept) in_place.gradient = gradient;
    return in_place;
  }
  if (operation.update_slot < 0) {
    const Slab& resident = buffers.resident[static_cast<std::size_t>(operation.block)];
    return {.hi = resident.hi,
            .lo = resident.lo,
            .exp_avg = resident.exp_avg,
            .exp_avg_sq = resident.exp_avg_sq,
            .gradient = gradient,
            .n = count};
  }
  const UpdateSlot& slot = buffers.update_slots[static_cast<std::size_t>(operation.update_slot)];
  return {.hi = slot.hi.as<bf16>(),
          .lo = slot.lo.as<std::int16_t>(),
          .exp_avg = slot.exp_avg.as<float>(),
          .exp_avg_sq = slot.exp_avg_sq.as<float>(),
          .gradient = kept ? gradient : slot.gradient.as<float>(),
          .n = count};
}

void StepRunner::load_state(const Operation& operation, StreamView stream) {
  const ops::AdamWSlice host = host_piece(operation);
  const ops::AdamWSlice device = device_piece(operation);
  const auto load = [&](void* to, const void* from, std::size_t bytes) {
    parts_.backend.copy_to_device(to, from, bytes, stream);
  };
  move_state(device, host, load);
  if (host.gradient != nullptr) {
    const UpdateSlot& slot =
        parts_.device_buffers.update_slots[static_cast<std::size_t>(operation.update_slot)];
    load(slot.gradient.data(), host.gradient, static_cast<std::size_t>(host.n) * sizeof(float));
  }
}

void StepRunner::update_on_device(const Operation& operation, StreamView stream) {
  const DeviceUpdate& device = parts_.shape.schedule.device_update;
  const std::int64_t first = device.piece(operation.block, operation.piece).first;
  const ops::AdamWSlice piece = device_piece(operation);
  const std::vector<UpdateRange> ranges = update_ranges(operation.block, first, piece.n);
  const auto scalars = [&](std::size_t range) {
    return ops::adamw_scalars(ops::with_decay(optimizer_settings_, *ranges[range].weight_decay));
  };
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < ranges.size();) {
    if (!ranges[i].weight_decay) {
      begin = ranges[i++].end;
      continue;
    }
    // Two ranges at once: a block's matrices and vectors are one launch.
    const std::size_t last = i + 1 < ranges.size() && ranges[i + 1].weight_decay ? i + 1 : i;
    const std::int64_t end = ranges[last].end;
    ops::adamw_device(context_without_workspace(stream), ops::elements(piece, begin, end),
                      ranges[i].end - begin, scalars(i), scalars(last),
                      device.is_in_place(operation.block) ? device.thread_blocks : 0);
    begin = end;
    i = last + 1;
  }
  if (operation.update_slot < 0) parts_.store.bump_version(operation.block);
}

std::vector<UpdateRange> StepRunner::update_ranges(int block, std::int64_t first, std::int64_t count) const {
  return parts_.parameter_groups.ranges(block, first, count, optimizer_settings_.weight_decay);
}

void StepRunner::store_state(const Operation& operation, StreamView stream) {
  move_state(host_piece(operation), device_piece(operation),
             [&](void* to, const void* from, std::size_t bytes) {
               parts_.backend.copy_to_host(to, from, bytes, stream);
             });
  parts_.store.bump_version(operation.block);
}

void StepRunner::compute_verdict() {
  double sum_of_squares = 0.0;
  for (int block = 0; block < parts_.shape.layout.num_blocks(); ++block) {
    if (!parts_.shape.schedule.is_frozen(block)) sum_of_squares += parts_.host_buffers.norm_partials[block];
  }
  verdict_.nll_sum = *parts_.host_buffers.nll_sum;
  verdict_.grad_norm = std::sqrt(sum_of_squares);
  // As torch.nn.utils.clip_grad_norm_: never scaled up.
  verdict_.clip_scale =
      max_grad_norm_ > 0.0 ? std::min(1.0, max_grad_norm_ / (verdict_.grad_norm + 1e-6)) : 1.0;
  verdict_.finite = std::isfinite(*parts_.host_buffers.nll_sum);
  for (int block = 0; block < parts_.shape.layout.num_blocks(); ++block) {
    verdict_.finite =
        verdict_.finite && (parts_.shape.schedule.is_frozen(block) ||
                            is_usable(parts_.host_buffers.norm_partials[block], verdict_.clip_scale));
  }
}

}  // namespace layerstream

#include "engine/operation_costs.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"

namespace layerstream {

namespace {

using Resource = MachineResource;

/// Rates of memory-bound kernels as fractions of a copy, measured on an H200 at the sizes of Qwen2.5-7B
/// (benches/results/2026-11-29-kernels-h200.md, 2026-11-30-kernels-h200.md). They depend on kernels more than
/// on cards.
namespace efficiency {
constexpr double add = 0.91, add_bias = 0.84, swiglu_forward = 0.91, swiglu_backward = 0.96;
constexpr double norm_forward = 0.87, norm_backward = 0.77, norm_backward_residual = 0.83;
constexpr double heads_forward = 0.79, heads_forward_norm = 0.78;  // queries, keys and values in one launch
constexpr double heads_backward = 0.76, heads_backward_norm = 0.77;
constexpr double query_forward = 0.75, key_value_forward = 0.53;  // when computed again
constexpr double embedding_forward = 0.80, embedding_backward = 0.86;
constexpr double cross_entropy = 0.96, loss_only = 0.88, whole = 1.0;
}  // namespace efficiency

/// Beside the host's optimizer a kernel on host memory keeps less of its speed than copies do: measured on an
/// H200 over PCIe with 4 thread blocks, 2.2 of 3.0 Gparam/s where the host kept 3.5 of 4.4
/// (benches/results/2026-11-30-coherent-h200.md).
constexpr double in_place_weight = 0.6;

/// By block; the embedding, which attends to nothing, has that of the first layer.
std::vector<AttentionPattern> patterns_of(const EngineShape& shape) {
  std::vector<AttentionPattern> patterns{shape.spec.pattern_of(0)};
  for (int layer = 0; layer < shape.spec.num_hidden_layers; ++layer) {
    patterns.push_back(shape.spec.pattern_of(layer));
  }
  return patterns;
}

double value(const Rate& rate) {
  return rate.value;
}

}  // namespace

/// Kernels that run one after another on one stream.
struct OperationCosts::KernelWork {
  double gemm_flops = 0.0, gemm_tokens = 1.0;
  double attention_forward_flops = 0.0, attention_backward_flops = 0.0, row_tokens = 1.0;
  double bytes = 0.0;       ///< of device memory by memory-bound kernels
  double copy_bytes = 0.0;  ///< what a copy would move in the time that they take
  int launches = 0;

  void move(double count, double part_of_copy) {
    bytes += count;
    copy_bytes += count / part_of_copy;
    ++launches;
  }
};

OperationCosts::OperationCosts(const HardwareProfile& profile, const EngineShape& shape,
                               const ChunkPlan& chunks, double busy_fraction)
    : profile_(profile),
      shape_(shape),
      chunks_(chunks),
      pairs_(chunks, patterns_of(shape)),
      speed_up_(1.0 + (value(profile.device.cool_ratio) - 1.0) * (1.0 - std::clamp(busy_fraction, 0.0, 1.0))),
      host_bytes_per_second_(profile.host_memory_bytes_per_second()) {
  // Beside the optimizer, copies keep another part of their speed than it does of its own: memory controllers
  // serve the link first. The weight reproduces the two rates that the profile has of both at once.
  const auto& host = profile.host;
  const double copies_keep =
      value(host.copies_beside_adamw_bytes_per_second) /
      (value(profile.link.to_device_bytes_per_second) + value(profile.link.to_host_bytes_per_second));
  const double optimizer_keeps =
      value(host.adamw_beside_copies_parameters_per_second) / value(host.adamw_parameters_per_second);
  copy_weight_ = std::clamp(copies_keep / optimizer_keeps, 0.1, 10.0);
}

std::vector<OperationCost> OperationCosts::of(const Schedule& schedule) const {
  std::vector<OperationCost> costs;
  costs.reserve(schedule.operations.size());
  for (const Operation& operation : schedule.operations) costs.push_back(of(operation));
  return costs;
}

OperationCost OperationCosts::of(const Operation& operation) const {
  OperationCost cost;
  switch (operation.kind) {
    case OperationKind::update:
      cost = host_update(operation);
      break;
    case OperationKind::update_on_device:
      cost = shape_.schedule.device_update.is_in_place(operation.block) ? update_in_place(operation)
                                                                        : device_update(operation);
      break;
    case OperationKind::fetch_weights:  // matrices, two halves of vectors
      cost = shape_.schedule.promotes_by_kernel ? promotion(operation) : copy(operation, true, 3);
      break;
    case OperationKind::load_state:  // two halves, two moments
      cost = copy(operation, true, 4);
      break;
    case OperationKind::store_state:
      cost = copy(operation, false, 4);
      break;
    case OperationKind::load_input:
    case OperationKind::load_gradient:
      cost = copy(operation, true, 1);
      break;
    case OperationKind::save_input:
      cost = copy(operation, false, 1);
      break;
    case OperationKind::load_intermediates:  // DecoderIntermediates
      cost = copy(operation, true, 6);
      break;
    case OperationKind::save_intermediates:
      cost = copy(operation, false, 6);
      break;
    case OperationKind::emit_gradient:  // gradient, its norm's partial sum
      cost = copy(operation, false, 2);
      break;
    case OperationKind::forward:
      cost = operation.block == 0 && shape_.schedule.kernels_reach_host && operation.weight_slot >= 0
                 ? gather(operation)
                 : kernels(forward(operation));
      break;
    case OperationKind::loss:
    case OperationKind::loss_and_gradient:
    case OperationKind::logits:
      cost = kernels(head(operation));
      break;
    case OperationKind::rebuild_key_value:
      cost = kernels(rebuild(operation));
      break;
    case OperationKind::backward:
      cost = kernels(backward(operation));
      break;
    case OperationKind::clear_gradient:
      // What products write is not cleared: all matrices but that of an embedding that no head multiplies
      // with.
      if (operation.block == 0 && !shape_.layout.head_uses_embedding)
        cost = kernels(gradient_pass(operation));
      break;
    case OperationKind::gradient_norm:
      cost = kernels(gradient_pass(operation));
      break;
    case OperationKind::keep_gradient: {  // read and written on the device
      KernelWork work;
      if (operation.bytes > 0) work.move(2.0 * static_cast<double>(operation.bytes), efficiency::whole);
      cost = kernels(work);
      break;
    }
    case OperationKind::release_weights:
    case OperationKind::verdict:
      break;
  }
  // Lanes of kernels wait on their streams, the others with their threads (see Executor).
  const bool waits_on_stream = operation.lane == Lane::compute || operation.lane == Lane::update;
  cost.wake_seconds =
      waits_on_stream ? value(profile_.device.kernel_seconds) : value(profile_.host.handover_seconds);
  return cost;
}

// --- the optimizer and copies ---

OperationCost OperationCosts::host_update(const Operation& operation) const {
  OperationCost cost;
  const auto bytes = static_cast<double>(operation.bytes);
  const double bytes_per_second =
      adamw_bytes_per_parameter * value(profile_.host.adamw_parameters_per_second);
  cost.seconds = bytes / bytes_per_second;
  cost.of(Resource::host_memory) = bytes_per_second / host_bytes_per_second_;
  cost.of(Resource::host_cores) = 1.0;
  return cost;
}

OperationCost OperationCosts::device_update(const Operation& operation) const {
  OperationCost cost;
  cost.seconds = value(profile_.device.kernel_seconds) +
                 static_cast<double>(operation.bytes) /
                     (adamw_bytes_per_parameter * value(profile_.device.adamw_parameters_per_second));
  // It fills the device: kernels of matrix products leave no registers for blocks of another one beside them.
  // Its stream has the higher priority, so that it takes most of the device while it runs.
  cost.weight = 8.0;
  cost.of(Resource::compute) = 1.0;
  cost.of(Resource::device_memory) =
      std::min(1.0, static_cast<double>(operation.bytes) /
                        (value(profile_.device.copy_bytes_per_second) * cost.seconds));
  if (profile_.device.simulated) {
    cost.of(Resource::host_cores) = 1.0;
    cost.of(Resource::host_memory) =
        std::min(1.0, static_cast<double>(operation.bytes) / (host_bytes_per_second_ * cost.seconds));
  }
  return cost;
}

/// Few thread blocks that wait for the link: what they take from the passes is not counted. The profile's
/// rate is that of gradients on the host.
OperationCost OperationCosts::update_in_place(const Operation& operation) const {
  const double elements = static_cast<double>(operation.bytes) / adamw_bytes_per_parameter;
  const DeviceUpdate& update = shape_.schedule.device_update;
  const bool gradient_crosses = update.kept(operation.block) == 0;
  OperationCost cost;
  const double in = elements * (gradient_crosses ? 16.0 : 12.0), out = elements * 12.0;
  cost.seconds =
      value(profile_.device.kernel_seconds) +
      (in + out) / (adamw_bytes_per_parameter * value(profile_.link.adamw_in_place_parameters_per_second));
  const auto part_of = [&](double bytes, double rate) {
    return std::min(1.0, bytes / (rate * cost.seconds));
  };
  const auto& link = profile_.link;
  cost.of(Resource::link_in) = part_of(in, value(link.kernel_read_bytes_per_second));
  cost.of(Resource::link_out) = part_of(out, value(link.kernel_write_bytes_per_second));
  cost.of(Resource::link_duplex) = part_of(
      in + out, std::max(value(link.kernel_read_bytes_per_second), value(link.duplex_bytes_per_second)));
  cost.of(Resource::host_memory) = part_of(in + out, host_bytes_per_second_);
  cost.weight = in_place_weight * copy_weight_;
  return simulated(cost);
}

OperationCost OperationCosts::promotion(const Operation& operation) const {
  OperationCost cost = copy(operation, true, 3);
  if (operation.bytes == 0) return cost;
  const double rate = value(profile_.link.kernel_read_bytes_per_second);
  const double by_engine = cost.seconds;
  cost.seconds = value(profile_.device.kernel_seconds) + static_cast<double>(operation.bytes) / rate;
  for (const Resource resource : {Resource::link_duplex, Resource::host_memory, Resource::device_memory}) {
    cost.of(resource) = std::min(1.0, cost.of(resource) * by_engine / cost.seconds);
  }
  cost.of(Resource::link_in) = 1.0;
  return simulated(cost);
}

OperationCost OperationCosts::gather(const Operation& operation) const {
  OperationCost cost = kernels(forward(operation));
  const double bytes = tokens(operation) * static_cast<double>(shape_.spec.hidden_size) *
                       static_cast<double>(size_of(shape_.compute));
  const double seconds = bytes / value(profile_.link.kernel_read_bytes_per_second);
  cost.seconds = std::max(cost.seconds, seconds);
  cost.of(Resource::link_in) = seconds / cost.seconds;
  cost.of(Resource::host_memory) = std::min(1.0, bytes / (host_bytes_per_second_ * cost.seconds));
  return cost;
}

/// Kernels of a simulated device run on the host's cores, in its memory.
OperationCost OperationCosts::simulated(OperationCost cost) const {
  if (profile_.device.simulated) cost.of(Resource::host_cores) = 1.0 / value(profile_.host.cores);
  return cost;
}

OperationCost OperationCosts::copy(const Operation& operation, bool to_device, int num_copies) const {
  OperationCost cost;
  const auto bytes = static_cast<double>(operation.bytes);
  if (bytes == 0.0 && operation.kind != OperationKind::emit_gradient) return cost;
  const auto& link = profile_.link;
  const double rate = value(to_device ? link.to_device_bytes_per_second : link.to_host_bytes_per_second);
  cost.seconds = num_copies * value(link.copy_seconds) + bytes / rate;
  const auto part_of = [&](double capacity) { return std::min(1.0, bytes / (capacity * cost.seconds)); };
  cost.of(to_device ? Resource::link_in : Resource::link_out) = part_of(rate);
  cost.of(Resource::link_duplex) = part_of(std::max(rate, value(link.duplex_bytes_per_second)));
  cost.of(Resource::host_memory) = part_of(host_bytes_per_second_);
  cost.of(Resource::device_memory) = part_of(value(profile_.device.copy_bytes_per_second));
  cost.weight = copy_weight_;
  if (profile_.device.simulated) {  // a thread reads and writes host memory
    cost.of(Resource::host_memory) = std::min(1.0, 2.0 * cost.of(Resource::host_memory));
    cost.of(Resource::host_cores) = 1.0 / value(profile_.host.cores);
  }
  return cost;
}

// --- kernels ---

double OperationCosts::tokens(const Operation& operation) const {
  return static_cast<double>(chunks_.chunks[static_cast<std::size_t>(operation.chunk)].num_tokens);
}

/// Length of the whole row whose queries see as many keys on average: (L + 1) / 2.
double OperationCosts::row_tokens(const Operation& operation) const {
  const auto pairs = static_cast<double>(pairs_.of(operation.block, operation.chunk));
  const double queries = tokens(operation);
  return queries > 0.0 ? std::max(1.0, 2.0 * pairs / queries - 1.0) : 1.0;
}

OperationCost OperationCosts::kernels(const KernelWork& work) const {
  const auto& device = profile_.device;
  const bool f32 = shape_.compute != DType::bf16;
  const auto seconds = [](double flops, double rate) { return flops > 0.0 ? flops / rate : 0.0; };
  const RateCurve& backward_rates = shape_.deterministic
                                        ? device.attention_backward_flops_per_second
                                        : device.attention_backward_nondeterministic_flops_per_second;
  OperationCost cost;
  cost.seconds =
      seconds(work.gemm_flops, speed_up_ * (f32 ? value(device.f32_gemm_flops_per_second)
                                                : device.bf16_gemm_flops_per_second.at(work.gemm_tokens))) +
      seconds(work.attention_forward_flops,
              speed_up_ * (f32 ? value(device.f32_attention_flops_per_second)
                               : device.attention_forward_flops_per_second.at(work.row_tokens))) +
      seconds(work.attention_backward_flops, speed_up_ * (f32 ? value(device.f32_attention_flops_per_second)
                                                              : backward_rates.at(work.row_tokens))) +
      work.copy_bytes / value(device.copy_bytes_per_second) + work.launches * value(device.kernel_seconds);
  if (cost.seconds == 0.0) return cost;
  cost.of(Resource::compute) = 1.0;
  cost.of(Resource::device_memory) =
      std::min(1.0, work.bytes / (value(device.copy_bytes_per_second) * cost.seconds));
  if (device.simulated) {
    cost.of(Resource::host_cores) = 1.0;
    cost.of(Resource::host_memory) = std::min(1.0, work.bytes / (host_bytes_per_second_ * cost.seconds));
  }
  return cost;
}

/// decoder_forward, kernel by kernel; of the embedding, the lookup.
OperationCosts::KernelWork OperationCosts::forward(const Operation& operation) const {
  const ModelSpec& spec = shape_.spec;
  const double t = tokens(operation);
  const auto size = static_cast<double>(size_of(shape_.compute));
  const double h = size * t * static_cast<double>(spec.hidden_size);
  const double q = size * t * static_cast<double>(spec.query_size());
  const double kv = size * t * static_cast<double>(spec.key_value_size());
  const double f = size * t * static_cast<double>(spec.intermediate_size);
  KernelWork work;
  if (operation.block == 0) {
    work.move(2.0 * h, efficiency::embedding_forward);
    return work;
  }
  work.gemm_flops = operation.flops - operation.attention_flops;
  work.gemm_tokens = t;
  work.attention_forward_flops = operation.attention_flops;
  work.row_tokens = row_tokens(operation);
  work.launches = 7;                             // attention, products, a block's vectors
  work.move(2.0 * h, efficiency::norm_forward);  // input_norm
  work.move(2.0 * (q + 2.0 * kv), spec.qk_norm ? efficiency::heads_forward_norm : efficiency::heads_forward);
  work.move(2.0 * h, efficiency::norm_forward);  // post_attention_norm
  work.move(3.0 * f, efficiency::swiglu_forward);
  for (const bool bias : {spec.output_bias, spec.mlp_bias}) {  // project_onto_residual
    if (!bias) continue;
    work.move(2.0 * h, efficiency::add_bias);
    work.move(3.0 * h, efficiency::add);
  }
  if (spec.mlp_bias) work.move(4.0 * f, efficiency::add_bias);
  return work;
}

/// head_loss and head_loss_and_gradient, over tiles. Logits are fp32: read once for the loss; for the
/// gradient read twice and written in the compute dtype.
OperationCosts::KernelWork OperationCosts::head(const Operation& operation) const {
  const ModelSpec& spec = shape_.spec;
  const bool last_token_only = operation.kind == OperationKind::logits;
  const double t = last_token_only ? 1.0 : tokens(operation);
  const double tiles = std::ceil(t / static_cast<double>(std::max<std::int64_t>(1, shape_.loss_tile_tokens)));
  const auto size = static_cast<double>(size_of(shape_.compute));
  const double h = size * t * static_cast<double>(spec.hidden_size);
  const double logits = t * static_cast<double>(spec.vocab_size);
  KernelWork work;
  work.gemm_flops = last_token_only ? operation.flops / tokens(operation) : operation.flops;
  work.gemm_tokens = t / tiles;
  work.move(2.0 * h, efficiency::norm_forward);
  if (operation.kind == OperationKind::loss) work.move(4.0 * logits, efficiency::loss_only);
  if (operation.kind == OperationKind::loss_and_gradient) {
    work.move((8.0 + size) * logits, efficiency::cross_entropy);
    work.move(3.0 * h, efficiency::norm_backward);
  }
  work.launches = static_cast<int>(tiles) * (operation.kind == OperationKind::loss_and_gradient ? 8 : 4);
  return work;
}

/// decoder_rebuild_key_value.
OperationCosts::KernelWork OperationCosts::rebuild(const Operation& operation) const {
  const ModelSpec& spec = shape_.spec;
  const double t = tokens(operation);
  const auto size = static_cast<double>(size_of(shape_.compute));
  const double h = t * static_cast<double>(spec.hidden_size);
  const double kv = t * static_cast<double>(spec.key_value_size());
  const ActivationPolicy kept = shape_.schedule.policy(operation.block, chunks_, operation.chunk);
  const bool projects =
      kept != ActivationPolicy::all || !shape_.schedule.activations_on_device(operation.block);
  KernelWork work;
  if (projects) {
    work.move(2.0 * size * h, efficiency::norm_forward);
    ++work.launches;
  }
  // The schedule counts this product in the backward pass, where there is none when projections are saved.
  if (projects && kept == ActivationPolicy::all) {
    work.gemm_flops = 4.0 * kv * static_cast<double>(spec.hidden_size);
    work.gemm_tokens = t;
  }
  work.move(4.0 * size * kv, efficiency::key_value_forward);
  return work;
}

/// decoder_backward, kernel by kernel; of the embedding, the scatter into its fp32 gradient.
OperationCosts::KernelWork OperationCosts::backward(const Operation& operation) const {
  const ModelSpec& spec = shape_.spec;
  const double t = tokens(operation);
  const auto size = static_cast<double>(size_of(shape_.compute));
  const double h = size * t * static_cast<double>(spec.hidden_size);
  const double q = size * t * static_cast<double>(spec.query_size());
  const double kv = t * static_cast<double>(spec.key_value_size());
  const double f = size * t * static_cast<double>(spec.intermediate_size);
  KernelWork work;
  if (operation.block == 0) {
    work.move(h + 8.0 * t * static_cast<double>(spec.hidden_size), efficiency::embedding_backward);
    return work;
  }
  const SavedIntermediates saved =
      saved_by(shape_.schedule.policy(operation.block, chunks_, operation.chunk));
  work.gemm_flops = operation.flops - operation.attention_flops;
  work.gemm_tokens = t;
  // Forward again is 1 part beside 2.5 of backward (see BlockCost).
  const double again = saved.attention ? 0.0 : operation.attention_flops / 3.5;
  work.attention_forward_flops = again;
  work.attention_backward_flops = operation.attention_flops - again;
  work.row_tokens = row_tokens(operation);
  work.launches = saved.projections ? 14 : 18;  // products and attention
  work.move(2.0 * q, efficiency::query_forward);
  if (!saved.projections) {
    work.move(2.0 * h, efficiency::norm_forward);
    work.move(2.0 * h, efficiency::norm_forward);
    if (spec.mlp_bias) work.move(4.0 * f, efficiency::add_bias);
  }
  // mlp_backward
  work.move(6.0 * f, efficiency::swiglu_backward);
  work.move(5.0 * h, efficiency::norm_backward_residual);  // with its input's norm again
  // attention_backward: gradients of keys and values come in the accumulator dtype,
  const double accumulator = static_cast<double>(size_of(shape_.accumulator()));
  // and with a norm what entered it is read again.
  const double normed = spec.qk_norm ? q + size * kv : 0.0;
  work.move(2.0 * q + 2.0 * (accumulator + size) * kv + normed,
            spec.qk_norm ? efficiency::heads_backward_norm : efficiency::heads_backward);
  work.move(5.0 * h, efficiency::norm_backward_residual);  // with its input's norm again
  return work;
}

/// Once over a block's fp32 gradient.
OperationCosts::KernelWork OperationCosts::gradient_pass(const Operation& operation) const {
  KernelWork work;
  work.move(4.0 * static_cast<double>(shape_.gradient_elements(operation.block)), efficiency::whole);
  ++work.launches;
  return work;
}

}  // namespace layerstream

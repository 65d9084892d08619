#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "core/ledger.hpp"
#include "core/random.hpp"
#include "doctor/checks.hpp"
#include "doctor/memory_pair.hpp"
#include "doctor/residency.hpp"
#include "engine/calibrate_memory.hpp"
#include "engine/device_timer.hpp"
#include "ops/adamw.hpp"
#include "ops/elementwise.hpp"
#include "ops/libraries.hpp"

namespace layerstream::doctor {
namespace {

constexpr double seconds_a_rate = 0.2;

/// Host memory that kernels reach: as it is where the device shares page tables, else pinned and mapped.
class ReachedMemory {
 public:
  explicit ReachedMemory(const Patient& patient) : device_(*patient.device), pair_(patient) {
    if (!patient.shares_page_tables()) pin_ = pair_.pin(false);
    libraries_.prepare(device_.stream(Lane::compute));
  }

  /// Why kernels do not reach all of it; empty if they do.
  std::string refusal() const { return pin_ ? pin_->shortfall() : std::string(); }
  const MemoryPair& pair() const { return pair_; }
  ops::Context context() {
    return {.stream = device_.stream(Lane::compute),
            .workspace = nullptr,
            .workspace_bytes = 0,
            .libraries = &libraries_};
  }
  std::byte* host() const { return static_cast<std::byte*>(pair_.host().data()); }
  std::byte* on_device() const { return static_cast<std::byte*>(pair_.on_device().data()); }
  /// The index-th half of either memory as fp32.
  TensorView half(std::byte* memory, int index) const {
    const auto elements = static_cast<std::int64_t>(pair_.bytes() / 2 / sizeof(float));
    return {memory + static_cast<std::size_t>(index * elements) * sizeof(float), DType::f32, {elements}};
  }
  double seconds_of(const std::function<void()>& work) {
    return DeviceTimer(device_, seconds_a_rate).seconds_of(device_.stream(Lane::compute), work);
  }

 private:
  Device& device_;
  MemoryPair pair_;
  std::unique_ptr<HostPin> pin_;
  ops::Libraries libraries_;
};

/// What kernels read of host memory is what the host wrote, and the other way round.
Finding kernels_on_host_memory(const Patient& patient, ReachedMemory& memory) {
  const TensorView a = memory.half(memory.host(), 0), b = memory.half(memory.host(), 1);
  const TensorView sum = memory.half(memory.on_device(), 0);
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    a.as<float>()[i] = static_cast<float>(i % 1021);
    b.as<float>()[i] = static_cast<float>(i % 509);
  }
  const double read = memory.seconds_of([&] { ops::add(memory.context(), sum, a, b); });
  // The sum into host memory, and that is read by the host.
  ops::add(memory.context(), a, a, b);
  patient.device->synchronize();
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    wrong += a.as<float>()[i] != static_cast<float>(i % 1021 + i % 509) ? 1 : 0;
  }
  const double write = memory.seconds_of([&] { ops::fill_zero(memory.context(), b); });
  const auto array = static_cast<double>(a.bytes());
  Finding finding{.found = fmt::format("{:.1f} GB/s read, {:.1f} GB/s written; {} of {} numbers wrong",
                                       2e-9 * array / read, 1e-9 * array / write, wrong, a.numel()),
                  .expected = "no number wrong"};
  if (wrong > 0) {
    finding.verdict = Verdict::fail;
    finding.remedy = "do not use backend: coherent here; report it with --output";
    return finding;
  }
  if (!patient.shares_page_tables()) return finding;
  // dnhkng.github.io/posts/gh200-benchmarking: 331 to 339 GB/s read and written together.
  constexpr double least = 0.8 * 331e9;
  finding.expected +=
      fmt::format("; at least {:.0f} GB/s read (80% of what is published of GH200)", 1e-9 * least);
  if (2.0 * array / read < least) {
    finding.verdict = Verdict::warn;
    finding.remedy = "is the machine idle? see memory nodes and page size above";
  }
  return finding;
}

/// The device's update of state in host memory has the bits of the host's.
Finding update_in_place(const Patient& patient, ReachedMemory& memory) {
  const std::size_t bytes = memory.pair().bytes() / 2 / 4096 * 4096;
  const ops::AdamWSlice by_device = slice_over({memory.host(), bytes});
  const ops::AdamWSlice by_host = slice_over({memory.host() + bytes, bytes});
  for (std::int64_t i = 0; i < by_device.n; ++i) {
    const auto number = [&](std::uint64_t stream) {
      return static_cast<float>(normal_at(1, stream, static_cast<std::uint64_t>(i % 100'003)));
    };
    const SplitFloat weight = split(number(0));
    by_device.hi[i] = weight.hi;
    by_device.lo[i] = weight.lo;
    by_device.exp_avg[i] = 0.1F * number(1);
    by_device.exp_avg_sq[i] = number(2) * number(2);
    const_cast<float*>(by_device.gradient)[i] = number(3);
  }
  std::memcpy(memory.host() + bytes, memory.host(), bytes);
  const ops::AdamWScalars scalars =
      ops::adamw_scalars({.learning_rate = 1e-3, .weight_decay = 0.1, .gradient_scale = 0.5, .step = 7});
  // On an H200 over PCIe 4 fill the link (3.04 G parameters/s; 16 reach 2.9) and leave matrix products their
  // speed, of which 16 take more than half.
  constexpr int thread_blocks = 4;
  const auto update = [&] {
    ops::adamw_device(memory.context(), by_device, by_device.n, scalars, scalars, thread_blocks);
  };
  update();
  patient.device->synchronize();
  ops::adamw_host(by_host, scalars);
  const bool equal = std::memcmp(memory.host(), memory.host() + bytes, bytes) == 0;
  const double seconds = memory.seconds_of(update);
  return {.verdict = equal ? Verdict::ok : Verdict::fail,
          .found = fmt::format("{} parameters {} the host's; {:.2f} Gparam/s with {} thread blocks",
                               by_device.n, equal ? "bit for bit" : "NOT equal to",
                               1e-9 * static_cast<double>(by_device.n) / seconds, thread_blocks),
          .expected = "the bits of the host's update",
          .remedy = equal ? "" : "set device_update: staged; report it with --output"};
}

/// Pages that kernels use again and again stay where they are (access counters of a coherent device move them
/// when nothing binds them, after 256 accesses by default).
Finding residency_under_kernels(const Patient& patient, ReachedMemory& memory) {
  const HostRegion& host = memory.pair().host();
  constexpr int passes = 600;
  // Of a part, so that it does not take minutes over a slow link.
  const std::size_t part = std::min<std::size_t>(host.bytes(), std::size_t{16} << 20) / 8 * 8;
  const PageResidency before = sample_residency(host.data(), part);
  const TensorView used(memory.host(), DType::f32, {static_cast<std::int64_t>(part / sizeof(float))});
  const TensorView copy(memory.on_device(), DType::f32, used.shape());
  for (int i = 0; i < passes; ++i) ops::add(memory.context(), copy, used, used);
  patient.device->synchronize();
  return judge_residency(
      {.before = before,
       .after = sample_residency(host.data(), part),
       .use = fmt::format("{} reads of {} by kernels", passes, format_bytes(part)),
       .node = patient.host_node.node,
       .shortfall = host.binding_shortfall(),
       .remedy_for_moved =
           "bound pages move to where kernels use them: a newer driver (R570), or "
           "uvm_perf_access_counter_migration_enable=0 for nvidia_uvm; report it with --output"});
}

/// Which way brings weights faster: for weight_promotion.
Finding promotion(const Patient& patient, ReachedMemory& memory) {
  Device& device = *patient.device;
  const StreamView stream = device.stream(Lane::compute);
  const std::size_t bytes = memory.pair().bytes();
  const auto rate = [&](Link& link) {
    return static_cast<double>(bytes) /
           memory.seconds_of([&] { link.copy(memory.on_device(), memory.host(), bytes, stream); });
  };
  const double by_engine = rate(device.link()), by_kernel = rate(device.kernel_link());
  return {.found = fmt::format(
              "{:.1f} GB/s by the copy engine, {:.1f} GB/s by a kernel; faster: weight_promotion: {}",
              1e-9 * by_engine, 1e-9 * by_kernel, by_kernel > by_engine ? "kernel" : "copy_engine")};
}

/// A check of memory that kernels reach. Where they cannot reach it nothing is wrong: explicit copies need
/// no such memory.
Check of_reached_memory(std::string name, Finding (*examine)(const Patient&, ReachedMemory&)) {
  return {.name = std::move(name), .needs_device = true, .run = [examine](const Patient& patient) -> Finding {
            ReachedMemory memory(patient);
            if (const std::string refusal = memory.refusal(); !refusal.empty()) {
              return {.verdict = Verdict::not_applicable,
                      .found = refusal,
                      .remedy =
                          "needed for the emulated coherent backend only; raise the limit (ulimit -l, or "
                          "--ulimit memlock=-1 for a container) to use that"};
            }
            return examine(patient, memory);
          }};
}

}  // namespace

std::vector<Check> kernel_checks() {
  return {of_reached_memory("kernels on host memory", kernels_on_host_memory),
          of_reached_memory("update in place", update_in_place),
          of_reached_memory("residency of memory that kernels use", residency_under_kernels),
          of_reached_memory("promotion", promotion)};
}

}  // namespace layerstream::doctor

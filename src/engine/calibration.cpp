#include "engine/calibration.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include "backends/host_region.hpp"
#include "core/ledger.hpp"
#include "core/worker_pool.hpp"
#include "engine/calibrate_kernels.hpp"
#include "engine/calibrate_memory.hpp"
#include "engine/calibrate_updaters.hpp"
#include "ops/adamw.hpp"

namespace layerstream {
namespace {

using Clock = std::chrono::steady_clock;

/// A work of a curve that takes longer than this is the curve's last.
constexpr double longest_point = 4.0;
/// Bytes of a parameter's state that cross the link, both ways.
constexpr double staged_bytes = 24.0;

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "a CPU that /proc/cpuinfo does not name";
}

/// "NVIDIA H200" of "NVIDIA H200 (sm_90), 139 GiB of 140 GiB".
std::string device_name(const Device& device) {
  const std::string description = device.description();
  return description.substr(0, std::min(description.find(" ("), description.find(',')));
}

class Calibrator {
 public:
  Calibrator(Device& device, const ModelSpec& spec, const CalibrationOptions& options,
             std::string_view source, const std::function<void(std::string_view)>& progress)
      : device_(device),
        spec_(spec),
        options_(options),
        source_(source),
        progress_(progress),
        pool_(options.threads),
        host_(host_bytes(), {.component = "calibration", .pool = &pool_}),
        pin_(device.pin(host_.data(), host_.bytes(), true, {})),
        region_(device.allocate(device_bytes())) {}

  Calibration run() {
    HardwareProfile& profile = result_.profile;
    profile.description =
        fmt::format("{} with {}; measured by layerstream calibrate", device_name(device_), cpu_name());
    profile.device.name = device_name(device_);
    profile.device.simulated = device_.uses_host_memory();
    profile.device.memory_bytes =
        stated(static_cast<double>(device_.memory_limit()), "what may be allocated");
    profile.link.coherent = device_.capabilities().shares_host_page_tables;
    profile.host.name = cpu_name();
    profile.host.memory_bytes =
        stated(static_cast<double>(options_.host_budget), "what this process may hold");
    profile.host.cores = stated(options_.threads, "what this process may use");
    measure_link();
    measure_host();
    measure_device();
    return std::move(result_);
  }

 private:
  /// A simulated device's memory is the host's as well.
  std::size_t host_bytes() const {
    return std::max(std::size_t{8} << 20, std::min(options_.host_bytes, options_.host_budget / 8));
  }
  std::size_t device_bytes() const {
    const std::size_t limit =
        device_.memory_limit() - std::min(device_.memory_limit(), device_.overhead_bytes());
    return std::min(options_.device_bytes, limit / 2);
  }

  Rate measured(double value) const { return {value, source_}; }
  Rate stated(double value, std::string_view what) const {
    return {value, fmt::format("{}: {}", source_, what)};
  }
  std::span<std::byte> host() const { return {static_cast<std::byte*>(host_.data()), host_.bytes()}; }
  std::span<std::byte> on_device() const {
    return {static_cast<std::byte*>(region_->data()), region_->bytes()};
  }

  double needed(double rate) const {
    if (rate > 0.0) return rate;
    throw ResourceError(fmt::format(
        "device memory: a layer of this model over few tokens does not fit into {}; free device memory, raise "
        "--device-memory or give a smaller --model",
        format_bytes(on_device().size())));
  }

  /// Points at first, first · step, ... until one does not fit or takes too long.
  template <class Measure>
  auto curve(std::int64_t first, std::int64_t last, std::int64_t step, const Measure& measure) const {
    std::array<std::vector<RateCurve::Point>, std::tuple_size_v<decltype(measure(first))>> points;
    for (std::int64_t size = first; size <= std::max(first, last); size *= step) {
      const auto start = Clock::now();
      const auto rates = measure(size);
      if (rates[0] == 0.0) break;
      for (std::size_t i = 0; i < points.size(); ++i) {
        points[i].push_back({.at = static_cast<double>(size), .rate = measured(rates[i])});
      }
      // On a GPU what takes long is the making of plans.
      if (device_.uses_host_memory() && std::chrono::duration<double>(Clock::now() - start).count() >
                                            longest_point / static_cast<double>(step))
        break;
    }
    if (points[0].empty()) needed(0.0);
    std::array<RateCurve, points.size()> curves;
    for (std::size_t i = 0; i < points.size(); ++i) curves[i] = RateCurve(std::move(points[i]));
    return curves;
  }

  void measure_link() {
    progress_("link: copies each way by size, and both ways at once");
    const LinkRates rates = measure_link_rates(device_, on_device(), host(), options_.seconds_per_rate);
    HardwareProfile::Link& link = result_.profile.link;
    const double in = rates.by_size.back().to_device;
    const double out = rates.by_size.back().to_host;
    link.to_device_bytes_per_second = measured(in);
    link.to_host_bytes_per_second = measured(out);
    // Other programs disturb one measurement and not the other; a profile must not contradict itself.
    link.duplex_bytes_per_second = measured(std::clamp(rates.duplex, std::max(in, out), in + out));
    link.copy_seconds = measured(std::clamp(rates.copy_seconds, 1e-8, 1e-2));
    result_.profile.host.handover_seconds = measured(std::clamp(rates.handover_seconds, 1e-8, 1e-2));
    result_.notes += "link, GB/s to the device and back, by size of the copies:\n";
    for (const CopyRate& rate : rates.by_size) {
      result_.notes += fmt::format("  {:>10}  {:6.1f}  {:6.1f}\n", format_bytes(rate.bytes),
                                   1e-9 * rate.to_device, 1e-9 * rate.to_host);
    }
  }

  void measure_host() {
    HardwareProfile::Host& profile = result_.profile.host;
    progress_("host memory: triad");
    profile.triad_bytes_per_second = measured(measure_triad(pool_, host(), options_.seconds_per_rate));
    result_.notes += fmt::format("host AdamW ({}), Gparam/s by threads:\n", ops::adamw_host_target());
    double best = 0.0;
    for (int threads = 1;; threads = std::min(2 * threads, options_.threads)) {
      progress_(fmt::format("host AdamW with {} threads", threads));
      WorkerPool pool(threads);
      const double rate = measure_host_adamw(pool, host(), options_.seconds_per_rate);
      result_.notes += fmt::format("  {:>10}  {:6.3f}\n", threads, 1e-9 * rate);
      best = std::max(best, rate);
      if (threads == options_.threads) break;
    }
    profile.adamw_parameters_per_second = measured(best);
    progress_("both optimizers: the device's staged, alone and beside the host's");
    ops::Libraries libraries;
    const double duplex = result_.profile.link.duplex_bytes_per_second.value;
    const UpdaterRates rates = measure_updaters(device_, pool_, libraries, on_device(), host(), 0.7 * best,
                                                0.7 * duplex / staged_bytes, 2.0 * options_.seconds_per_rate);
    result_.notes += fmt::format(
        "device AdamW over staged state: {:.3f} Gparam/s alone; {:.3f} beside the host's {:.3f}\n",
        1e-9 * rates.device_alone, 1e-9 * rates.device, 1e-9 * rates.host);
    profile.adamw_beside_copies_parameters_per_second = measured(std::min(best, rates.host));
    profile.copies_beside_adamw_bytes_per_second =
        measured(std::clamp(staged_bytes * rates.device, 1e6, duplex));
  }

  void measure_device() {
    ops::Libraries libraries;
    KernelCalibration kernels(device_, libraries, spec_, on_device(), options_.seconds_per_rate);
    HardwareProfile::Device& profile = result_.profile.device;
    progress_("device: copy, AdamW, launches, kernels on host memory");
    profile.copy_bytes_per_second = measured(kernels.copy_bytes_per_second());
    profile.adamw_parameters_per_second = measured(kernels.adamw_parameters_per_second());
    profile.kernel_seconds = measured(std::clamp(kernels.kernel_seconds(), 1e-8, 1e-2));
    const KernelCalibration::OnHostMemory on_host = kernels.on_host_memory(host());
    const auto& fastest =
        *std::ranges::max_element(on_host.adamw, {}, [](const auto& of) { return of.parameters_per_second; });
    result_.profile.link.adamw_in_place_parameters_per_second = measured(fastest.parameters_per_second);
    result_.profile.link.adamw_in_place_thread_blocks = measured(fastest.thread_blocks);
    result_.notes += "device AdamW on state in host memory, Gparam/s by thread blocks:\n";
    for (const auto& [blocks, rate] : on_host.adamw)
      result_.notes += fmt::format("  {:>10}  {:6.3f}\n", blocks, 1e-9 * rate);
    result_.profile.link.kernel_read_bytes_per_second = measured(on_host.read_bytes_per_second);
    result_.profile.link.kernel_write_bytes_per_second = measured(on_host.write_bytes_per_second);

    // Card at rest first, then warm: the curve holds sustained rates.
    double cool_ratio = 1.0;
    if (!device_.uses_host_memory()) {
      progress_("matrix products of a card at rest, then of a warm one");
      const std::int64_t tokens = std::min<std::int64_t>(4096, options_.largest_chunk);
      const double cool = kernels.products(DType::bf16, tokens);
      kernels.warm_up(DType::bf16, tokens, options_.warm_up_seconds);
      const double warm = kernels.products(DType::bf16, tokens);
      if (warm > 0.0) cool_ratio = std::clamp(cool / warm, 1.0, 3.0);
    }
    profile.cool_ratio = measured(cool_ratio);
    profile.bf16_gemm_flops_per_second =
        curve(device_.uses_host_memory() ? 32 : 256, options_.largest_chunk, 2, [&](std::int64_t tokens) {
          progress_(fmt::format("matrix products of a layer, {} tokens", tokens));
          return std::array{kernels.products(DType::bf16, tokens)};
        })[0];
    const auto attention = curve(256, options_.largest_chunk, 4, [&](std::int64_t row) {
      progress_(fmt::format("attention, rows of {} tokens", row));
      const std::int64_t tokens = device_.uses_host_memory() ? row : std::max<std::int64_t>(8192, row);
      const auto rates = kernels.attention(DType::bf16, row, tokens);
      return std::array{rates.forward, rates.backward, rates.backward_nondeterministic};
    });
    profile.attention_forward_flops_per_second = attention[0];
    profile.attention_backward_flops_per_second = attention[1];
    profile.attention_backward_nondeterministic_flops_per_second = attention[2];

    progress_("matrix products and attention in fp32");
    const std::int64_t tokens = device_.uses_host_memory() ? 64 : 2048;
    profile.f32_gemm_flops_per_second = measured(needed(kernels.products(DType::f32, tokens)));
    const std::int64_t row = device_.uses_host_memory() ? 256 : 1024;
    const auto f32 = kernels.attention(DType::f32, row, row);
    profile.f32_attention_flops_per_second =
        measured(3.5 / (1.0 / needed(f32.forward) + 2.5 / needed(f32.backward)));
  }

  Device& device_;
  const ModelSpec& spec_;
  const CalibrationOptions& options_;
  std::string source_;
  const std::function<void(std::string_view)>& progress_;
  WorkerPool pool_;
  HostRegion host_;
  std::unique_ptr<HostPin> pin_;
  std::unique_ptr<DeviceRegion> region_;
  Calibration result_;
};

}  // namespace

Calibration calibrate(Device& device, const ModelSpec& spec, const CalibrationOptions& options,
                      std::string_view source, const std::function<void(std::string_view)>& progress) {
  return Calibrator(device, spec, options, source, progress).run();
}

}  // namespace layerstream

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "backends/host_region.hpp"
#include "backends/measure_rates.hpp"
#include "backends/topology/pci_link.hpp"
#include "core/error.hpp"
#include "core/ledger.hpp"
#include "doctor/checks.hpp"
#include "doctor/memory_pair.hpp"
#include "doctor/residency.hpp"
#include "doctor/scratch_file.hpp"
#include "io/file_source.hpp"

namespace layerstream::doctor {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

MeasuredRates rates_of(const Patient& patient, const MemoryPair& pair) {
  return measure_link(*patient.device, pair.on_device().data(), pair.host().data(), pair.bytes());
}

void to_device(const Patient& patient, const MemoryPair& pair) {
  patient.device->link().copy(pair.on_device().data(), pair.host().data(), pair.bytes(),
                              patient.device->stream(Lane::h2d));
}

/// What copies should reach at least; nothing if that is not known.
struct Floor {
  double to_device = 0.0, to_host = 0.0;
  std::string why = {};
};

std::optional<Floor> floor_of(const Patient& patient) {
  if (!patient.has_gpu()) return std::nullopt;
  if (patient.shares_page_tables()) {
    // dnhkng.github.io/posts/gh200-benchmarking: 377 and 297 GB/s on a GH200 96/480; Schieffer et al.
    // (arXiv:2407.07850): 375 and 297.
    return Floor{300e9, 240e9, "80% of what is published of GH200"};
  }
  const PciLink link = read_pci_link(patient.device->capabilities().pci_bus_id, patient.roots);
  const double rate = 0.7 * link.bytes_per_second();
  if (rate <= 0.0) return std::nullopt;
  return Floor{rate, rate, fmt::format("70% of the link's {:.1f} GB/s", 1e-9 * link.bytes_per_second())};
}

Finding judged(const Patient& patient, const MemoryPair& pair, std::string remedy) {
  const MeasuredRates rates = rates_of(patient, pair);
  Finding finding{.found =
                      fmt::format("{:.1f} GB/s to the device, {:.1f} GB/s to the host ({} copies)",
                                  1e-9 * rates.to_device, 1e-9 * rates.to_host, format_bytes(pair.bytes()))};
  const std::optional<Floor> floor = floor_of(patient);
  if (!floor) return finding;
  finding.expected = fmt::format("at least {:.0f} and {:.0f} GB/s ({})", 1e-9 * floor->to_device,
                                 1e-9 * floor->to_host, floor->why);
  if (rates.to_device < floor->to_device || rates.to_host < floor->to_host) {
    finding.verdict = Verdict::warn;
    finding.remedy = std::move(remedy);
  }
  return finding;
}

Finding registered_rates(const Patient& patient) {
  const MemoryPair pair(patient);
  const std::unique_ptr<HostPin> pin = pair.pin(false);
  Finding finding = judged(patient, pair, "is the machine idle? see memory nodes and link above");
  if (!pin->shortfall().empty()) {
    finding.verdict = Verdict::warn;
    finding.remedy =
        pin->shortfall() + "; raise the limit (ulimit -l, or --ulimit memlock=-1 for a container)";
  }
  return finding;
}

Finding plain_rates(const Patient& patient) {
  const MemoryPair pair(patient);
  if (patient.shares_page_tables()) {
    return judged(patient, pair, "pin_memory: required registers memory for the copy engines");
  }
  const MeasuredRates rates = rates_of(patient, pair);
  return {
      .found = fmt::format("{:.1f} GB/s to the device, {:.1f} GB/s to the host{}", 1e-9 * rates.to_device,
                           1e-9 * rates.to_host, patient.has_gpu() ? ", through a small pinned buffer" : ""),
      .expected = patient.has_gpu() ? "less than registered memory; runs register theirs" : ""};
}

/// How long the call keeps its thread, of the time that the copy takes.
Finding asynchrony(const Patient& patient) {
  if (!patient.shares_page_tables()) {
    return {.verdict = Verdict::not_applicable,
            .found = patient.has_gpu() ? "runs copy from registered memory here"
                                       : "a simulated device's copies are "
                                         "the calling thread's"};
  }
  constexpr double most = 0.2;
  const MemoryPair pair(patient);
  to_device(patient, pair);
  patient.device->synchronize();
  double least_share = 1.0, call = 0.0, whole = 0.0;
  for (int round = 0; round < 3; ++round) {
    const auto start = Clock::now();
    to_device(patient, pair);
    const double called = seconds_since(start);
    patient.device->synchronize();
    const double done = seconds_since(start);
    if (called / done > least_share && round > 0) continue;
    least_share = called / done;
    call = called;
    whole = done;
  }
  return {.verdict = least_share <= most ? Verdict::ok : Verdict::warn,
          .found = fmt::format(
              "the call returns after {:.3f} of {:.3f} ms ({} from memory that is not registered)",
              1e3 * call, 1e3 * whole, format_bytes(pair.bytes())),
          .expected = fmt::format("at most {:.0f}% of the copy's time", 100.0 * most),
          .remedy =
              least_share <= most ? "" : "pin_memory: required, so that copies do not hold up their threads"};
}

Finding residency(const Patient& patient) {
  const MemoryPair pair(patient);
  const HostRegion& host = pair.host();
  const PageResidency before = sample_residency(host.data(), host.bytes());
  constexpr int copies = 4;
  for (int i = 0; i < copies; ++i) to_device(patient, pair);
  patient.device->synchronize();
  return judge_residency(
      {.before = before,
       .after = sample_residency(host.data(), host.bytes()),
       .use = fmt::format("{} copies to the device", copies),
       .node = patient.host_node.node,
       .shortfall = host.binding_shortfall(),
       .remedy_for_moved = "pages move although they are bound (access counters or NUMA balancing): sysctl "
                           "kernel.numa_balancing=0, a newer driver; report it with --output"});
}

Finding file_cache(const Patient& patient) {
  const ScratchFile file(patient.scratch, patient.file_bytes);
  if (file.is_in_memory()) {
    return {.verdict = Verdict::not_applicable,
            .found = fmt::format("{} is a file system in memory", patient.scratch.string()),
            .remedy = "give a directory on a disk: --scratch"};
  }
  const std::size_t used_before = patient.device != nullptr ? patient.device->used_bytes() : 0;
  const io::FileSource source(file.path(), io::PageCache::drop);
  std::vector<std::byte> buffer(std::min<std::size_t>(patient.file_bytes, std::size_t{16} << 20));
  for (std::uint64_t at = 0; at < source.size(); at += buffer.size()) {
    const auto count = std::min<std::uint64_t>(buffer.size(), source.size() - at);
    source.read(at, std::span(buffer).first(count));
  }
  const std::size_t used_after = patient.device != nullptr ? patient.device->used_bytes() : 0;
  const std::size_t grown = used_after - std::min(used_after, used_before);
  const double cached = file.share_in_page_cache();
  constexpr double tolerated = 0.05;
  const auto tolerated_bytes = static_cast<std::size_t>(tolerated * static_cast<double>(patient.file_bytes));
  Finding finding{
      .found = fmt::format("after reading {}: {:.1f}% of it in the page cache, {} more device memory in use",
                           format_bytes(patient.file_bytes), 100.0 * cached, format_bytes(grown)),
      .expected = "less than 5% of it in either"};
  if (cached > tolerated || grown > tolerated_bytes) {
    finding.verdict = Verdict::warn;
    finding.remedy =
        "reading a model may leave its files in memory, on Grace Hopper in the device's: use a local file system "
        "that honours POSIX_FADV_DONTNEED, a newer driver (R570), or drop_caches before a run";
  }
  return finding;
}

}  // namespace

std::vector<Check> copy_checks() {
  return {{.name = "copies of registered memory", .needs_device = true, .run = registered_rates},
          {.name = "copies of plain memory", .needs_device = true, .run = plain_rates},
          {.name = "asynchrony of copies of plain memory", .needs_device = true, .run = asynchrony},
          {.name = "residency of host memory", .needs_device = true, .run = residency},
          {.name = "file cache", .run = file_cache}};
}

}  // namespace layerstream::doctor

#include "core/affinity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>

namespace layerstream {
namespace fs = std::filesystem;

namespace {

std::optional<std::vector<int>> allowed_cpus(const fs::path& status) {
  constexpr std::string_view key = "Cpus_allowed_list:";
  std::ifstream file(status);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t begin = line.find_first_not_of(" \t", key.size());
    return begin == std::string::npos ? std::nullopt : parse_cpu_list(std::string_view(line).substr(begin));
  }
  return std::nullopt;
}

/// CPUs' worth of time that a group grants; nothing if it sets no quota.
std::optional<double> quota_of(const CgroupDirectory& group, fs::path& file) {
  std::optional<std::int64_t> quota;
  std::optional<std::int64_t> period;
  if (group.version == 2) {  // "max 100000" or "150000 100000"
    file = group.path / "cpu.max";
    const std::string text = read_kernel_file(file).value_or("");
    const std::size_t space = text.find(' ');
    if (space == std::string::npos) return std::nullopt;
    quota = parse_kernel_number(std::string_view(text).substr(0, space));
    period = parse_kernel_number(std::string_view(text).substr(space + 1));
  } else {  // −1 or microseconds
    file = group.path / "cpu.cfs_quota_us";
    quota = parse_kernel_number(read_kernel_file(file).value_or(""));
    period = parse_kernel_number(read_kernel_file(group.path / "cpu.cfs_period_us").value_or(""));
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<std::string> environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

/// OMP_NUM_THREADS may list one number per nesting level: "8,2".
std::optional<std::int64_t> outer_threads(const OpenMpSettings& openmp) {
  if (!openmp.num_threads) return std::nullopt;
  return parse_kernel_number(std::string_view(*openmp.num_threads).substr(0, openmp.num_threads->find(',')));
}

bool binds(const OpenMpSettings& openmp) {
  if (!openmp.proc_bind) return openmp.places.has_value();  // places alone turn binding on (OpenMP 5.2, 21.2)
  std::string value = *openmp.proc_bind;
  std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) { return std::tolower(c); });
  return value != "false";
}

}  // namespace

int CpuAllowance::usable() const {
  int count = std::max<int>(1, static_cast<int>(cpus.size()));
  // A quota of 1.5 CPUs still lets two threads make progress.
  if (quota) count = std::min(count, std::max(1, static_cast<int>(std::ceil(*quota))));
  return count;
}

CpuAllowance probe_cpus(const SystemRoots& roots) {
  CpuAllowance allowance;
  const fs::path status = roots.proc / "self/status";
  if (std::optional<std::vector<int>> cpus = allowed_cpus(status)) {
    allowance.cpus = std::move(*cpus);
  } else {
    allowance.cpus = {0};
    allowance.warnings.push_back(fmt::format(
        "{} does not list the allowed CPUs: one is assumed; set optimizer_threads", status.string()));
  }
  const fs::path online = roots.sys / "devices/system/cpu/online";
  const auto all = parse_cpu_list(read_kernel_file(online).value_or(""));
  allowance.online = static_cast<int>(all ? all->size() : allowance.cpus.size());
  for (const CgroupDirectory& group : cgroup_directories(roots, "cpu", allowance.warnings)) {
    fs::path file;
    const std::optional<double> quota = quota_of(group, file);
    if (!quota || (allowance.quota && *allowance.quota <= *quota)) continue;
    allowance.quota = quota;
    allowance.quota_file = file.string();
  }
  return allowance;
}

OpenMpSettings OpenMpSettings::of_this_process() {
  return {environment("OMP_NUM_THREADS"), environment("OMP_PROC_BIND"), environment("OMP_PLACES")};
}

std::vector<std::string> thread_warnings(const CpuAllowance& allowance, const OpenMpSettings& openmp) {
  std::vector<std::string> warnings = allowance.warnings;
  const int in_mask = static_cast<int>(allowance.cpus.size());
  const int usable = allowance.usable();
  if (in_mask == 1 && allowance.online > 1 && binds(openmp)) {
    warnings.push_back(
        fmt::format("OMP_PROC_BIND/OMP_PLACES have pinned the main thread to CPU {}, and threads made "
                    "later inherit that: host threads share 1 of {} CPUs; set OMP_PROC_BIND=false",
                    format_cpu_list(allowance.cpus), allowance.online));
  } else if (in_mask < allowance.online) {
    warnings.push_back(
        fmt::format("the affinity mask allows {} of {} CPUs ({}): start with more (taskset, numactl, "
                    "srun --cpus-per-task) if the host optimizer is slow",
                    in_mask, allowance.online, format_cpu_list(allowance.cpus)));
  }
  if (allowance.quota && *allowance.quota < static_cast<double>(in_mask)) {
    warnings.push_back(fmt::format("{} grants {:.2f} CPUs' time to {} allowed CPUs: {} host threads are used",
                                   allowance.quota_file, *allowance.quota, in_mask, usable));
  }
  const std::optional<std::int64_t> threads = outer_threads(openmp);
  if (openmp.num_threads && (!threads || *threads < 1)) {
    warnings.push_back(fmt::format("OMP_NUM_THREADS='{}' is not a number of threads", *openmp.num_threads));
  } else if (threads && *threads == 1 && usable > 1) {
    warnings.push_back(
        fmt::format("OMP_NUM_THREADS=1 although {} CPUs are usable: host kernels run on one thread; unset it "
                    "or set it to {}",
                    usable, usable));
  } else if (threads && *threads > usable) {
    warnings.push_back(
        fmt::format("OMP_NUM_THREADS={} although only {} CPUs are usable: threads will wait for one "
                    "another; set it to {}",
                    *threads, usable, usable));
  }
  return warnings;
}

std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const std::size_t dash = item.find('-');
    const auto first = parse_kernel_number(item.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : parse_kernel_number(item.substr(dash + 1));
    constexpr std::int64_t most = 1 << 20;
    if (!first || !last || *first < 0 || *last < *first || *last > most) return std::nullopt;
    for (std::int64_t cpu = *first; cpu <= *last; ++cpu) cpus.push_back(static_cast<int>(cpu));
  }
  if (cpus.empty()) return std::nullopt;
  return cpus;
}

std::string format_cpu_list(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (end - i > 1) text += fmt::format("-{}", cpus[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace layerstream

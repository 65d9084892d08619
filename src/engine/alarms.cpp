#include "engine/alarms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace layerstream {
namespace {

constexpr double enough_link_use = 0.60;
constexpr double enough_device_use = 0.80;
constexpr double saturated_host_use = 0.90;
/// Waits for less than this part of a step are not worth a word.
constexpr double noticeable = 0.05;

std::string percent(double part) {
  return fmt::format("{:.0f}%", 100.0 * part);
}

/// "weights 12%, optimizer 7%": the waits that matter, longest first.
std::string causes_of(const StepReport& report) {
  std::vector<std::pair<double, WaitCause>> waits;
  for (const WaitCause cause : all_wait_causes) waits.emplace_back(report.wait(cause), cause);
  std::ranges::sort(waits, std::ranges::greater{}, &std::pair<double, WaitCause>::first);
  std::string text;
  for (const auto& [seconds, cause] : waits) {
    const double part = seconds / report.seconds;
    if (!text.empty() && part < 0.01) break;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name_of(cause), percent(part));
  }
  return text;
}

}  // namespace

std::vector<std::string> alarms_of(const StepReport& report, const MeasuredRates& measured) {
  std::vector<std::string> alarms;
  if (report.seconds <= 0.0) return alarms;
  const auto link = [&](std::string_view direction, const Use& use, double peak, double waited) {
    if (peak <= 0.0 || waited < noticeable * report.seconds || use.rate() >= enough_link_use * peak) return;
    alarms.push_back(fmt::format(
        "link {} at {:.1f} GB/s, {} of the {:.1f} GB/s measured, while the device waited {} of the step for it "
        "(copies too small, host memory not pinned or on another node, or another user of the link)",
        direction, 1e-9 * use.rate(), percent(use.rate() / peak), 1e-9 * peak,
        percent(waited / report.seconds)));
  };
  link("to the device", report.to_device, measured.to_device, report.wait_for(Lane::h2d));
  link("to the host", report.to_host, measured.to_host,
       report.wait_for(Lane::d2h) + report.wait_for(Lane::update_out));
  if (report.busy_fraction() < enough_device_use) {
    alarms.push_back(
        fmt::format("device busy {}; it waited for: {}", percent(report.busy_fraction()), causes_of(report)));
  }
  const Use& host = report.of(Lane::host);
  const bool saturated =
      measured.host_memory > 0.0 && host.rate() >= saturated_host_use * measured.host_memory;
  if (saturated || report.wait_for(Lane::host) >= noticeable * report.seconds) {
    alarms.push_back(fmt::format(
        "host {}: the optimizer's share of the host moves {:.1f} GB/s of {:.1f} GB/s measured, and the device "
        "waited {} of the step for it; raise optimizer_device_share or resident_blocks (deferred updates), or take more "
        "tokens a step",
        saturated ? "memory saturated" : "update too slow", 1e-9 * host.rate(), 1e-9 * measured.host_memory,
        percent(report.wait_for(Lane::host) / report.seconds)));
  }
  return alarms;
}

}  // namespace layerstream

#include "engine/step_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace layerstream {
namespace {

WaitCause cause_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::fetch_weights:
      return WaitCause::weights;
    case OperationKind::update:
    case OperationKind::load_state:
    case OperationKind::update_on_device:
    case OperationKind::store_state:
      return WaitCause::optimizer;
    case OperationKind::load_gradient:
    case OperationKind::emit_gradient:
    case OperationKind::keep_gradient:
    case OperationKind::verdict:
      return WaitCause::gradients;
    case OperationKind::save_input:
    case OperationKind::save_intermediates:
    case OperationKind::load_input:
    case OperationKind::load_intermediates:
      return WaitCause::activations;
    case OperationKind::release_weights:
    case OperationKind::forward:
    case OperationKind::loss:
    case OperationKind::loss_and_gradient:
    case OperationKind::logits:
    case OperationKind::clear_gradient:
    case OperationKind::rebuild_key_value:
    case OperationKind::backward:
    case OperationKind::gradient_norm:
      return WaitCause::issue;  // of the compute lane: over before the gap begins
  }
  throw ContractError("unknown operation kind");
}

/// Explains gaps of the compute lane.
class WaitAnalysis {
 public:
  WaitAnalysis(const Schedule& schedule, std::span<const OperationTime> times)
      : schedule_(schedule), times_(times), previous_(schedule.operations.size(), -1) {
    std::array<int, all_lanes.size()> last;
    last.fill(-1);
    for (std::size_t i = 0; i < previous_.size(); ++i) {
      int& lane_last = last[static_cast<std::size_t>(schedule.operations[i].lane)];
      previous_[i] = lane_last;
      lane_last = static_cast<int>(i);
    }
  }

  /// From `from` until operation `next` of the compute lane began.
  void gap_before(int next, double from) {
    explain(latest_before(next), from, std::max(from, time(next).begin));
  }
  /// From `from` until `last`, the last of all operations, ended.
  void gap_at_end(int last, double from) { explain(last, from, std::max(from, time(last).end)); }

  void store(StepReport& report) const {
    report.waits = waits_;
    report.waits_for = waits_for_;
  }

 private:
  const OperationTime& time(int index) const { return times_[static_cast<std::size_t>(index)]; }

  /// What finished last of all that the operation had to wait for; −1: nothing.
  int latest_before(int index) const {
    const auto at = static_cast<std::size_t>(index);
    int latest = previous_[at];
    for (const int dependency : schedule_.operations[at].dependencies) {
      if (latest < 0 || time(dependency).end > time(latest).end) latest = dependency;
    }
    return latest;
  }

  void add(WaitCause cause, double seconds) { waits_[static_cast<std::size_t>(cause)] += seconds; }

  /// [from, until] ends because `by` had ended.
  void explain(int by, double from, double until) {
    while (until > from) {
      const double end = by < 0 ? from : std::clamp(time(by).end, from, until);
      add(WaitCause::issue, until - end);
      if (end <= from) return;
      const double begin = std::clamp(time(by).begin, from, end);
      const Operation& operation = schedule_.operations[static_cast<std::size_t>(by)];
      const WaitCause cause = cause_of(operation.kind);
      add(cause, end - begin);
      if (cause != WaitCause::issue) waits_for_[static_cast<std::size_t>(operation.lane)] += end - begin;
      until = begin;
      by = latest_before(by);
    }
  }

  const Schedule& schedule_;
  std::span<const OperationTime> times_;
  std::vector<int> previous_;  ///< of the same lane; −1: none
  std::array<double, all_wait_causes.size()> waits_{};
  std::array<double, all_lanes.size()> waits_for_{};
};

/// Use of something that several lanes share: busy while any of them is.
Use shared_use(const Schedule& schedule, std::span<const OperationTime> times,
               std::initializer_list<Lane> lanes) {
  Use use;
  std::vector<std::pair<double, double>> intervals;
  for (std::size_t i = 0; i < schedule.operations.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.bytes == 0 || std::ranges::find(lanes, operation.lane) == lanes.end()) continue;
    use.bytes += static_cast<double>(operation.bytes);
    intervals.emplace_back(times[i].begin, times[i].end);
  }
  std::ranges::sort(intervals);
  double covered = 0.0;  // up to here
  for (const auto& [begin, end] : intervals) {
    use.busy += std::max(0.0, end - std::max(begin, covered));
    covered = std::max(covered, end);
  }
  return use;
}

}  // namespace

std::string_view name_of(WaitCause cause) {
  switch (cause) {
    case WaitCause::weights:
      return "weights";
    case WaitCause::optimizer:
      return "optimizer";
    case WaitCause::gradients:
      return "gradients";
    case WaitCause::activations:
      return "activations";
    case WaitCause::issue:
      return "issue";
  }
  return "?";
}

double model_flops(const Schedule& schedule) {
  /// Of a block's forward pass, and what its backward pass adds: once for the gradient of its input, once for
  /// that of its weights if it is trained. Attention has no weights: twice.
  struct Block {
    double products = 0.0, attention = 0.0;
    bool has_backward = false, has_gradient = false;
  };
  std::map<int, Block> blocks;
  double head = 0.0;
  for (const Operation& operation : schedule.operations) {
    switch (operation.kind) {
      case OperationKind::forward:
        blocks[operation.block].products += operation.flops - operation.attention_flops;
        blocks[operation.block].attention += operation.attention_flops;
        break;
      case OperationKind::loss:
      case OperationKind::logits:
      case OperationKind::loss_and_gradient:  // nothing again, and no gradient that nobody wants
        head += operation.flops;
        break;
      case OperationKind::backward:
        blocks[operation.block].has_backward = true;
        break;
      case OperationKind::gradient_norm:
        blocks[operation.block].has_gradient = true;
        break;
      default:
        break;
    }
  }
  double total = head;
  for (const auto& [index, block] : blocks) {
    const double times = 1.0 + (block.has_backward ? 1.0 : 0.0) + (block.has_gradient ? 1.0 : 0.0);
    total += times * block.products + (block.has_backward ? 3.0 : 1.0) * block.attention;
  }
  return total;
}

StepReport make_step_report(const Schedule& schedule, std::span<const OperationTime> times) {
  const std::size_t count = schedule.operations.size();
  LAYERSTREAM_EXPECT(times.size() == count, "{} times for {} operations", times.size(), count);
  StepReport report;
  report.model_flops = model_flops(schedule);
  WaitAnalysis analysis(schedule, times);
  double compute_end = 0.0;  // of the compute lane's operation before
  int last = -1;
  for (std::size_t i = 0; i < count; ++i) {
    const Operation& operation = schedule.operations[i];
    Use& lane = report.lanes[static_cast<std::size_t>(operation.lane)];
    lane.bytes += static_cast<double>(operation.bytes);
    report.device_flops += operation.flops;
    if (operation.lane == Lane::compute) {
      analysis.gap_before(static_cast<int>(i), compute_end);
      // What a clock's jitter makes overlap counts once, so that busy time and waits make the whole.
      const double end = std::max(compute_end, times[i].end);
      lane.busy += end - std::clamp(times[i].begin, compute_end, end);
      compute_end = end;
    } else {
      lane.busy += std::max(0.0, times[i].end - times[i].begin);
    }
    if (last < 0 || times[i].end > times[static_cast<std::size_t>(last)].end) last = static_cast<int>(i);
  }
  if (last >= 0) {
    analysis.gap_at_end(last, compute_end);
    report.seconds = std::max(compute_end, times[static_cast<std::size_t>(last)].end);
  }
  analysis.store(report);
  report.to_device = shared_use(schedule, times, {Lane::h2d});
  report.to_host = shared_use(schedule, times, {Lane::d2h, Lane::update_out});
  return report;
}

StepReport mean_of(std::span<const StepReport> reports) {
  LAYERSTREAM_EXPECT(!reports.empty(), "the mean of nothing");
  const double part = 1.0 / static_cast<double>(reports.size());
  StepReport mean;
  const auto add = [&](Use& to, const Use& from) {
    to.busy += part * from.busy;
    to.bytes += part * from.bytes;
  };
  for (const StepReport& report : reports) {
    mean.seconds += part * report.seconds;
    mean.model_flops += part * report.model_flops;
    mean.device_flops += part * report.device_flops;
    for (std::size_t i = 0; i < mean.lanes.size(); ++i) add(mean.lanes[i], report.lanes[i]);
    add(mean.to_device, report.to_device);
    add(mean.to_host, report.to_host);
    for (std::size_t i = 0; i < mean.waits.size(); ++i) mean.waits[i] += part * report.waits[i];
    for (std::size_t i = 0; i < mean.waits_for.size(); ++i) mean.waits_for[i] += part * report.waits_for[i];
  }
  return mean;
}

std::string StepReport::to_table() const {
  const double whole = seconds > 0.0 ? seconds : 1.0;
  std::string text = fmt::format("{:<12} {:>6} {:>9} {:>7}\n", "lane", "busy", "GB", "GB/s");
  const auto line = [&](std::string_view name, const Use& use) {
    text += fmt::format("{:<12} {:>5.1f}% {:>9.2f} {:>7.1f}\n", name, 100.0 * use.busy / whole,
                        1e-9 * use.bytes, 1e-9 * use.rate());
  };
  for (const Lane lane : all_lanes) {
    if (of(lane).busy > 0.0) line(name_of(lane), of(lane));
  }
  line("link in", to_device);
  line("link out", to_host);
  text += "compute waits:";
  for (const WaitCause cause : all_wait_causes) {
    text += fmt::format(" {} {:.1f}% ({:.3f} s)", name_of(cause), 100.0 * wait(cause) / whole, wait(cause));
  }
  return text + "\n";
}

}  // namespace layerstream

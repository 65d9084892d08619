#include "core/progress.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace layerstream {

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  if (seconds < 59.95) return fmt::format("{:.1f}s", seconds);
  const auto whole = static_cast<std::int64_t>(std::min(std::round(seconds), 1e15));
  if (whole < 3600) return fmt::format("{}m {:02}s", whole / 60, whole % 60);
  const std::int64_t minutes = whole / 60;
  if (minutes < 24 * 60) return fmt::format("{}h {:02}m", minutes / 60, minutes % 60);
  const std::int64_t hours = minutes / 60;
  return fmt::format("{}d {:02}h", hours / 24, hours % 24);
}

std::string format_count(double value) {
  static constexpr std::array<std::string_view, 6> units{"", "k", "M", "G", "T", "P"};
  if (!std::isfinite(value)) return "?";
  std::size_t unit = 0;
  // 999.5 would print as "1000" of the smaller unit.
  while (std::abs(value) >= 999.5 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  const double size = std::abs(value);
  const bool whole = size >= 99.95 || (unit == 0 && value == std::round(value));
  if (whole) return fmt::format("{:.0f}{}", value, units[unit]);
  return size >= 9.995 ? fmt::format("{:.1f}{}", value, units[unit])
                       : fmt::format("{:.2f}{}", value, units[unit]);
}

Progress::Progress(std::int64_t first_step, std::int64_t total_steps)
    : done_(first_step), total_(total_steps) {}

void Progress::step_done(std::int64_t tokens, double seconds) {
  ++done_;
  recent_.push_back({tokens, seconds});
  if (recent_.size() > window_) recent_.pop_front();
}

double Progress::tokens_per_second() const {
  double tokens = 0;
  double seconds = 0;
  for (const Step& step : recent_) {
    tokens += static_cast<double>(step.tokens);
    seconds += step.seconds;
  }
  return seconds > 0 ? tokens / seconds : 0;
}

double Progress::remaining_seconds() const {
  if (recent_.empty()) return -1;
  double seconds = 0;
  for (const Step& step : recent_) seconds += step.seconds;
  const auto remaining = static_cast<double>(std::max<std::int64_t>(0, total_ - done_));
  return remaining * seconds / static_cast<double>(recent_.size());
}

std::string Progress::line(const StepNumbers& numbers) const {
  std::string mfu;
  if (numbers.mfu) mfu = fmt::format("  MFU {:.1f}%", 100 * *numbers.mfu);
  return fmt::format("step {}/{}  loss {:.4f}  norm {:.4g}  lr {:.3g}  {} tok/s{}  ETA {}", done_, total_,
                     numbers.loss, numbers.grad_norm, numbers.learning_rate,
                     format_count(tokens_per_second()), mfu, format_duration(remaining_seconds()));
}

Heartbeat::Heartbeat(Log log, std::string phase, std::chrono::milliseconds interval)
    : log_(std::move(log)), interval_(interval), phase_(std::move(phase)), phase_start_(Log::Clock::now()) {
  thread_ = std::thread([this] { watch(); });
}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Heartbeat::set_phase(std::string phase) {
  const std::lock_guard lock(mutex_);
  phase_ = std::move(phase);
  phase_start_ = Log::Clock::now();
  done_ = 0;
  total_ = 0;
}

void Heartbeat::set_done(double done, double total) {
  const std::lock_guard lock(mutex_);
  done_ = done;
  total_ = total;
}

void Heartbeat::watch() {
  std::unique_lock lock(mutex_);
  // Kept apart from the log's own time: a log that shows only errors drops these lines.
  Log::Clock::time_point last_beat = log_.last_line();
  while (!stopping_) {
    const Log::Clock::time_point due = std::max(log_.last_line(), last_beat) + interval_;
    if (Log::Clock::now() < due) {
      wake_.wait_until(lock, due, [this] { return stopping_; });
      continue;
    }
    log_.info("{}", status());
    last_beat = Log::Clock::now();
  }
}

std::string Heartbeat::status() const {
  const double elapsed = std::chrono::duration<double>(Log::Clock::now() - phase_start_).count();
  std::string text = fmt::format("{}: {} so far", phase_, format_duration(elapsed));
  if (total_ > 0) {
    text += fmt::format(", {:.0f}% done", 100 * done_ / total_);
    if (done_ > 0) text += fmt::format(", {} to go", format_duration(elapsed * (total_ - done_) / done_));
  }
  return text;
}

}  // namespace layerstream

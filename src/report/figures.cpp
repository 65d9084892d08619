#include "report/figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>

namespace layerstream::report {
namespace {

/// Of the finite values.
double mean(std::span<const double> values) {
  double sum = 0.0;
  std::size_t count = 0;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : std::nan("");
}

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0, [](double total, double value) {
    return std::isfinite(value) ? total + value : total;
  });
}

/// Of tokens per second over the steps: what a pause or the first step does not move.
std::optional<double> median_speed(const Series& training) {
  const std::vector<double>& tokens = training.of("num_tokens");
  const std::vector<double>& seconds = training.of("seconds");
  std::vector<double> speeds;
  for (std::size_t i = 0; i < std::min(tokens.size(), seconds.size()); ++i) {
    if (tokens[i] > 0.0 && seconds[i] > 0.0) speeds.push_back(tokens[i] / seconds[i]);
  }
  if (speeds.empty()) return {};
  const auto middle = speeds.begin() + static_cast<std::ptrdiff_t>(speeds.size() / 2);
  std::ranges::nth_element(speeds, middle);
  return *middle;
}

std::string duration(double seconds) {
  if (seconds < 120.0) return fmt::format("{:.3g} s", seconds);
  if (seconds < 7200.0) return fmt::format("{:.1f} min", seconds / 60.0);
  return fmt::format("{:.2f} h", seconds / 3600.0);
}

std::string count(double value) {
  return value < 1e6 ? fmt::format("{:.0f}", value) : fmt::format("{:.4g} M", 1e-6 * value);
}

class Figures {
 public:
  explicit Figures(const RunDirectory& run) : run_(run) {}

  std::vector<Figure> all() {
    steps();
    loss();
    evaluation();
    throughput();
    return std::move(figures_);
  }

 private:
  void add(std::string name, std::string value) { figures_.emplace_back(std::move(name), std::move(value)); }

  void steps() {
    const std::int64_t last = run_.training.steps.back();
    const auto steps = run_.record.is_object() ? run_.record.value("steps", nlohmann::json::object())
                                               : nlohmann::json::object();
    const std::int64_t total = steps.value("total", std::int64_t{0});
    add("steps", total > last ? fmt::format("{} of {}", last, total) : fmt::format("{}", last));
    const std::vector<double>& applied = run_.training.of("applied");
    const auto skipped = std::ranges::count(applied, 0.0);
    if (skipped > 0) add("steps that changed nothing", fmt::format("{}", skipped));
  }

  void loss() {
    const std::vector<double>& losses = run_.training.of("loss");
    add("last loss", fmt::format("{:.4f}", losses.back()));
    const std::size_t tail = std::clamp<std::size_t>(losses.size() / 10, 1, 100);
    if (tail > 1) {
      add("loss at the end",
          fmt::format("{:.4f} (mean of {} steps)", mean(std::span(losses).last(tail)), tail));
    }
  }

  void evaluation() {
    const std::vector<std::int64_t>& steps = run_.evaluation.steps;
    for (const auto& [name, losses] : run_.evaluation.columns) {
      if (!name.ends_with("loss")) continue;
      std::optional<std::size_t> best, last;
      for (std::size_t i = 0; i < losses.size(); ++i) {
        if (!std::isfinite(losses[i])) continue;
        last = i;
        if (!best || losses[i] < losses[*best]) best = i;
      }
      if (!best) continue;
      add("best " + name, fmt::format("{:.4f} (step {})", losses[*best], steps[*best]));
      add("last " + name, fmt::format("{:.4f} (step {})", losses[*last], steps[*last]));
    }
  }

  void throughput() {
    if (const std::optional<double> speed = median_speed(run_.training)) {
      add("tokens per second, median", *speed < 100.0 ? fmt::format("{:.1f}", *speed) : count(*speed));
    }
    add("tokens", count(sum(run_.training.of("num_tokens"))));
    add("time in steps", duration(sum(run_.training.of("seconds"))));
  }

  const RunDirectory& run_;
  std::vector<Figure> figures_;
};

}  // namespace

std::vector<Figure> figures_of(const RunDirectory& run) {
  return Figures(run).all();
}

}  // namespace layerstream::report

#include "engine/simulator.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"

namespace layerstream {
namespace {

constexpr std::size_t num_lanes = all_lanes.size();
constexpr std::size_t num_resources = all_machine_resources.size();
constexpr double never = std::numeric_limits<double>::infinity();
/// Sums of fractions that make 1 differ from it by rounding.
constexpr double full = 1.0 - 1e-12;

/// Progress of operations that run at the same time, as parts of their speed alone.
class FairShare {
 public:
  /// @param running at most one operation a lane; null: none
  explicit FairShare(const std::array<const OperationCost*, num_lanes>& running) : running_(running) {
    std::array<bool, num_lanes> rising{};
    for (std::size_t lane = 0; lane < num_lanes; ++lane) rising[lane] = running[lane] != nullptr;
    // All rates rise in proportion to their weights; one stops at full speed, or when a resource that it uses
    // is exhausted.
    while (std::ranges::find(rising, true) != rising.end()) {
      const double level = next_level(rising);
      for (std::size_t lane = 0; lane < num_lanes; ++lane) {
        if (rising[lane]) rates_[lane] = std::min(1.0, running_[lane]->weight * level);
      }
      bool stopped = false;
      const std::array<double, num_resources> taken = use();
      for (std::size_t lane = 0; lane < num_lanes; ++lane) {
        if (rising[lane] && (rates_[lane] >= full || uses_exhausted(*running_[lane], taken))) {
          rising[lane] = false;
          stopped = true;
        }
      }
      if (!stopped) break;  // rounding: nothing can rise any more
    }
  }

  double rate(std::size_t lane) const { return rates_[lane]; }

  /// Of each resource the fraction taken.
  std::array<double, num_resources> use() const {
    std::array<double, num_resources> sum{};
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      if (running_[lane] == nullptr) continue;
      for (std::size_t r = 0; r < num_resources; ++r) sum[r] += rates_[lane] * running_[lane]->use[r];
    }
    return sum;
  }

 private:
  static bool uses_exhausted(const OperationCost& cost, const std::array<double, num_resources>& taken) {
    for (std::size_t r = 0; r < num_resources; ++r) {
      if (cost.use[r] > 0.0 && taken[r] >= full) return true;
    }
    return false;
  }

  /// How far rates (weight × level) can rise until the first stops.
  double next_level(const std::array<bool, num_lanes>& rising) const {
    double level = never;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      if (rising[lane]) level = std::min(level, 1.0 / running_[lane]->weight);
    }
    for (std::size_t r = 0; r < num_resources; ++r) {
      double fixed = 0.0;
      double slope = 0.0;
      for (std::size_t lane = 0; lane < num_lanes; ++lane) {
        if (running_[lane] == nullptr) continue;
        const double use = running_[lane]->use[r];
        (rising[lane] ? slope : fixed) += use * (rising[lane] ? running_[lane]->weight : rates_[lane]);
      }
      if (slope > 0.0) level = std::min(level, std::max(0.0, 1.0 - fixed) / slope);
    }
    return level;
  }

  const std::array<const OperationCost*, num_lanes>& running_;
  std::array<double, num_lanes> rates_{};
};

class Simulation {
 public:
  Simulation(const Schedule& schedule, std::span<const OperationCost> costs)
      : schedule_(schedule), costs_(costs), ended_(costs.size(), false) {
    LAYERSTREAM_EXPECT(costs.size() == schedule.operations.size(), "{} costs for {} operations", costs.size(),
                       schedule.operations.size());
    run_.times.resize(costs.size());
    for (std::size_t i = 0; i < costs.size(); ++i) {
      expect_sound(i);
      queue_[static_cast<std::size_t>(schedule.operations[i].lane)].push_back(i);
    }
  }

  SimulatedRun run() {
    std::size_t left = costs_.size();
    while (left > 0) {
      const std::size_t done = end_and_begin();
      left -= done;
      if (left > 0 && done == 0) advance();
    }
    if (run_.seconds > 0.0) {
      for (double& use : run_.use) use /= run_.seconds;
    }
    return std::move(run_);
  }

 private:
  struct LaneState {
    std::size_t next = 0;     ///< in the lane's queue
    bool is_running = false;  ///< the operation there; else it waits
    double remaining = 0.0;   ///< seconds alone
    double free_since = 0.0;
  };

  void expect_sound(std::size_t index) const {
    const OperationCost& cost = costs_[index];
    bool sound = std::isfinite(cost.seconds) && cost.seconds >= 0.0 && std::isfinite(cost.weight) &&
                 cost.weight > 0.0 && std::isfinite(cost.wake_seconds) && cost.wake_seconds >= 0.0;
    for (const double use : cost.use) sound = sound && use >= 0.0 && use <= 1.0 + 1e-9;
    LAYERSTREAM_EXPECT(sound, "operation {} ({}, block {}) of {} s, weight {}, wake {} s, use {}", index,
                       name_of(schedule_.operations[index].kind), schedule_.operations[index].block,
                       cost.seconds, cost.weight, cost.wake_seconds, fmt::join(cost.use, " "));
  }

  /// When the next operation of a lane that stands still can begin; `never` while a dependency has not ended.
  double ready_at(const LaneState& lane, std::size_t index) const {
    double ready = lane.free_since;
    for (const int dependency : schedule_.operations[index].dependencies) {
      const auto before = static_cast<std::size_t>(dependency);
      if (!ended_[before]) return never;
      const double end = run_.times[before].end;
      // Who needs not wait does not wake up.
      if (end > lane.free_since) ready = std::max(ready, end + costs_[index].wake_seconds);
    }
    return ready;
  }

  /// Ends what is done and begins what can, now. Returns how many ended.
  std::size_t end_and_begin() {
    std::size_t count = 0;
    for (std::size_t l = 0; l < num_lanes; ++l) {
      LaneState& lane = lanes_[l];
      while (lane.next < queue_[l].size()) {
        const std::size_t index = queue_[l][lane.next];
        if (!lane.is_running) {
          if (ready_at(lane, index) > now_) break;
          lane.is_running = true;
          lane.remaining = costs_[index].seconds;
          run_.times[index].begin = now_;
        }
        if (lane.remaining > 0.0) break;
        lane.is_running = false;
        lane.free_since = now_;
        ++lane.next;
        run_.times[index].end = now_;
        ended_[index] = true;
        ++count;
      }
    }
    return count;
  }

  /// To the next end of an operation or of a wake-up.
  void advance() {
    std::array<const OperationCost*, num_lanes> running{};
    double next = never;
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (lanes_[l].next == queue_[l].size()) continue;
      const std::size_t index = queue_[l][lanes_[l].next];
      if (lanes_[l].is_running) {
        running[l] = &costs_[index];
      } else {
        next = std::min(next, ready_at(lanes_[l], index));
      }
    }
    const FairShare shares(running);
    std::array<double, num_lanes> ends;
    ends.fill(never);
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (running[l] == nullptr) continue;
      if (shares.rate(l) > 0.0) ends[l] = now_ + lanes_[l].remaining / shares.rate(l);
      next = std::min(next, ends[l]);
    }
    LAYERSTREAM_EXPECT(next < never, "a schedule whose dependencies come earlier in it");
    const double passed = next - now_;
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (running[l] == nullptr) continue;
      // What ends now ends exactly; a remainder that time cannot tell from nothing ends with it.
      const double left = lanes_[l].remaining - passed * shares.rate(l);
      lanes_[l].remaining = ends[l] <= next || next + left <= next ? 0.0 : std::max(0.0, left);
    }
    const std::array<double, num_resources> use = shares.use();
    for (std::size_t r = 0; r < num_resources; ++r) run_.use[r] += passed * use[r];
    now_ = next;
    run_.seconds = now_;
  }

  const Schedule& schedule_;
  std::span<const OperationCost> costs_;
  std::vector<bool> ended_;
  std::array<std::vector<std::size_t>, num_lanes> queue_;
  std::array<LaneState, num_lanes> lanes_;
  SimulatedRun run_;
  double now_ = 0.0;
};

}  // namespace

std::string_view name_of(MachineResource resource) {
  switch (resource) {
    case MachineResource::compute:
      return "compute";
    case MachineResource::device_memory:
      return "device memory";
    case MachineResource::link_in:
      return "link to the device";
    case MachineResource::link_out:
      return "link to the host";
    case MachineResource::link_duplex:
      return "link, both directions";
    case MachineResource::host_memory:
      return "host memory";
    case MachineResource::host_cores:
      return "host cores";
  }
  return "?";
}

SimulatedRun simulate(const Schedule& schedule, std::span<const OperationCost> costs) {
  return Simulation(schedule, costs).run();
}

}  // namespace layerstream

#include "engine/simulator.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "core/error.hpp"

namespace layerstream {
namespace {

constexpr std::size_t num_lanes = all_lanes.size();
constexpr std::size_t num_resources = all_machine_resources.size();
constexpr double never = std::numeric_limits<double>::infinity();
/// Sums of fractions that make 1 differ from it by rounding.
constexpr double full = 1.0 - 1e-12;

/// How fast operations that run at the same time proceed.
struct Shares {
  std::array<double, num_lanes> rates{};    ///< parts of the operations' speed alone
  std::array<double, num_resources> use{};  ///< of each resource the fraction taken
};

/// Finds the shares of operations that run at the same time.
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

  Shares shares() const { return {.rates = rates_, .use = use()}; }

 private:
  std::array<double, num_resources> use() const {
    std::array<double, num_resources> sum{};
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      if (running_[lane] == nullptr) continue;
      for (std::size_t r = 0; r < num_resources; ++r) sum[r] += rates_[lane] * running_[lane]->use[r];
    }
    return sum;
  }

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

/// Shares by what the operations demand: layers are alike, so that the same few demands meet again and again.
class KnownShares {
 public:
  /// @param costs outlive this object.
  explicit KnownShares(std::span<const OperationCost> costs) : costs_(costs) {
    std::unordered_map<Demand, int, HashOfWords> known;
    demands_.reserve(costs.size());
    for (const OperationCost& cost : costs) {
      Demand demand;
      std::memcpy(demand.data(), cost.use.data(), sizeof(cost.use));
      std::memcpy(&demand.back(), &cost.weight, sizeof(cost.weight));
      demands_.push_back(known.try_emplace(demand, static_cast<int>(known.size())).first->second);
    }
  }

  /// @param running by lane the index of the operation that runs; −1: none
  const Shares& of(const std::array<int, num_lanes>& running) {
    std::array<std::uint64_t, num_lanes> key;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      key[lane] = running[lane] < 0 ? 0 : 1 + demands_[static_cast<std::size_t>(running[lane])];
    }
    const auto [entry, is_new] = known_.try_emplace(key);
    if (is_new) {
      std::array<const OperationCost*, num_lanes> of_lanes{};
      for (std::size_t lane = 0; lane < num_lanes; ++lane) {
        if (running[lane] >= 0) of_lanes[lane] = &costs_[static_cast<std::size_t>(running[lane])];
      }
      entry->second = FairShare(of_lanes).shares();
    }
    return entry->second;
  }

 private:
  /// The bits of what an operation takes of the resources, and of its weight.
  using Demand = std::array<std::uint64_t, num_resources + 1>;
  struct HashOfWords {
    template <std::size_t n>
    std::size_t operator()(const std::array<std::uint64_t, n>& words) const {
      std::uint64_t hash = 0;
      for (const std::uint64_t word : words) hash = (std::rotl(hash, 23) ^ word) * 0x9e3779b97f4a7c15U;
      return hash ^ (hash >> 32U);
    }
  };

  std::span<const OperationCost> costs_;
  std::vector<int> demands_;  ///< by operation: equal where use and weight are
  std::unordered_map<std::array<std::uint64_t, num_lanes>, Shares, HashOfWords> known_;
};

class Simulation {
 public:
  Simulation(const Schedule& schedule, std::span<const OperationCost> costs)
      : schedule_(schedule), costs_(costs), shares_(costs) {
    LAYERSTREAM_EXPECT(costs.size() == schedule.operations.size(), "{} costs for {} operations", costs.size(),
                       schedule.operations.size());
    run_.times.assign(costs.size(), {.begin = never, .end = never});
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
    double ready = never;     ///< when it can begin, as far as known
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
      const double end = run_.times[static_cast<std::size_t>(dependency)].end;
      if (end == never) return never;
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
          lane.ready = ready_at(lane, index);
          if (lane.ready > now_) break;
          lane.is_running = true;
          lane.remaining = costs_[index].seconds;
          run_.times[index].begin = now_;
        }
        if (lane.remaining > 0.0) break;
        lane.is_running = false;
        lane.free_since = now_;
        ++lane.next;
        run_.times[index].end = now_;
        ++count;
      }
    }
    return count;
  }

  /// To the next end of an operation or of a wake-up. @pre nothing ends or can begin now
  void advance() {
    std::array<int, num_lanes> running;
    running.fill(-1);
    double next = never;
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (lanes_[l].next == queue_[l].size()) continue;
      const std::size_t index = queue_[l][lanes_[l].next];
      if (lanes_[l].is_running) {
        running[l] = static_cast<int>(index);
      } else {
        next = std::min(next, lanes_[l].ready);
      }
    }
    const Shares& shares = shares_.of(running);
    std::array<double, num_lanes> ends;
    ends.fill(never);
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (running[l] < 0) continue;
      if (shares.rates[l] > 0.0) ends[l] = now_ + lanes_[l].remaining / shares.rates[l];
      next = std::min(next, ends[l]);
    }
    LAYERSTREAM_EXPECT(next < never, "a schedule whose dependencies come earlier in it");
    const double passed = next - now_;
    for (std::size_t l = 0; l < num_lanes; ++l) {
      if (running[l] < 0) continue;
      // What ends now ends exactly; a remainder that time cannot tell from nothing ends with it.
      const double left = lanes_[l].remaining - passed * shares.rates[l];
      lanes_[l].remaining = ends[l] <= next || next + left <= next ? 0.0 : std::max(0.0, left);
    }
    for (std::size_t r = 0; r < num_resources; ++r) run_.use[r] += passed * shares.use[r];
    now_ = next;
    run_.seconds = now_;
  }

  const Schedule& schedule_;
  std::span<const OperationCost> costs_;
  KnownShares shares_;
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

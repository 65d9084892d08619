#include "engine/calibrate_updaters.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "engine/calibrate_memory.hpp"
#include "engine/executor.hpp"
#include "engine/host_optimizer.hpp"
#include "engine/operation_times.hpp"
#include "ops/elementwise.hpp"

namespace layerstream {
namespace {

constexpr int num_slots = 3;  // one piece arrives, one is worked on, one leaves
constexpr std::size_t state_bytes = 12;

/// Carries out pieces of either updater's work.
class UpdaterRunner final : public OperationRunner {
 public:
  UpdaterRunner(Device& device, WorkerPool& pool, ops::Libraries& libraries, std::span<std::byte> on_device,
                std::span<std::byte> host)
      : device_(device), libraries_(libraries), optimizer_(pool) {
    const std::size_t half = host.size() / 2 / 4096 * 4096;
    slab_ = slice_over(host.first(half));
    staged_ = host.subspan(half);
    // Three slots of state and a gradient.
    const std::size_t fits =
        std::min(on_device.size() / (num_slots * state_bytes + 4), staged_.size() / state_bytes);
    piece_ = std::min(fits, std::size_t{16} << 20) / 4096 * 4096;
    LAYERSTREAM_EXPECT(piece_ > 0 && slab_.n > 0, "{} and {} bytes", on_device.size(), host.size());
    slots_ = on_device.data();
    gradient_ = reinterpret_cast<float*>(slots_ + num_slots * state_bytes * piece_);
    clear(pool, host);
    const StreamView stream = device.stream(Lane::update);
    libraries.prepare(stream);
    ops::fill_zero(context(stream), TensorView(on_device.data(), DType::f32,
                                               {static_cast<std::int64_t>(on_device.size() / 4096 * 1024)}));
    device.synchronize();
  }

  std::int64_t piece_elements() const { return static_cast<std::int64_t>(piece_); }
  std::int64_t host_elements() const { return slab_.n; }

  void run(const Operation& operation, StreamView stream) override {
    if (operation.kind == OperationKind::update) {
      optimizer_.update(slab_, settings_);
      return;
    }
    std::byte* const slot = slots_ + static_cast<std::size_t>(operation.update_slot) * state_bytes * piece_;
    const std::size_t pieces = staged_.size() / (state_bytes * piece_);
    std::byte* const home =
        staged_.data() + static_cast<std::size_t>(operation.piece) % pieces * state_bytes * piece_;
    switch (operation.kind) {
      case OperationKind::load_state:
        device_.link().copy(slot, home, state_bytes * piece_, stream);
        break;
      case OperationKind::store_state:
        device_.link().copy(home, slot, state_bytes * piece_, stream);
        break;
      case OperationKind::update_on_device: {
        const ops::AdamWSlice slice{reinterpret_cast<bf16*>(slot),
                                    reinterpret_cast<std::int16_t*>(slot + 2 * piece_),
                                    reinterpret_cast<float*>(slot + 4 * piece_),
                                    reinterpret_cast<float*>(slot + 8 * piece_),
                                    gradient_,
                                    piece_elements()};
        const ops::AdamWScalars scalars = ops::adamw_scalars(settings_);
        ops::adamw_device(context(stream), slice, slice.n, scalars, scalars);
        break;
      }
      default:
        throw ContractError("an operation of no updater");
    }
  }

 private:
  ops::Context context(StreamView stream) const { return {.stream = stream, .libraries = &libraries_}; }

  Device& device_;
  ops::Libraries& libraries_;
  HostOptimizer optimizer_;
  ops::AdamWSlice slab_{};
  std::span<std::byte> staged_;
  std::size_t piece_ = 0;
  std::byte* slots_ = nullptr;
  float* gradient_ = nullptr;
  ops::AdamWSettings settings_{.learning_rate = 1e-3};
};

/// Pieces through the ring, and beside them rounds of the host's slab.
Schedule updates(int pieces, int host_rounds) {
  Schedule schedule;
  const auto add = [&](OperationKind kind, Lane lane, int piece, std::vector<int> dependencies) {
    schedule.operations.push_back({.kind = kind,
                                   .lane = lane,
                                   .block = 0,
                                   .piece = piece,
                                   .update_slot = piece < 0 ? -1 : piece % num_slots,
                                   .dependencies = std::move(dependencies)});
    return static_cast<int>(schedule.operations.size()) - 1;
  };
  for (int round = 0; round < host_rounds; ++round) add(OperationKind::update, Lane::host, -1, {});
  std::vector<int> stores;
  for (int piece = 0; piece < pieces; ++piece) {
    std::vector<int> free;
    if (piece >= num_slots) free.push_back(stores[static_cast<std::size_t>(piece - num_slots)]);
    const int load = add(OperationKind::load_state, Lane::h2d, piece, std::move(free));
    const int update = add(OperationKind::update_on_device, Lane::update, piece, {load});
    stores.push_back(add(OperationKind::store_state, Lane::update_out, piece, {update}));
  }
  return schedule;
}

}  // namespace

UpdaterRates measure_updaters(Device& device, WorkerPool& pool, ops::Libraries& libraries,
                              std::span<std::byte> on_device, std::span<std::byte> host, double host_rate,
                              double device_rate, double budget) {
  UpdaterRunner runner(device, pool, libraries, on_device, host);
  Executor executor(device);
  OperationTimes times(device);
  times.set_enabled(true);
  const auto piece = static_cast<double>(runner.piece_elements());
  const auto slab = static_cast<double>(runner.host_elements());
  const auto span_of = [&](const Schedule& schedule, const std::vector<OperationTime>& all, bool on_host) {
    double end = 0.0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((schedule.operations[i].lane == Lane::host) == on_host) end = std::max(end, all[i].end);
    }
    return end;  // both begin at 0
  };
  const auto run = [&](int pieces, int rounds) {
    const Schedule schedule = updates(pieces, rounds);
    executor.run(schedule, runner, &times);
    device.synchronize();
    const std::vector<OperationTime> all = times.read();
    UpdaterRates rates;
    rates.device = pieces * piece / span_of(schedule, all, false);
    if (rounds > 0) rates.host = rounds * slab / span_of(schedule, all, true);
    return rates;
  };
  const auto count = [](double wanted, int least) {
    return std::clamp(static_cast<int>(wanted), least, 2000);
  };
  run(num_slots, 1);  // makes events and plans
  const double alone = run(count(device_rate * budget / piece, 2 * num_slots), 0).device;
  // Whole rounds of the host's slab, and as many pieces as take as long.
  const int rounds = count(std::ceil(host_rate * budget / slab), 1);
  const double seconds = rounds * slab / host_rate;
  UpdaterRates both = run(count(device_rate * seconds / piece, 2 * num_slots), rounds);
  both.device_alone = alone;
  return both;
}

}  // namespace layerstream

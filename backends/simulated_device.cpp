#include "backends/simulated_device.hpp"

#include <algorithm>
#include <cstring>

#include "backends/host_clock.hpp"
#include "backends/host_region.hpp"
#include "core/host_memory.hpp"
#include "core/ledger.hpp"

namespace layerstream {
namespace {

class SimulatedRegion final : public DeviceRegion {
 public:
  SimulatedRegion(std::size_t bytes, std::size_t limit, std::atomic<std::size_t>& used)
      : region_(bytes, {.component = "simulated device",
                        .numa_node = {},
                        .pool = nullptr,
                        .available_bytes = limit,
                        .progress = {}}),
        used_(used) {}
  ~SimulatedRegion() override { used_ -= region_.bytes(); }
  SimulatedRegion(const SimulatedRegion&) = delete;
  SimulatedRegion& operator=(const SimulatedRegion&) = delete;

  void* data() const override { return region_.data(); }
  std::size_t bytes() const override { return region_.bytes(); }

 private:
  HostRegion region_;
  std::atomic<std::size_t>& used_;
};

/// A memcpy needs nothing pinned.
class WholePin final : public HostPin {
 public:
  explicit WholePin(std::size_t bytes) : bytes_(bytes) {}
  std::size_t pinned_bytes() const override { return bytes_; }
  std::string shortfall() const override { return {}; }

 private:
  std::size_t bytes_;
};

/// Work is done when it is recorded, so the event is a latch between issuing threads.
class LatchEvent final : public Event {
 public:
  void reset() override { state_ = State::pending; }
  void record(StreamView) override { settle(State::recorded); }
  void wait(StreamView) override {
    state_.wait(State::pending);
    if (state_ == State::abandoned) throw Abandoned();
  }
  void abandon() override { settle(State::abandoned); }

 private:
  enum class State : std::uint8_t { pending, recorded, abandoned };

  void settle(State state) {
    State expected = State::pending;  // what came first stays
    state_.compare_exchange_strong(expected, state);
    state_.notify_all();
  }

  std::atomic<State> state_{State::pending};
};

}  // namespace

std::string SimulatedDevice::description() const {
  return fmt::format("simulated device (host execution space), {}", format_bytes(memory_limit_));
}

std::size_t SimulatedDevice::attainable_memory() const {
  return used_ + HostMemoryProbe().available().available;
}

std::unique_ptr<DeviceRegion> SimulatedDevice::allocate(std::size_t bytes) {
  std::size_t before = used_;
  do {
    if (bytes > memory_limit_ - std::min(memory_limit_, before)) {
      throw ResourceError(
          fmt::format("device memory: {} wanted after {} in use, limit {}; raise device_memory_limit or "
                      "lower chunk_tokens, cutoff_len or weight_slots",
                      format_bytes(bytes), format_bytes(before), format_bytes(memory_limit_)));
    }
  } while (!used_.compare_exchange_weak(before, before + bytes));
  try {
    return std::make_unique<SimulatedRegion>(bytes, memory_limit_, used_);
  } catch (...) {
    used_ -= bytes;
    throw;
  }
}

std::unique_ptr<HostPin> SimulatedDevice::pin(void*, std::size_t bytes, bool,
                                              const std::function<void(std::size_t, std::size_t)>&) {
  return std::make_unique<WholePin>(bytes);
}

std::unique_ptr<Event> SimulatedDevice::make_event() {
  return std::make_unique<LatchEvent>();
}

std::unique_ptr<DeviceClock> SimulatedDevice::make_clock() {
  return std::make_unique<HostClock>();
}

void SimulatedDevice::poison(void* data, std::size_t bytes, StreamView) {
  std::memset(data, 0xff, bytes);
}

}  // namespace layerstream

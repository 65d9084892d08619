#include "engine/calibrate_memory.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "core/error.hpp"
#include "engine/device_timer.hpp"
#include "engine/host_optimizer.hpp"

namespace layerstream {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Calls of `work` a second, for about `budget` seconds, after one that does not count.
template <class Work>
double calls_per_second(double budget, const Work& work) {
  work();
  const auto start = Clock::now();
  int calls = 0;
  do {
    work();
    ++calls;
  } while (seconds_since(start) < budget);
  return calls / seconds_since(start);
}

/// Copies back and forth between halves of the memories.
struct CopyPair {
  Device& device;
  std::span<std::byte> on_device, host;

  std::size_t largest() const { return std::min(on_device.size(), host.size()) / 2 / 4096 * 4096; }
  void to_device(std::size_t bytes) const {
    device.link().copy(on_device.data(), host.data(), bytes, device.stream(Lane::h2d));
  }
  void to_host(std::size_t bytes) const {
    device.link().copy(host.data() + largest(), on_device.data() + largest(), bytes,
                       device.stream(Lane::d2h));
  }
};

/// Keeps copies of `bytes` going in one direction, with a few queued, until told to stop.
class CopyLoop {
 public:
  CopyLoop(const CopyPair& pair, Lane lane, std::size_t bytes)
      : thread_([this, pair, lane, bytes] {
          constexpr std::size_t depth = 3;
          std::vector<std::unique_ptr<Event>> events;
          for (std::size_t i = 0; i < depth; ++i) events.push_back(pair.device.make_event());
          std::size_t turn = 0;
          for (; !stop_; ++turn) {
            Event& event = *events[turn % depth];
            if (turn >= depth) {
              event.wait(StreamView::host());
              done_ += bytes;
            }
            event.reset();
            lane == Lane::h2d ? pair.to_device(bytes) : pair.to_host(bytes);
            event.record(pair.device.stream(lane));
          }
          // One that was never recorded would be waited for in vain.
          for (std::size_t i = 0; i < std::min(turn, depth); ++i) events[i]->wait(StreamView::host());
        }) {}
  ~CopyLoop() {
    stop_ = true;
    thread_.join();
  }
  CopyLoop(const CopyLoop&) = delete;
  CopyLoop& operator=(const CopyLoop&) = delete;

  std::size_t bytes_done() const { return done_; }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<std::size_t> done_{0};
  std::thread thread_;  // last: it uses the others
};

}  // namespace

ops::AdamWSlice slice_over(std::span<std::byte> memory) {
  constexpr std::size_t bytes_per_element = 2 + 2 + 4 + 4 + 4;
  const std::size_t n = memory.size() / bytes_per_element / 4096 * 4096;
  std::byte* at = memory.data();
  const auto take = [&](std::size_t size) {
    std::byte* const array = at;
    at += n * size;
    return array;
  };
  auto* const hi = reinterpret_cast<bf16*>(take(2));
  auto* const lo = reinterpret_cast<std::int16_t*>(take(2));
  auto* const exp_avg = reinterpret_cast<float*>(take(4));
  auto* const exp_avg_sq = reinterpret_cast<float*>(take(4));
  return {hi, lo, exp_avg, exp_avg_sq, reinterpret_cast<const float*>(take(4)), static_cast<std::int64_t>(n)};
}

void clear(WorkerPool& pool, std::span<std::byte> memory) {
  constexpr std::size_t piece = std::size_t{4} << 20;
  const std::size_t pieces = (memory.size() + piece - 1) / piece;
  pool.parallel_for(static_cast<std::int64_t>(pieces), [&](std::int64_t i) {
    const std::size_t first = static_cast<std::size_t>(i) * piece;
    std::ranges::fill(memory.subspan(first, std::min(piece, memory.size() - first)), std::byte{0});
  });
}

LinkRates measure_link_rates(Device& device, std::span<std::byte> on_device, std::span<std::byte> host,
                             double budget) {
  const CopyPair pair{device, on_device, host};
  LAYERSTREAM_EXPECT(pair.largest() >= 65536, "at least 128 KiB on both sides");
  const DeviceTimer timer(device, budget);
  LinkRates rates;
  std::vector<std::size_t> sizes;
  for (const std::size_t bytes : {std::size_t{64} << 10, std::size_t{256} << 10, std::size_t{1} << 20,
                                  std::size_t{4} << 20, std::size_t{16} << 20, std::size_t{256} << 20}) {
    if (bytes <= pair.largest()) sizes.push_back(bytes);
  }
  for (const std::size_t bytes : sizes) {
    const auto size = static_cast<double>(bytes);
    rates.by_size.push_back(
        {.bytes = bytes,
         .to_device = size / timer.seconds_of(device.stream(Lane::h2d), [&] { pair.to_device(bytes); }),
         .to_host = size / timer.seconds_of(device.stream(Lane::d2h), [&] { pair.to_host(bytes); })});
  }
  const CopyRate& small = rates.by_size.front();
  const CopyRate& large = rates.by_size.back();
  const auto small_bytes = static_cast<double>(small.bytes);
  rates.copy_seconds =
      0.5 * small_bytes *
      (1.0 / small.to_device - 1.0 / large.to_device + 1.0 / small.to_host - 1.0 / large.to_host);
  {
    const std::size_t bytes = std::min(large.bytes, std::size_t{64} << 20);
    const CopyLoop in(pair, Lane::h2d, bytes);
    const CopyLoop out(pair, Lane::d2h, bytes);
    std::this_thread::sleep_for(std::chrono::duration<double>(0.25 * budget));
    const std::size_t before = in.bytes_done() + out.bytes_done();
    const auto start = Clock::now();
    std::this_thread::sleep_for(std::chrono::duration<double>(budget + 0.1));
    rates.duplex = static_cast<double>(in.bytes_done() + out.bytes_done() - before) / seconds_since(start);
  }
  device.synchronize();
  const std::unique_ptr<Event> event = device.make_event();
  const double turns = calls_per_second(budget, [&] {
    event->reset();
    pair.to_device(small.bytes);
    event->record(device.stream(Lane::h2d));
    event->wait(StreamView::host());
  });
  rates.handover_seconds = 1.0 / turns - small_bytes / small.to_device;
  return rates;
}

double measure_triad(WorkerPool& pool, std::span<std::byte> memory, double budget) {
  const std::size_t n = memory.size() / (3 * sizeof(double));
  auto* const a = reinterpret_cast<double*>(memory.data());
  const double* const b = a + n;
  const double* const c = b + n;
  constexpr std::size_t piece = std::size_t{1} << 17;
  const std::size_t pieces = (n + piece - 1) / piece;
  clear(pool, memory);
  const double calls = calls_per_second(budget, [&] {
    pool.parallel_for(static_cast<std::int64_t>(pieces), [&](std::int64_t index) {
      const std::size_t begin = static_cast<std::size_t>(index) * piece;
      const std::size_t end = std::min(n, begin + piece);
      for (std::size_t i = begin; i < end; ++i) a[i] = b[i] + 3.0 * c[i];
    });
  });
  return calls * 24.0 * static_cast<double>(n);
}

double measure_host_adamw(WorkerPool& pool, std::span<std::byte> memory, double budget) {
  clear(pool, memory);
  const ops::AdamWSlice slice = slice_over(memory);
  HostOptimizer optimizer(pool);
  return static_cast<double>(slice.n) *
         calls_per_second(budget, [&] { optimizer.update(slice, {.learning_rate = 1e-3}); });
}

}  // namespace layerstream

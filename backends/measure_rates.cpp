#include "backends/measure_rates.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace layerstream {

MeasuredRates measure_link(Device& device, void* device_memory, void* host_memory, std::size_t bytes) {
  MeasuredRates rates;
  if (bytes == 0) return rates;
  const std::unique_ptr<DeviceClock> clock = device.make_clock();
  const auto copy = [&](Lane lane, void* to, const void* from) {
    const StreamView stream = device.stream(lane);
    clock->restart(2);
    clock->mark(0, stream);
    device.link().copy(to, from, bytes, stream);
    clock->mark(1, stream);
    device.synchronize();
    const double seconds = clock->seconds(1) - clock->seconds(0);
    return seconds > 0.0 ? static_cast<double>(bytes) / seconds : 0.0;
  };
  constexpr int rounds = 3;
  for (int round = 0; round < rounds; ++round) {
    rates.to_device = std::max(rates.to_device, copy(Lane::h2d, device_memory, host_memory));
    rates.to_host = std::max(rates.to_host, copy(Lane::d2h, host_memory, device_memory));
  }
  return rates;
}

double measure_host_memory(WorkerPool& pool, void* memory, std::size_t bytes) {
  constexpr std::size_t piece = std::size_t{1} << 20;
  const auto pieces = static_cast<std::int64_t>(bytes / piece);
  if (pieces == 0) return 0.0;
  double best = 0.0;
  constexpr int rounds = 2;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(pieces, [&](std::int64_t index) {
      // Vectors of 64 bytes; the compiler must not see that what is written is what was read.
      using Vector = std::uint64_t __attribute__((vector_size(64), may_alias, aligned(8)));
      auto* const at = reinterpret_cast<Vector*>(static_cast<std::byte*>(memory) +
                                                 static_cast<std::size_t>(index) * piece);
      for (std::size_t i = 0; i < piece / sizeof(Vector); ++i) {
        const Vector value = at[i];
        asm volatile("" : : : "memory");
        at[i] = value;
      }
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (seconds > 0.0) best = std::max(best, 2.0 * static_cast<double>(pieces) * piece / seconds);
  }
  return best;
}

}  // namespace layerstream

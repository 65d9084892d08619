#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <optional>
#include <vector>

#include "backends/device_clock.hpp"

namespace layerstream {

/// Marks on streams are timing events, made when a restart first needs them; marks of the host are those of
/// the steady clock, counted from the moment when the device passed the base event. Microseconds: what two
/// clocks drift apart within a step, and the halves of the shortest of a few round trips to the device.
class CudaClock final : public DeviceClock {
 public:
  /// @param base where the base event is recorded; the stream outlives the clock.
  explicit CudaClock(cudaStream_t base);
  ~CudaClock() override;
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;

  void restart(std::size_t marks) override;
  void mark(std::size_t index, StreamView stream) override;
  double seconds(std::size_t index) const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Mark {
    enum class Kind : char { none, host, device } kind = Kind::none;
    Clock::time_point time;  ///< of the host's
  };

  cudaStream_t base_stream_;
  cudaEvent_t base_ = nullptr;
  Clock::time_point base_time_;
  std::vector<cudaEvent_t> events_;  ///< by mark
  std::vector<Mark> marks_;
};

}  // namespace layerstream

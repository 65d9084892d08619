#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "core/event.hpp"

namespace layerstream {

/// An event between lanes of a CUDA device. Between two streams the device waits and no thread does; a lane
/// that runs on the host waits with its thread, asleep.
class CudaEvent final : public Event {
 public:
  CudaEvent();
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void reset() override { state_ = State::pending; }
  void record(StreamView stream) override;
  void wait(StreamView stream) override;
  void abandon() override { settle(State::abandoned); }

 private:
  enum class State : std::uint8_t { pending, on_device, on_host, abandoned };

  void settle(State state);

  cudaEvent_t event_ = nullptr;
  std::atomic<State> state_{State::pending};
};

}  // namespace layerstream

#include "backends/cuda/cuda_event.hpp"

#include "core/cuda_error.hpp"

namespace layerstream {

CudaEvent::CudaEvent() {
  LAYERSTREAM_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
}

CudaEvent::~CudaEvent() {
  cudaEventDestroy(event_);
}

void CudaEvent::settle(State state) {
  State expected = State::pending;  // what came first stays
  state_.compare_exchange_strong(expected, state);
  state_.notify_all();
}

void CudaEvent::record(StreamView stream) {
  if (stream.native() == nullptr) return settle(State::on_host);
  LAYERSTREAM_CUDA(cudaEventRecord(event_, static_cast<cudaStream_t>(stream.native())));
  settle(State::on_device);
}

void CudaEvent::wait(StreamView stream) {
  state_.wait(State::pending);
  switch (state_.load()) {
    case State::abandoned:
      throw Abandoned();
    case State::on_device:
      if (stream.native() == nullptr) {
        LAYERSTREAM_CUDA(cudaEventSynchronize(event_));
      } else {
        LAYERSTREAM_CUDA(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.native()), event_, 0));
      }
      return;
    case State::on_host:
    case State::pending:
      return;
  }
}

}  // namespace layerstream

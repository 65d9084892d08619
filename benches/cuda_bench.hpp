#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/cuda_error.hpp"
#include "core/half.hpp"
#include "core/random.hpp"
#include "core/stream.hpp"

/// Device memory and device time for the CUDA benchmarks. Everything throws CudaError.
namespace layerstream::bench {

/// Zeros at first.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    LAYERSTREAM_CUDA(cudaMalloc(&memory, bytes));
    memory_.reset(memory);
    LAYERSTREAM_CUDA(cudaMemset(memory, 0, bytes));
  }

  void* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }

  /// Standard normal bf16 numbers that repeat with a prime period, so that no row is like another.
  void fill_with_normals(std::uint64_t seed) {
    constexpr std::size_t period = 1'000'003;
    std::vector<bf16> numbers(std::min(period, bytes_ / sizeof(bf16)));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = to_bf16(static_cast<float>(normal_at(seed, 0, i)));
    }
    auto* const begin = static_cast<std::byte*>(memory_.get());
    std::size_t filled = numbers.size() * sizeof(bf16);
    LAYERSTREAM_CUDA(cudaMemcpy(begin, numbers.data(), filled, cudaMemcpyHostToDevice));
    while (filled < bytes_) {
      const std::size_t count = std::min(filled, bytes_ - filled);
      LAYERSTREAM_CUDA(cudaMemcpy(begin + filled, begin, count, cudaMemcpyDeviceToDevice));
      filled += count;
    }
  }

 private:
  struct Free {
    void operator()(void* memory) const { (void)cudaFree(memory); }
  };
  std::size_t bytes_;
  std::unique_ptr<void, Free> memory_;
};

class Stream {
 public:
  Stream() {
    cudaStream_t stream = nullptr;
    LAYERSTREAM_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream);
  }
  StreamView view() const { return StreamView(static_cast<void*>(stream_.get())); }

 private:
  struct Destroy {
    void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Destroy> stream_;
};

class Event {
 public:
  Event() {
    cudaEvent_t event = nullptr;
    LAYERSTREAM_CUDA(cudaEventCreate(&event));
    event_.reset(event);
  }
  void record(StreamView stream) {
    LAYERSTREAM_CUDA(cudaEventRecord(event_.get(), static_cast<cudaStream_t>(stream.native())));
  }
  double seconds_since(const Event& begin) const {
    float milliseconds = 0.0F;
    LAYERSTREAM_CUDA(cudaEventElapsedTime(&milliseconds, begin.event_.get(), event_.get()));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  struct Destroy {
    void operator()(cudaEvent_t event) const { (void)cudaEventDestroy(event); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy> event_;
};

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Median device seconds of each; all run once per round, after two rounds that do not count.
inline std::vector<double> seconds_of(StreamView stream, const std::vector<std::function<void()>>& works,
                                      int rounds) {
  for (int i = 0; i < 2; ++i) {
    for (const auto& work : works) work();
  }
  const std::size_t count = works.size();
  // One after each piece of work, and one before the first; all is queued before the host waits.
  std::vector<Event> events(static_cast<std::size_t>(rounds) * count + 1);
  events[0].record(stream);
  for (std::size_t i = 0; i + 1 < events.size(); ++i) {
    works[i % count]();
    events[i + 1].record(stream);
  }
  LAYERSTREAM_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.native())));
  std::vector<double> medians;
  for (std::size_t w = 0; w < count; ++w) {
    std::vector<double> seconds;
    for (std::size_t i = w; i + 1 < events.size(); i += count) {
      seconds.push_back(events[i + 1].seconds_since(events[i]));
    }
    medians.push_back(median(seconds));
  }
  return medians;
}

}  // namespace layerstream::bench

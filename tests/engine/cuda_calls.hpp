#pragma once

#include <string>
#include <thread>
#include <vector>

// What a program asks of the CUDA runtime: cuda_calls.cpp puts itself between the runtime's dynamic library
// and whoever calls it. Libraries that talk to the driver (cuBLASLt, cuDNN) are not seen.

namespace layerstream::test {

struct CudaCall {
  enum class Kind {
    allocation,     ///< takes or gives back memory, or pins it
    stream_wait,    ///< the calling thread waits for a stream
    event_wait,     ///< the calling thread waits for an event
    device_wait,    ///< the calling thread waits for the device
    pageable_copy,  ///< an "asynchronous" copy from or to memory that is not pinned: the calling thread waits
    synchronous_copy
  };
  std::string name;
  Kind kind;
  std::thread::id thread;
  int tag;  ///< what tag_cuda_calls said last
};

/// From now on calls are written down; those of before are forgotten.
void record_cuda_calls();
/// Stops and returns what was written down.
std::vector<CudaCall> recorded_cuda_calls();
/// A number that later calls of all threads carry.
void tag_cuda_calls(int tag);

}  // namespace layerstream::test

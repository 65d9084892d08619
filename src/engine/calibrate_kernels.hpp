#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backends/device.hpp"
#include "model/spec.hpp"
#include "ops/libraries.hpp"
#include "profiles/hardware/hardware_profile.hpp"

namespace layerstream {

/// Measures kernels of a model's shapes in a given piece of device memory.
class KernelCalibration {
 public:
  /// @param device, @param libraries, @param memory (device memory, 256-byte aligned) outlive this object.
  /// @param budget seconds for each number.
  KernelCalibration(Device& device, ops::Libraries& libraries, const ModelSpec& spec,
                    std::span<std::byte> memory, double budget);

  /// FLOP/s of the products of a decoder layer, forward and both backward ones of each matrix; 0 if `tokens`
  /// do not fit into the memory.
  double products(DType compute, std::int64_t tokens);
  /// Keeps doing them for so long.
  void warm_up(DType compute, std::int64_t tokens, double seconds);

  /// FLOP/s over visible pairs of rows of `row_tokens`, as many as make `tokens`; 0 if they do not fit.
  struct Attention {
    double forward = 0.0, backward = 0.0, backward_nondeterministic = 0.0;
  };
  Attention attention(DType compute, std::int64_t row_tokens, std::int64_t tokens);

  double copy_bytes_per_second();        ///< read and written
  double adamw_parameters_per_second();  ///< in the device's memory
  double kernel_seconds();               ///< a launch that does next to nothing
  /// The same and one stream each way, on host memory that the device's kernels can reach.
  struct OnHostMemory {
    /// Of AdamW, by thread blocks.
    struct InPlace {
      int thread_blocks;
      double parameters_per_second;
    };
    std::vector<InPlace> adamw;
    double read_bytes_per_second = 0.0, write_bytes_per_second = 0.0;
  };
  OnHostMemory on_host_memory(std::span<std::byte> host);

 private:
  void fill(std::size_t bytes);

  Device& device_;
  ops::Libraries& libraries_;
  const ModelSpec& spec_;
  std::span<std::byte> memory_;
  double budget_;
};

}  // namespace layerstream

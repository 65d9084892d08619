#pragma once

#include <cstddef>
#include <cstdint>

#include "core/stream.hpp"

namespace layerstream::ops {

class Libraries;

/// Where an operation runs and what scratch memory it may use. Conventions of every function in ops/:
///
/// - Tensors are contiguous and row-major unless a stride is given; T is tokens, the outermost extent.
/// - The *compute dtype* is fp64, fp32 or bf16, and is read off the tensors. Arithmetic inside a kernel
///   is fp64 for fp64 and fp32 otherwise; the *accumulator dtype* (`accumulator_of`) is that of weight
///   gradients, statistics, norm weights and biases.
/// - Work is ordered on `stream`: done on return in a CPU build, asynchronous in a CUDA build.
/// - Nothing is allocated. The result never depends on the number of threads.
/// - Shape or dtype mismatches throw ContractError before anything is launched.
struct Context {
  StreamView stream;
  /// Scratch of `workspace_bytes`, 256-byte aligned, free for any operation ordered on `stream`; each
  /// operation that uses it says how much it needs.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  Libraries* libraries = nullptr;  ///< required in a CUDA build; see ops/libraries.hpp
};

}  // namespace layerstream::ops

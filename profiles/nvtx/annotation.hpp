#pragma once

#include <memory>

#include "engine/executor.hpp"
#include "ops/kernel_labels.hpp"

namespace layerstream {

/// Shows every operation to an attached profiler (Nsight Systems) as an NVTX range of domain `layerstream` on
/// the thread that issues it: named after what the operation does, category the lane, payload step, block,
/// chunk, piece, bytes and FLOPs, so that reports aggregate by name. Threads are named after their lanes.
/// Null when no tool is attached, and in builds without NVTX.
/// @param kernels while operations run, each Kokkos kernel is a range inside its operation's, named after its
/// label; outlives the annotation; null: no ranges for kernels.
std::unique_ptr<ExecutionObserver> make_annotation(ops::KernelLabels* kernels = nullptr);

}  // namespace layerstream

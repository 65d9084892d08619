#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "backends/device.hpp"
#include "core/worker_pool.hpp"
#include "ops/adamw.hpp"

namespace layerstream {

/// The copies of one direction, by size.
struct CopyRate {
  std::size_t bytes = 0;
  double to_device = 0.0, to_host = 0.0;  ///< bytes a second, one copy after another
};

struct LinkRates {
  std::vector<CopyRate> by_size;  ///< ascending
  double duplex = 0.0;            ///< bytes a second, both directions together, largest copies
  double copy_seconds = 0.0;      ///< what a copy costs beside its bytes
  double handover_seconds = 0.0;  ///< a thread that waits for a copy and issues the next, beside the copy
};

/// @param host pinned; two halves are used at the same time. Contents are lost on both sides.
/// @param budget seconds for each number.
LinkRates measure_link_rates(Device& device, std::span<std::byte> on_device, std::span<std::byte> host,
                             double budget);

/// STREAM's triad (McCalpin, 1995): a = b + s·c over three arrays of doubles, 24 bytes an element.
double measure_triad(WorkerPool& pool, std::span<std::byte> memory, double budget);

/// Host AdamW over state in `memory`, parameters a second.
double measure_host_adamw(WorkerPool& pool, std::span<std::byte> memory, double budget);

/// A slab over memory: hi, lo, two moments, gradient; 16 bytes an element.
ops::AdamWSlice slice_over(std::span<std::byte> memory);
/// Zeros: no time is lost on numbers that are not normal.
void clear(WorkerPool& pool, std::span<std::byte> memory);

}  // namespace layerstream

#pragma once

#include <cstdint>
#include <span>

#include "core/worker_pool.hpp"
#include "engine/parameter_groups.hpp"
#include "ops/adamw.hpp"

namespace layerstream {

/// AdamW over the slabs of blocks on the host's own threads. Slabs are cut at fixed places, whatever the
/// number of threads, and the formula is elementwise: results do not depend on who does which piece.
class HostOptimizer {
 public:
  /// 256 Ki elements are 7 MiB of state: a few hundred microseconds of one thread, so that threads finish
  /// together and handing out pieces costs nothing; and whole pages of each array, so that no two
  /// threads share one.
  static constexpr std::int64_t default_piece_elements = 256 * 1024;

  /// @param pool outlives this object; @param piece_elements at least 1.
  explicit HostOptimizer(WorkerPool& pool, std::int64_t piece_elements = default_piece_elements);

  /// One step, in place; returns when all of the slab is updated but what is frozen. @param ranges of its
  /// elements: their decay counts, not settings.weight_decay. Throws ContractError unless they ascend and end
  /// with slab.n.
  void update(const ops::AdamWSlice& slab, std::span<const UpdateRange> ranges,
              const ops::AdamWSettings& settings);
  /// All of it decayed by settings.weight_decay.
  void update(const ops::AdamWSlice& slab, const ops::AdamWSettings& settings);

 private:
  WorkerPool* pool_;
  std::int64_t piece_elements_;
};

}  // namespace layerstream

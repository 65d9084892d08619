#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backends/memory_backend.hpp"
#include "core/ledger.hpp"
#include "core/worker_pool.hpp"
#include "model/layout.hpp"

namespace layerstream {

/// Called between blocks while weights are read, written or made; may throw to stop.
using BlockCallback = std::function<void(int blocks_done, int num_blocks)>;

/// One block's share of the model's state in host memory: 12 bytes per parameter, 4 of a frozen block.
struct Slab {
  bf16* hi;           ///< upper halves: the weights that stream
  std::int16_t* lo;   ///< lower halves: with hi, the exact FP32 master
  float* exp_avg;     ///< Adam's first moment; null of a frozen block, and where nothing is trained
  float* exp_avg_sq;  ///< Adam's second moment
  std::int64_t num_elements;
  std::int64_t num_matrix_elements;
};

/// Lays a block's slab out; each array's component in the ledger is given. @param moments empty: none.
Slab make_slab(const BlockLayout& block, Arena& arena, std::string_view upper, std::string_view lower,
               std::string_view moments);

/// The home of weights and optimizer state: a slab for each block.
class ParameterStore {
 public:
  /// Lays the slabs out in `host`, whose memory must read as zero, or as what a store of the same layout has
  /// left there. With a dry arena only bytes are counted. @param layout outlives the store.
  ParameterStore(const ModelLayout& layout, Arena& host, bool with_moments = true);

  /// What the slabs take of an arena. Their places depend on the layout alone.
  static std::size_t bytes(const ModelLayout& layout, bool with_moments = true);

  const ModelLayout& layout() const { return layout_; }
  const Slab& slab(int block) const { return slabs_[static_cast<std::size_t>(block)]; }

  /// What a backend fetches for the block.
  BlockSource source(int block, bool low_halves) const;

  /// Counts the writes to a block's weights; a fetched slot carries the version it was filled from.
  std::int64_t version(int block) const { return versions_[static_cast<std::size_t>(block)].load(); }
  void bump_version(int block) { ++versions_[static_cast<std::size_t>(block)]; }

  /// Sets `values.size()` elements of a parameter from element `first` on.
  void write(int block, const Parameter& parameter, std::int64_t first, std::span<const float> values);
  /// The exact FP32 master.
  void read(int block, const Parameter& parameter, std::int64_t first, std::span<float> values) const;

  /// Fresh weights: matrices normal with `standard_deviation`, norms 1, biases 0; moments 0. The numbers
  /// depend on the seed and the parameter's place alone.
  void initialize(std::uint64_t seed, double standard_deviation, WorkerPool& pool,
                  const BlockCallback& between_blocks = {});

 private:
  const ModelLayout& layout_;
  std::vector<Slab> slabs_;
  std::unique_ptr<std::atomic<std::int64_t>[]> versions_;
};

}  // namespace layerstream

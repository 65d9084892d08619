#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/half.hpp"
#include "core/lane.hpp"
#include "core/stream.hpp"

namespace layerstream {

/// Where the weights of one slab lie in host memory: its halves, matrices first, then vectors.
struct SlabSource {
  const bf16* hi = nullptr;
  const std::int16_t* lo = nullptr;
  std::int64_t num_matrix_elements = 0;
  std::int64_t num_elements = 0;
  /// Rows are looked up, not multiplied: only those that are used need to move.
  bool gathered = false;
};

/// What a block computes with: its own slab, and the embedding's when the head is tied to it. Matrices
/// stream as upper halves, and as both when `low_halves`; vectors always as both.
struct BlockSource {
  std::vector<SlabSource> slabs;
  bool low_halves = false;
};

/// A slab as kernels can read it, wherever it is.
struct BoundSlab {
  const bf16* matrix_hi = nullptr;
  const std::int16_t* matrix_lo = nullptr;  ///< null when low halves do not stream
  const bf16* vector_hi = nullptr;
  const std::int16_t* vector_lo = nullptr;
};
using WeightBinding = std::vector<BoundSlab>;

/// Brings a block's weights to the device, takes gradients and activations away and back. It knows
/// bytes and links and no mathematics.
///
/// A slot goes through fetch → acquire (any number of times) → release. It carries a tag (block,
/// version), and whatever does not fit the tag throws ContractError: acquiring what was not fetched or
/// is stale, fetching over a slot in use, releasing twice.
///
/// fetch is called from the thread of `fetch_lane()`, acquire and release from the compute lane's;
/// the caller orders them with events.
class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;

  virtual std::string name() const = 0;
  /// Kernels read and write the host regions where they lie: tables are gathered from there, used rows of gradients
  /// written there, state updated there.
  virtual bool kernels_reach_host() const = 0;
  /// The lane on which fetches are ordered.
  virtual Lane fetch_lane() const = 0;
  /// Device bytes that a slot needs to hold the block.
  virtual std::size_t slot_bytes(const BlockSource& source) const = 0;
  /// Gives the backend its slots: device memory of `bytes` each, 256-byte aligned.
  virtual void attach_slots(std::span<void* const> slots, std::size_t bytes) = 0;

  /// Asynchronous on `stream`.
  virtual void fetch(int slot, int block, std::int64_t version, const BlockSource& source,
                     StreamView stream) = 0;
  /// Valid until release. @pre the fetch's work is ordered before the caller's stream.
  virtual WeightBinding acquire(int slot, int block, std::int64_t version) = 0;
  virtual void release(int slot, int block) = 0;

  /// Copies of gradients and saved activations. Asynchronous on `stream`; the ranges must not overlap.
  virtual void copy_to_host(void* host, const void* device, std::size_t bytes, StreamView stream) = 0;
  virtual void copy_to_device(void* device, const void* host, std::size_t bytes, StreamView stream) = 0;
};

}  // namespace layerstream

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/worker_pool.hpp"

namespace layerstream {

/// How a HostRegion is made.
struct HostRegionOptions {
  std::string component = "host region";  ///< for messages
  std::optional<int> numa_node = {};      ///< bind all pages to this node; else the system's policy
  bool must_bind = true;                  ///< else goes on without where it cannot be: see binding_shortfall
  WorkerPool* pool = nullptr;             ///< touches pages in parallel; else the calling thread does
  /// Bytes that may be taken (`host_memory_limit`); else HostMemoryProbe is asked.
  std::optional<std::uint64_t> available_bytes = {};
  /// Called while pages are touched, at least every `progress_interval` plus the time of one 64 MiB piece
  /// and once at the end, by one thread at a time. May throw: then nothing is held.
  std::function<void(std::size_t bytes_done, std::size_t bytes_total)> progress = {};
  std::chrono::milliseconds progress_interval{2000};
};

/// Host memory for slabs: an anonymous mapping with huge pages, zeroed and present when the constructor
/// returns, so that no later step waits for the kernel or finds that there is no memory. Owns it.
class HostRegion {
 public:
  static constexpr std::size_t alignment = std::size_t{2} << 20;  ///< of data(): one huge page

  /// Nothing: data() is null and bytes() 0.
  HostRegion() = default;

  /// Maps exactly `bytes` (rounded up to small pages by the kernel only). Throws ResourceError, naming what
  /// is wanted, what is available and which file says so, if it is too much, the node does not exist or
  /// cannot be bound, or the mapping is refused; nothing is held then.
  explicit HostRegion(std::size_t bytes, const HostRegionOptions& options = {});

  HostRegion(HostRegion&&) noexcept = default;
  HostRegion& operator=(HostRegion&&) noexcept = default;

  /// Makes it `bytes` long. What both sizes have keeps its contents and is never held twice; what comes in
  /// addition is as the constructor makes it, and progress tells of that alone. data() may change.
  /// @param options the constructor's. Throws as the constructor does; bytes() and contents are then as they
  /// were.
  void resize(std::size_t bytes, const HostRegionOptions& options = {});

  void* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_of(memory_); }

  /// False if the kernel refused transparent huge pages: slower, but right.
  bool has_huge_pages() const { return huge_pages_; }
  /// Why pages are not bound to the node that was wanted; empty if they are, or if none was.
  const std::string& binding_shortfall() const { return binding_shortfall_; }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(void* base) const noexcept;
  };
  using Memory = std::unique_ptr<void, Unmap>;

  /// Takes `base` in place of what is held, which the kernel has moved there.
  void hold(void* base, std::size_t bytes) noexcept;
  void shrink(std::size_t bytes);
  void grow(std::size_t bytes, const HostRegionOptions& options);

  static std::size_t bytes_of(const Memory& memory) { return memory ? memory.get_deleter().bytes : 0; }

  Memory memory_;
  bool huge_pages_ = false;
  std::string binding_shortfall_ = {};
};

}  // namespace layerstream

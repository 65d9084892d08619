#include "backends/host_region.hpp"

#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/error.hpp"
#include "core/host_memory.hpp"
#include "core/ledger.hpp"

namespace layerstream {

namespace {

/// What one task of the first touch covers: a few tens of milliseconds.
constexpr std::size_t piece_bytes = std::size_t{64} << 20;

std::string describe(const HostRegionOptions& options, std::size_t bytes) {
  const std::string node = options.numa_node ? fmt::format(" on NUMA node {}", *options.numa_node) : "";
  return fmt::format("{}: {} ({} B) of host memory wanted{}", options.component, format_bytes(bytes), bytes,
                     node);
}

void expect_available(std::size_t bytes, const HostRegionOptions& options) {
  if (options.available_bytes) {
    if (bytes <= *options.available_bytes) return;
    throw ResourceError(fmt::format(
        "{}, {} ({} B) allowed by host_memory_limit; raise it or use a smaller model",
        describe(options, bytes), format_bytes(*options.available_bytes), *options.available_bytes));
  }
  const HostMemoryProbe probe;
  const HostMemory memory =
      options.numa_node ? probe.available_on_node(*options.numa_node) : probe.available();
  if (bytes <= memory.available) return;
  std::string message = fmt::format(
      "{}, {} ({} B) available according to {}; free memory, or set host_memory_limit if that is wrong",
      describe(options, bytes), format_bytes(memory.available), memory.available, memory.bound_by);
  for (const std::string& warning : memory.warnings) message += "; " + warning;
  throw ResourceError(message);
}

void expect_node(std::size_t bytes, const HostRegionOptions& options) {
  if (!options.numa_node) return;
  if (numa_available() < 0) {
    throw ResourceError(describe(options, bytes) + ", but this system has no NUMA support; set numa: off");
  }
  const int node = *options.numa_node;
  if (node < 0 || node > numa_max_node() ||
      numa_bitmask_isbitset(numa_all_nodes_ptr, static_cast<unsigned>(node)) == 0) {
    throw ResourceError(fmt::format("{}, but there is no such node with memory; the highest node is {}",
                                    describe(options, bytes), numa_max_node()));
  }
}

void bind_to_node(void* base, std::size_t bytes, const HostRegionOptions& options) {
  if (!options.numa_node) return;
  const std::unique_ptr<bitmask, decltype(&numa_free_nodemask)> nodes(numa_allocate_nodemask(),
                                                                      &numa_free_nodemask);
  numa_bitmask_setbit(nodes.get(), static_cast<unsigned>(*options.numa_node));
  if (mbind(base, bytes, MPOL_BIND, nodes->maskp, nodes->size + 1, 0) != 0) {
    throw ResourceError(fmt::format("{}, but mbind refused: {}; set numa: off", describe(options, bytes),
                                    std::strerror(errno)));
  }
}

/// Tells how far the first touch is, now and then.
class Progress {
 public:
  Progress(std::size_t total, const HostRegionOptions& options) : total_(total), options_(options) {}

  void add(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    const auto now = std::chrono::steady_clock::now();
    if (done_ < total_ && now - last_ < options_.progress_interval) return;
    if (options_.progress) options_.progress(done_, total_);
    last_ = now;
  }

 private:
  std::size_t total_;
  const HostRegionOptions& options_;
  std::mutex mutex_;
  std::size_t done_ = 0;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

void touch(std::byte* base, std::size_t bytes, const HostRegionOptions& options) {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  Progress progress(bytes, options);
  const auto touch_piece = [&](std::int64_t index) {
    const std::size_t begin = static_cast<std::size_t>(index) * piece_bytes;
    const std::size_t end = std::min(bytes, begin + piece_bytes);
    // A write, since a read would map the shared zero page.
    for (std::size_t at = begin; at < end; at += page)
      *reinterpret_cast<volatile std::byte*>(base + at) = std::byte{0};
    progress.add(end - begin);
  };
  const std::int64_t pieces = static_cast<std::int64_t>((bytes + piece_bytes - 1) / piece_bytes);
  if (options.pool != nullptr) {
    options.pool->parallel_for(pieces, touch_piece);
  } else {
    for (std::int64_t i = 0; i < pieces; ++i) touch_piece(i);
  }
}

}  // namespace

void HostRegion::Unmap::operator()(void* base) const noexcept {
  munmap(base, bytes);
}

HostRegion::HostRegion(std::size_t bytes, const HostRegionOptions& options) {
  if (bytes == 0) return;
  expect_node(bytes, options);
  expect_available(bytes, options);
  // Over-map by one huge page, then give back what lies before and after the aligned piece.
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > SIZE_MAX - alignment - page)
    throw ResourceError(describe(options, bytes) + ", more than an address space");
  const std::size_t paged = (bytes + page - 1) / page * page;
  void* const mapped =
      mmap(nullptr, paged + alignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw ResourceError(fmt::format("{}, but the system refused: {}; see ulimit -v and vm.overcommit_memory",
                                    describe(options, bytes), std::strerror(errno)));
  }
  const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(mapped) % alignment) % alignment;
  std::byte* const base = static_cast<std::byte*>(mapped) + before;
  if (before != 0) munmap(mapped, before);
  if (before != alignment) munmap(base + paged, alignment - before);
  memory_ = Memory(base, Unmap{bytes});
  huge_pages_ = madvise(base, paged, MADV_HUGEPAGE) == 0;
  bind_to_node(base, paged, options);
  touch(base, bytes, options);
}

}  // namespace layerstream

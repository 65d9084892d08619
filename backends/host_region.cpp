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

/// @param held of them already
void expect_available(std::size_t bytes, std::size_t held, const HostRegionOptions& options) {
  if (options.available_bytes) {
    if (bytes <= *options.available_bytes) return;
    throw ResourceError(fmt::format(
        "{}, {} ({} B) allowed by host_memory_limit; raise it or use a smaller model",
        describe(options, bytes), format_bytes(*options.available_bytes), *options.available_bytes));
  }
  const HostMemoryProbe probe;
  const HostMemory memory =
      options.numa_node ? probe.available_on_node(*options.numa_node) : probe.available();
  if (bytes - held <= memory.available) return;
  const std::string more = held > 0 ? fmt::format(" ({} more than now)", format_bytes(bytes - held)) : "";
  std::string message = fmt::format(
      "{}{}, {} ({} B) available according to {}; free memory,{} or set host_memory_limit if that is wrong",
      describe(options, bytes), more, format_bytes(memory.available), memory.available, memory.bound_by,
      options.numa_node ? " set numa: off for that of all nodes," : "");
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

/// The options without a node that cannot be had and need not be; `shortfall` says why.
HostRegionOptions with_possible_node(std::size_t bytes, HostRegionOptions options, std::string& shortfall) {
  shortfall.clear();
  try {
    expect_node(bytes, options);
  } catch (const ResourceError& error) {
    if (options.must_bind) throw;
    shortfall = error.what();
    options.numa_node.reset();
  }
  return options;
}

void bind_to_node(void* base, std::size_t bytes, const HostRegionOptions& options, std::string& shortfall) {
  if (!options.numa_node) return;
  const std::unique_ptr<bitmask, decltype(&numa_free_nodemask)> nodes(numa_allocate_nodemask(),
                                                                      &numa_free_nodemask);
  numa_bitmask_setbit(nodes.get(), static_cast<unsigned>(*options.numa_node));
  if (mbind(base, bytes, MPOL_BIND, nodes->maskp, nodes->size + 1, 0) != 0) {
    // Filters of containers may forbid it.
    const std::string problem = fmt::format("{}, but mbind refused: {}; set numa: off",
                                            describe(options, bytes), std::strerror(errno));
    if (options.must_bind) throw ResourceError(problem);
    shortfall = problem;
  }
}

std::size_t page_size() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

/// What the kernel makes of `bytes`: whole pages.
std::size_t in_pages(std::size_t bytes) {
  const std::size_t page = page_size();
  return (bytes + page - 1) / page * page;
}

void expect_addressable(std::size_t bytes, const HostRegionOptions& options) {
  if (bytes > SIZE_MAX - HostRegion::alignment - page_size())
    throw ResourceError(describe(options, bytes) + ", more than an address space");
}

[[noreturn]] void refused_by_system(std::size_t bytes, const HostRegionOptions& options) {
  throw ResourceError(fmt::format("{}, but the system refused: {}; see ulimit -v and vm.overcommit_memory",
                                  describe(options, bytes), std::strerror(errno)));
}

/// Maps whole pages at HostRegion's alignment: over-maps by one huge page, then gives back what lies before
/// and after the aligned piece.
std::byte* map_aligned(std::size_t bytes, int protection, int more_flags, const HostRegionOptions& options) {
  constexpr std::size_t alignment = HostRegion::alignment;
  expect_addressable(bytes, options);
  const std::size_t paged = in_pages(bytes);
  void* const mapped =
      mmap(nullptr, paged + alignment, protection, MAP_PRIVATE | MAP_ANONYMOUS | more_flags, -1, 0);
  if (mapped == MAP_FAILED) refused_by_system(bytes, options);
  const std::size_t before = (alignment - reinterpret_cast<std::uintptr_t>(mapped) % alignment) % alignment;
  std::byte* const base = static_cast<std::byte*>(mapped) + before;
  if (before != 0) munmap(mapped, before);
  if (before != alignment) munmap(base + paged, alignment - before);
  return base;
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
  const std::size_t page = page_size();
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

HostRegion::HostRegion(std::size_t bytes, const HostRegionOptions& wanted) {
  if (bytes == 0) return;
  const HostRegionOptions options = with_possible_node(bytes, wanted, binding_shortfall_);
  expect_available(bytes, 0, options);
  std::byte* const base = map_aligned(bytes, PROT_READ | PROT_WRITE, 0, options);
  memory_ = Memory(base, Unmap{bytes});
  huge_pages_ = madvise(base, in_pages(bytes), MADV_HUGEPAGE) == 0;
  bind_to_node(base, in_pages(bytes), options, binding_shortfall_);
  touch(base, bytes, options);
}

void HostRegion::resize(std::size_t bytes, const HostRegionOptions& wanted) {
  if (!memory_ || bytes == 0) {
    *this = HostRegion(bytes, wanted);
  } else if (bytes <= this->bytes()) {
    shrink(bytes);
  } else {
    const HostRegionOptions options = with_possible_node(bytes, wanted, binding_shortfall_);
    expect_available(bytes, this->bytes(), options);
    grow(bytes, options);
  }
}

void HostRegion::hold(void* base, std::size_t bytes) noexcept {
  (void)memory_.release();
  memory_ = Memory(base, Unmap{bytes});
}

void HostRegion::shrink(std::size_t bytes) {
  const std::size_t kept = in_pages(bytes);
  const std::size_t given_back = in_pages(this->bytes()) - kept;
  if (given_back > 0 && munmap(static_cast<std::byte*>(data()) + kept, given_back) != 0) {
    throw ResourceError(fmt::format("giving back {} of host memory was refused: {}", format_bytes(given_back),
                                    std::strerror(errno)));
  }
  hold(data(), bytes);
}

void HostRegion::grow(std::size_t bytes, const HostRegionOptions& options) {
  const std::size_t held = this->bytes();
  const std::size_t held_paged = in_pages(held);
  expect_addressable(bytes, options);
  const std::size_t wanted_paged = in_pages(bytes);
  void* base = data();
  if (mremap(base, held_paged, wanted_paged, 0) == MAP_FAILED) {
    // There is no room behind it. The kernel moves page tables, not pages, to where there is some. A place
    // that it then refuses is left reserved, which costs addresses alone: it may have been unmapped and be
    // someone else's.
    void* const place = map_aligned(bytes, PROT_NONE, MAP_NORESERVE, options);
    base = mremap(base, held_paged, wanted_paged, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (base == MAP_FAILED) refused_by_system(bytes, options);
  }
  hold(base, bytes);
  auto* const begin = static_cast<std::byte*>(base);
  try {
    // A shorter size before may have left something in the last page.
    std::memset(begin + held, 0, std::min(bytes, held_paged) - held);
    // Of all of it, since a mapping in several parts could not be resized again.
    huge_pages_ = madvise(begin, wanted_paged, MADV_HUGEPAGE) == 0;
    bind_to_node(begin, wanted_paged, options, binding_shortfall_);
    if (bytes > held_paged) touch(begin + held_paged, bytes - held_paged, options);
  } catch (...) {
    shrink(held);
    throw;
  }
}

}  // namespace layerstream

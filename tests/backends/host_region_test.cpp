#include "backends/host_region.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.hpp"

namespace layerstream {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

static_assert(!std::is_copy_constructible_v<HostRegion> && !std::is_copy_assignable_v<HostRegion>);
static_assert(std::is_nothrow_move_constructible_v<HostRegion> &&
              std::is_nothrow_move_assignable_v<HostRegion>);

std::size_t page_size() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

/// Pages of [base, base + bytes) that are in memory, or −1 if some are not mapped at all.
std::ptrdiff_t resident_pages(void* base, std::size_t bytes) {
  std::vector<unsigned char> pages((bytes + page_size() - 1) / page_size());
  if (mincore(base, bytes, pages.data()) != 0) return -1;
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

std::string refusal(std::size_t bytes, const HostRegionOptions& options) {
  try {
    HostRegion region(bytes, options);
  } catch (const ResourceError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(HostRegion, IsZeroedPresentAlignedAndOfExactlyTheSizeAskedFor) {
  WorkerPool pool(3);
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4097}, std::size_t{2} << 20, (std::size_t{130} << 20) + 12345}) {
    HostRegionOptions options;
    options.pool = bytes > 4097 ? &pool : nullptr;
    const HostRegion region(bytes, options);
    EXPECT_EQ(region.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % HostRegion::alignment, 0u);
    EXPECT_EQ(resident_pages(region.data(), bytes),
              static_cast<std::ptrdiff_t>((bytes + page_size() - 1) / page_size()));
    const auto* const begin = static_cast<const unsigned char*>(region.data());
    EXPECT_TRUE(std::all_of(begin, begin + bytes, [](unsigned char byte) { return byte == 0; }));
    std::memset(region.data(), 0xff, bytes);
  }
}

TEST(HostRegion, GivesItsMemoryBack) {
  const std::size_t bytes = std::size_t{8} << 20;
  void* base = nullptr;
  {
    const HostRegion region(bytes);
    base = region.data();
    EXPECT_GT(resident_pages(base, bytes), 0);
  }
  EXPECT_EQ(resident_pages(base, bytes), -1);
}

TEST(HostRegion, MovesLeaveNothingBehind) {
  HostRegion first(4096);
  void* const base = first.data();
  HostRegion second(std::move(first));
  EXPECT_EQ(second.data(), base);
  EXPECT_EQ(second.bytes(), 4096u);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(first.bytes(), 0u);
  HostRegion third(8192);
  void* const replaced = third.data();
  third = std::move(second);
  EXPECT_EQ(third.data(), base);
  EXPECT_EQ(third.bytes(), 4096u);
  EXPECT_EQ(resident_pages(replaced, 8192), -1);
}

TEST(HostRegion, OfNoBytesIsNothing) {
  const HostRegion region(0);
  EXPECT_EQ(region.data(), nullptr);
  EXPECT_EQ(region.bytes(), 0u);
}

void fill(HostRegion& region, std::size_t from) {
  auto* const bytes = static_cast<unsigned char*>(region.data());
  for (std::size_t i = from; i < region.bytes(); ++i) bytes[i] = static_cast<unsigned char>(1 + i % 251);
}

/// Of the pattern that `fill` leaves, as far as `filled`; zero after it.
bool holds(const HostRegion& region, std::size_t filled) {
  const auto* const bytes = static_cast<const unsigned char*>(region.data());
  for (std::size_t i = 0; i < region.bytes(); ++i) {
    if (bytes[i] != (i < filled ? 1 + i % 251 : 0)) return false;
  }
  return true;
}

TEST(HostRegionResize, KeepsWhatBothSizesHaveAndZeroesTheRest) {
  WorkerPool pool(2);
  HostRegionOptions options;
  options.pool = &pool;
  HostRegion region((std::size_t{3} << 20) + 123, options);
  fill(region, 0);
  std::size_t filled = region.bytes();
  for (const std::size_t bytes :
       {(std::size_t{130} << 20) + 12345, (std::size_t{1} << 20) + 5000, (std::size_t{1} << 20) + 6000,
        std::size_t{7}, std::size_t{9000}, std::size_t{2} << 20, (std::size_t{64} << 20) + 1}) {
    auto* const before = static_cast<std::byte*>(region.data());
    const std::size_t held = region.bytes();
    region.resize(bytes, options);
    filled = std::min(filled, bytes);
    EXPECT_EQ(region.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % HostRegion::alignment, 0u);
    EXPECT_TRUE(holds(region, filled)) << held << " to " << bytes;
    EXPECT_EQ(resident_pages(region.data(), bytes),
              static_cast<std::ptrdiff_t>((bytes + page_size() - 1) / page_size()));
    if (bytes + page_size() < held) {
      EXPECT_EQ(resident_pages(before + (held - 1) / page_size() * page_size(), 1), -1);
    }
    fill(region, filled);
    filled = bytes;
  }
}

/// Takes the addresses behind a region, so that it cannot grow where it is.
class Obstacle {
 public:
  explicit Obstacle(const HostRegion& region) {
    const std::size_t page = page_size();
    std::byte* const end = static_cast<std::byte*>(region.data()) + (region.bytes() + page - 1) / page * page;
    // If it fails, something lies there already.
    place_ = mmap(end, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  }
  ~Obstacle() {
    if (place_ != MAP_FAILED) munmap(place_, page_size());
  }
  Obstacle(const Obstacle&) = delete;
  Obstacle& operator=(const Obstacle&) = delete;

 private:
  void* place_;
};

/// Flags of the one mapping that spans the region (VmFlags of smaps); empty if several do.
std::string mapping_flags(const HostRegion& region) {
  const auto begin = reinterpret_cast<std::uintptr_t>(region.data());
  std::ifstream smaps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t first = 0, last = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) {
      inside = first <= begin && begin + region.bytes() <= last;
    } else if (inside && line.starts_with("VmFlags:")) {
      return line;
    }
  }
  return {};
}

TEST(HostRegionResize, MovesWhereThereIsNoRoomBehindIt) {
  HostRegionOptions options;
  if (numa_available() >= 0) options.numa_node = 0;
  HostRegion region((std::size_t{4} << 20) + 1, options);
  fill(region, 0);
  const std::size_t filled = region.bytes();
  void* const before = region.data();
  for (const std::size_t bytes : {std::size_t{9} << 20, (std::size_t{33} << 20) + 17}) {
    const Obstacle obstacle(region);
    void* const place = region.data();
    region.resize(bytes, options);
    EXPECT_NE(region.data(), place);
    EXPECT_EQ(resident_pages(place, page_size()), -1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % HostRegion::alignment, 0u);
    EXPECT_TRUE(holds(region, filled));
    EXPECT_THAT(mapping_flags(region), region.has_huge_pages() ? HasSubstr(" hg") : HasSubstr("VmFlags"));
    for (const std::size_t at : {std::size_t{0}, bytes - 1}) {
      if (!options.numa_node) continue;
      int mode = -1;
      unsigned long nodes = 0;
      ASSERT_EQ(get_mempolicy(&mode, &nodes, sizeof(nodes) * 8, static_cast<std::byte*>(region.data()) + at,
                              MPOL_F_ADDR),
                0);
      EXPECT_EQ(mode, MPOL_BIND);
      EXPECT_EQ(nodes, 1u);
    }
  }
  EXPECT_NE(region.data(), before);
}

TEST(HostRegionResize, TooMuchIsRefusedAndWhatIsHeldStays) {
  constexpr std::size_t held = (std::size_t{3} << 20) + 77;
  HostRegion region(held);
  fill(region, 0);
  const auto refused = [&](std::size_t bytes, const HostRegionOptions& options) {
    std::string message = "nothing was refused";
    try {
      region.resize(bytes, options);
    } catch (const ResourceError& error) {
      message = error.what();
    }
    EXPECT_EQ(region.bytes(), held);
    EXPECT_TRUE(holds(region, held));
    EXPECT_EQ(
        resident_pages(static_cast<std::byte*>(region.data()) + (held / page_size() + 1) * page_size(), 1),
        -1);
    return message;
  };
  HostRegionOptions options;
  options.component = "model state";
  EXPECT_THAT(
      refused(std::size_t{1} << 50, options),
      AllOf(HasSubstr("model state"), HasSubstr("more than now"), HasSubstr("available according to /")));
  options.available_bytes = held;
  EXPECT_THAT(refused(held + 1, options),
              AllOf(HasSubstr("host_memory_limit"), HasSubstr(std::to_string(held))));
  options.available_bytes = SIZE_MAX;
  EXPECT_THAT(refused(std::size_t{1} << 60, options), HasSubstr("the system refused"));
  EXPECT_THAT(refused(SIZE_MAX - 1, options), HasSubstr("address space"));
  options.numa_node = 4711;
  EXPECT_THAT(refused(2 * held, options), HasSubstr("4711"));
  options = {};
  options.progress = [](std::size_t, std::size_t) { throw ResourceError("stopped by the caller"); };
  EXPECT_THAT(refused(2 * held, options), HasSubstr("stopped by the caller"));
  region.resize(2 * held);
  EXPECT_TRUE(holds(region, held));
}

TEST(HostRegionResize, BeginsAndEndsWithNothing) {
  HostRegion region;
  region.resize(5000);
  EXPECT_EQ(region.bytes(), 5000u);
  void* const base = region.data();
  region.resize(0);
  EXPECT_EQ(region.data(), nullptr);
  EXPECT_EQ(resident_pages(base, 5000), -1);
}

TEST(HostRegionResize, ProgressTellsOfWhatIsNew) {
  constexpr std::size_t held = std::size_t{4} << 20, added = (std::size_t{128} << 20) + 1;
  HostRegion region(held);
  std::vector<std::size_t> told;
  HostRegionOptions options;
  options.progress_interval = std::chrono::milliseconds(0);
  options.progress = [&](std::size_t done, std::size_t total) {
    EXPECT_EQ(total, added);
    told.push_back(done);
  };
  region.resize(held + added, options);
  ASSERT_EQ(told.size(), 3u);
  EXPECT_EQ(told.back(), added);
}

TEST(HostRegion, AnAbsurdSizeIsRefusedWithWhatIsWantedAndAvailable) {
  HostRegionOptions options;
  options.component = "moments";
  for (const std::size_t bytes : {std::size_t{1} << 50, SIZE_MAX - 1}) {
    EXPECT_THAT(refusal(bytes, options),
                AllOf(HasSubstr("moments"), HasSubstr(std::to_string(bytes)),
                      HasSubstr("available according to /"), HasSubstr("host_memory_limit")));
  }
}

TEST(HostRegion, TheSystemsOwnRefusalIsReportedWhereTheLimitWasOverridden) {
  HostRegionOptions options;
  options.available_bytes = SIZE_MAX;
  EXPECT_THAT(refusal(std::size_t{1} << 60, options), HasSubstr("the system refused"));
  EXPECT_THAT(refusal(SIZE_MAX - 1, options), HasSubstr("address space"));
}

TEST(HostRegion, AGivenLimitIsHonouredToTheByte) {
  HostRegionOptions options;
  options.available_bytes = 10000;
  EXPECT_NO_THROW(HostRegion(10000, options));
  EXPECT_THAT(refusal(10001, options),
              AllOf(HasSubstr("10001 B"), HasSubstr("10000 B"), HasSubstr("host_memory_limit")));
}

TEST(HostRegion, ProgressIsToldPieceByPieceAndEndsWithTheWhole) {
  WorkerPool pool(2);
  const std::size_t bytes = (std::size_t{192} << 20) + 1;  // three pieces of 64 MiB and a byte
  std::vector<std::size_t> told;
  HostRegionOptions options;
  options.pool = &pool;
  options.progress_interval = std::chrono::milliseconds(0);
  options.progress = [&](std::size_t done, std::size_t total) {
    EXPECT_EQ(total, bytes);
    told.push_back(done);
  };
  const HostRegion region(bytes, options);
  ASSERT_EQ(told.size(), 4u);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.back(), bytes);
}

TEST(HostRegion, AFailureWhileTouchingIsPassedOnAndLeavesNothing) {
  HostRegionOptions options;
  options.progress = [](std::size_t, std::size_t) { throw ResourceError("stopped by the caller"); };
  EXPECT_THAT(refusal(4096, options), HasSubstr("stopped by the caller"));
}

TEST(HostRegion, ANodeThatDoesNotExistIsRefused) {
  HostRegionOptions options;
  for (const int node : {-1, 4711}) {
    options.numa_node = node;
    EXPECT_THAT(refusal(4096, options), HasSubstr(std::to_string(node)));
  }
}

TEST(HostRegion, ANodeThatCannotBeHadAndNeedNotBeIsDoneWithoutAndSaid) {
  HostRegionOptions options;
  options.numa_node = 4711;
  options.must_bind = false;
  HostRegion region(4096, options);
  EXPECT_EQ(region.bytes(), 4096u);
  EXPECT_THAT(region.binding_shortfall(), AllOf(HasSubstr("NUMA node 4711"), HasSubstr("no")));
  region.resize(1 << 20, options);
  EXPECT_THAT(region.binding_shortfall(), HasSubstr("NUMA node 4711"));
  region.resize(2 << 20, {});
  EXPECT_EQ(region.binding_shortfall(), "");
}

TEST(HostRegion, IsBoundToTheNodeGiven) {
  if (numa_available() < 0) GTEST_SKIP() << "this system has no NUMA support";
  HostRegionOptions options;
  options.numa_node = 0;
  const HostRegion region(std::size_t{4} << 20, options);
  EXPECT_EQ(region.binding_shortfall(), "");
  void* page = static_cast<std::byte*>(region.data()) + page_size();
  int node = -1;
  ASSERT_EQ(numa_move_pages(0, 1, &page, nullptr, &node, 0), 0);
  EXPECT_EQ(node, 0);
}

}  // namespace
}  // namespace layerstream

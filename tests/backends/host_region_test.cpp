#include "backends/host_region.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <numa.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
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

TEST(HostRegion, IsBoundToTheNodeGiven) {
  if (numa_available() < 0) GTEST_SKIP() << "this system has no NUMA support";
  HostRegionOptions options;
  options.numa_node = 0;
  const HostRegion region(std::size_t{4} << 20, options);
  void* page = static_cast<std::byte*>(region.data()) + page_size();
  int node = -1;
  ASSERT_EQ(numa_move_pages(0, 1, &page, nullptr, &node, 0), 0);
  EXPECT_EQ(node, 0);
}

}  // namespace
}  // namespace layerstream

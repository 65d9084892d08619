#include "backends/topology/page_residency.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <vector>

#include "backends/host_region.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::size_t page_size() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(PageResidency, AsksForPagesEvenlySpreadOverTheWholeMemoryAndNoMoreThanAllowed) {
  auto* const data = reinterpret_cast<std::byte*>(page_size() * 1000);  // only its address is used
  std::vector<void*> asked;
  const auto query = [&](std::span<void*> pages, std::span<int> status) {
    asked.assign(pages.begin(), pages.end());
    std::ranges::fill(status, 0);
    return 0;
  };
  const PageResidency all = sample_residency(data + 17, 10 * page_size(), 100, query);
  EXPECT_EQ(all.sampled, 11u) << "10 pages' bytes that begin inside one lie on 11";
  EXPECT_EQ(asked.front(), data);
  EXPECT_EQ(asked.back(), data + 10 * page_size());

  sample_residency(data, 1000 * page_size(), 64, query);
  ASSERT_EQ(asked.size(), 64u);
  EXPECT_EQ(std::set(asked.begin(), asked.end()).size(), 64u);
  for (std::size_t i = 1; i < asked.size(); ++i) {
    const auto gap =
        static_cast<std::size_t>(static_cast<std::byte*>(asked[i]) - static_cast<std::byte*>(asked[i - 1])) /
        page_size();
    EXPECT_TRUE(gap == 15 || gap == 16) << gap;  // 1000 / 64 = 15.6
  }
}

TEST(PageResidency, CountsPagesByNodeAndThoseThatAreNowhere) {
  const auto query = [](std::span<void*>, std::span<int> status) {
    for (std::size_t i = 0; i < status.size(); ++i) status[i] = i % 4 == 3 ? -ENOENT : i % 4 == 2 ? 1 : 0;
    return 0;
  };
  const PageResidency residency = sample_residency(nullptr, 400 * page_size(), 100, query);
  EXPECT_TRUE(residency.known());
  EXPECT_EQ(residency.pages_by_node, (std::map<int, std::size_t>{{0, 50}, {1, 25}}));
  EXPECT_EQ(residency.absent, 25u);
  EXPECT_EQ(residency.bytes_on(0), 200 * page_size());
  EXPECT_EQ(residency.bytes_on(3), 0u);
  EXPECT_DOUBLE_EQ(residency.share_elsewhere(0), 0.25);
  EXPECT_DOUBLE_EQ(residency.share_elsewhere(1), 0.5);
  EXPECT_THAT(residency.to_text(),
              AllOf(HasSubstr("50% on node 0"), HasSubstr("25% on node 1"), HasSubstr("25% not in memory")));
}

TEST(PageResidency, ARefusedCallIsSaidWithWhatLetsIt) {
  const PageResidency residency =
      sample_residency(nullptr, 4096, 10, [](std::span<void*>, std::span<int>) { return EPERM; });
  EXPECT_FALSE(residency.known());
  EXPECT_EQ(residency.share_elsewhere(0), 0.0);
  EXPECT_THAT(residency.to_text(), AllOf(HasSubstr("move_pages"), HasSubstr("seccomp=unconfined")));
}

TEST(PageResidency, OfNothingIsNothing) {
  EXPECT_FALSE(sample_residency(nullptr, 0).known());
}

TEST(PageResidency, OfRealMemoryFollowsWhatWasTouched) {
  const std::size_t bytes = 64 * page_size();
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  ::madvise(data, bytes, MADV_NOHUGEPAGE);
  std::memset(data, 1, bytes / 2);
  const PageResidency residency = sample_residency(data, bytes);
  ::munmap(data, bytes);
  if (!residency.known()) GTEST_SKIP() << residency.to_text();
  EXPECT_EQ(residency.sampled, 64u);
  EXPECT_EQ(residency.absent, 32u);
}

TEST(PageResidency, OfAHostRegionIsWhole) {
  const HostRegion region(std::size_t{8} << 20);
  const PageResidency residency = sample_residency(region.data(), region.bytes());
  if (!residency.known()) GTEST_SKIP() << residency.to_text();
  EXPECT_EQ(residency.absent, 0u);
}

}  // namespace
}  // namespace layerstream::test

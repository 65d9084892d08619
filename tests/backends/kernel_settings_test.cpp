#include "backends/topology/kernel_settings.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "recorded_system.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> warnings_of(const RecordedSystem& system, bool shares_page_tables) {
  return kernel_warnings(read_kernel_settings(system.roots()), read_numa_topology(system.roots()),
                         shares_page_tables);
}

TEST(KernelSettings, AreRead) {
  const KernelSettings settings = read_kernel_settings(RecordedSystem("gh200").roots());
  EXPECT_EQ(settings.page_bytes, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
  EXPECT_EQ(settings.transparent_huge_pages, "madvise");
  EXPECT_EQ(settings.numa_balancing, 1);
  EXPECT_THAT(settings.to_text(), AllOf(HasSubstr("huge pages madvise"), HasSubstr("balancing 1")));
}

TEST(KernelSettings, StayUnknownWhereFilesAreMissingOrMalformedAndNothingIsWarnedOf) {
  for (const SystemRoots& roots : {FakeSystem().roots(), RecordedSystem("broken-garbage").roots()}) {
    const KernelSettings settings = read_kernel_settings(roots);
    EXPECT_EQ(settings.transparent_huge_pages, "");
    EXPECT_EQ(settings.numa_balancing, std::nullopt);
    EXPECT_THAT(settings.to_text(), HasSubstr("balancing unknown"));
    EXPECT_THAT(kernel_warnings(settings, {}, false), IsEmpty());
  }
}

TEST(KernelSettings, NumaBalancingIsWarnedOfWhereThereAreSeveralMemoryNodes) {
  EXPECT_THAT(warnings_of(RecordedSystem("gh200"), true),
              ElementsAre(AllOf(HasSubstr("2 memory nodes"), HasSubstr("page fault"),
                                HasSubstr("sysctl kernel.numa_balancing=0"))));
  EXPECT_THAT(warnings_of(RecordedSystem("x86-two-sockets"), false),
              ElementsAre(AllOf(HasSubstr("sysctl kernel.numa_balancing=0"), Not(HasSubstr("page fault")))));
  EXPECT_THAT(warnings_of(RecordedSystem("alps-four-modules"), true), IsEmpty()) << "it is off there";
  const RecordedSystem one("x86-one-socket");
  one.write("/proc/sys/kernel/numa_balancing", "1");
  EXPECT_THAT(warnings_of(one, false), IsEmpty()) << "one node: nothing to move";
}

TEST(KernelSettings, HugePagesThatAreOffAndSmallPagesOfACoherentMachineAreWarnedOf) {
  const NumaTopology topology;
  const KernelSettings settings{.page_bytes = 4096, .transparent_huge_pages = "never", .numa_balancing = 0};
  EXPECT_THAT(kernel_warnings(settings, topology, false), ElementsAre(HasSubstr("madvise >")));
  EXPECT_THAT(page_size_warning(settings, true), HasSubstr("64 KiB pages"));
  EXPECT_EQ(page_size_warning(settings, false), "");
  EXPECT_EQ(page_size_warning({.page_bytes = 65536}, true), "");
}

}  // namespace
}  // namespace layerstream::test

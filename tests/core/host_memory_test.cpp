#include "core/host_memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fake_system.hpp"

namespace layerstream {
namespace {

using test::FakeSystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kib = 1024;

HostMemory available(const FakeSystem& system) {
  return HostMemoryProbe(system.roots()).available();
}

TEST(HostMemory, IsMemAvailableWhereNoGroupLimitsIt) {
  FakeSystem system;
  system.has_meminfo("1000", "700");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/user.slice");
  system.write("/sys/fs/cgroup/user.slice/memory.max", "max");
  system.write("/sys/fs/cgroup/user.slice/memory.current", "12345");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 700 * kib);
  EXPECT_EQ(memory.bound_by, system.at("/proc/meminfo"));
  EXPECT_THAT(memory.warnings, IsEmpty());
}

struct Nested {
  const char* tightest;
  std::uint64_t expected;
};
class HostMemoryOfNestedGroups : public ::testing::TestWithParam<Nested> {};
INSTANTIATE_TEST_SUITE_P(Tightest, HostMemoryOfNestedGroups,
                         ::testing::Values(Nested{"/job", 40000}, Nested{"/job/step", 30000},
                                           Nested{"/job/step/task", 20000}));

TEST_P(HostMemoryOfNestedGroups, IsBoundByTheTightestAncestorOfVersion2) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job/step/task");
  for (const char* const group : {"/job", "/job/step", "/job/step/task"}) {
    const std::string directory = std::string("/sys/fs/cgroup") + group;
    const bool tightest = group == std::string(GetParam().tightest);
    system.write(directory + "/memory.max", tightest ? "100000" : "500000");
    system.write(directory + "/memory.current", std::to_string(100000 - GetParam().expected));
  }
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, GetParam().expected);
  EXPECT_EQ(memory.bound_by, system.at(std::string("/sys/fs/cgroup") + GetParam().tightest + "/memory.max"));
}

TEST(HostMemory, IsBoundByAnAncestorOfVersion1) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo", FakeSystem::v1_memory_mount);
  system.write("/proc/self/cgroup", "9:cpuset:/other\n4:memory:/slurm/job_7");
  system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  system.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4000000");
  system.write("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "300000");
  system.write("/sys/fs/cgroup/memory/slurm/memory.usage_in_bytes", "50000");
  system.write("/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "9223372036854771712");
  system.write("/sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", "50000");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 250000u);
  EXPECT_EQ(memory.bound_by, system.at("/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes"));
  EXPECT_THAT(memory.warnings, IsEmpty());
}

TEST(HostMemory, LooksAtBothHierarchiesOfAHybridSystem) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo",
               std::string(FakeSystem::v1_memory_mount) +
                   "\n41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw");
  system.write("/proc/self/cgroup", "4:memory:/job\n0::/job");
  system.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "200000");
  system.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "80000");
  system.write("/sys/fs/cgroup/unified/job/cgroup.procs", "1");  // no memory controller here
  EXPECT_EQ(available(system).available, 120000u);
  system.write("/sys/fs/cgroup/unified/job/memory.max", "100000");
  system.write("/sys/fs/cgroup/unified/job/memory.current", "1000");
  EXPECT_EQ(available(system).available, 99000u);
  EXPECT_THAT(available(system).warnings, IsEmpty());
}

TEST(HostMemory, FollowsAContainerThatSeesOnlyItsOwnGroup) {
  // Without a cgroup namespace: the whole path in /proc/self/cgroup, the mount shows one directory of it.
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo",
               "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory");
  system.write("/proc/self/cgroup", "4:memory:/docker/abc");
  system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "200000");
  system.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "150000");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 50000u);
  EXPECT_THAT(memory.warnings, IsEmpty());
}

TEST(HostMemory, DoesNotCountInactiveFileCacheAsUsed) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/job/memory.max", "100000");
  system.write("/sys/fs/cgroup/job/memory.current", "95000");
  system.write("/sys/fs/cgroup/job/memory.stat",
               "anon 5000\nfile 90000\ninactive_file 80000\nactive_file 10000");
  EXPECT_EQ(available(system).available, 85000u);
}

TEST(HostMemory, IsZeroWhereUsageIsAboveTheLimit) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/job/memory.max", "100000");
  system.write("/sys/fs/cgroup/job/memory.current", "100001");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 0u);
  EXPECT_EQ(memory.bound_by, system.at("/sys/fs/cgroup/job/memory.max"));
}

TEST(HostMemory, TakesALimitOfUnknownUsageAsUsedByAllThatIsInUse) {
  FakeSystem system;
  system.has_meminfo("1000", "900");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/job/memory.max", std::to_string(300 * kib));
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 200 * kib);
  EXPECT_THAT(memory.warnings, ElementsAre(HasSubstr("memory.current")));
}

TEST(HostMemory, IgnoresALimitThatIsNoNumberAndSaysSo) {
  FakeSystem system;
  system.has_meminfo("1000", "900");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/job/memory.max", "lots");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 900 * kib);
  EXPECT_THAT(memory.warnings, ElementsAre(HasSubstr("'lots'")));
}

TEST(HostMemory, UsesTheAncestorsOfAGroupThatIsGone) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job/gone");
  system.write("/sys/fs/cgroup/job/memory.max", "100000");
  system.write("/sys/fs/cgroup/job/memory.current", "0");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 100000u);
  EXPECT_THAT(memory.warnings, ElementsAre(HasSubstr("/job/gone")));
}

TEST(HostMemory, FindsTheUsualMountsWithoutMountinfo) {
  FakeSystem system;
  system.has_meminfo("1000000", "900000");
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/cgroup.controllers", "cpu memory");
  system.write("/sys/fs/cgroup/job/memory.max", "100000");
  system.write("/sys/fs/cgroup/job/memory.current", "10");
  EXPECT_EQ(available(system).available, 99990u);
}

TEST(HostMemory, WarnsWhereNoHierarchyIsFound) {
  FakeSystem system;
  system.has_meminfo("1000", "900");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 900 * kib);
  EXPECT_THAT(memory.warnings, ElementsAre(HasSubstr("no control group hierarchy")));
}

TEST(HostMemory, UsesMemFreeOfAKernelWithoutMemAvailable) {
  FakeSystem system;
  system.write("/proc/meminfo", "MemTotal: 1000 kB\nMemFree: 400 kB");
  system.write("/sys/fs/cgroup/cgroup.controllers", "");
  system.write("/proc/self/cgroup", "0::/");
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 400 * kib);
  EXPECT_THAT(memory.warnings, ElementsAre(HasSubstr("MemFree")));
}

TEST(HostMemory, IsZeroWhereNothingIsKnownAndNamesTheRemedy) {
  const FakeSystem system;
  const HostMemory memory = available(system);
  EXPECT_EQ(memory.available, 0u);
  EXPECT_EQ(memory.bound_by, system.at("/proc/meminfo"));
  ASSERT_FALSE(memory.warnings.empty());
  EXPECT_THAT(memory.warnings.front(), HasSubstr("host_memory_limit"));
}

TEST(HostMemory, OfANodeIsBoundByWhatIsFreeThere) {
  FakeSystem system;
  system.has_meminfo("1000", "900");
  system.write("/proc/self/cgroup", "0::/");
  system.write("/sys/fs/cgroup/cgroup.controllers", "");
  system.write("/sys/devices/system/node/node1/meminfo",
               "Node 1 MemTotal:  500 kB\nNode 1 MemFree:   200 kB\nNode 1 Inactive(file):   30 kB");
  const HostMemoryProbe probe(system.roots());
  EXPECT_EQ(probe.available_on_node(1).available, 230 * kib);
  EXPECT_EQ(probe.available_on_node(1).bound_by, system.at("/sys/devices/system/node/node1/meminfo"));
  EXPECT_EQ(probe.available_on_node(2).available, 900 * kib);
  EXPECT_THAT(probe.available_on_node(2).warnings, ElementsAre(HasSubstr("node2")));
}

TEST(HostMemory, OfThisMachineIsSomethingAndNamesItsSource) {
  const HostMemory memory = HostMemoryProbe().available();
  EXPECT_GT(memory.available, 0u);
  EXPECT_TRUE(std::filesystem::exists(memory.bound_by)) << memory.bound_by;
}

}  // namespace
}  // namespace layerstream

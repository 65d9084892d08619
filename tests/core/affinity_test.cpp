#include "core/affinity.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fake_system.hpp"

namespace layerstream {
namespace {

using test::FakeSystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

CpuAllowance allowance_of(std::vector<int> cpus, int online, std::optional<double> quota = {}) {
  CpuAllowance allowance;
  allowance.cpus = std::move(cpus);
  allowance.online = online;
  allowance.quota = quota;
  allowance.quota_file = quota ? "/sys/fs/cgroup/job/cpu.max" : "";
  return allowance;
}

void has_cpus(const FakeSystem& system, const std::string& allowed, const std::string& online) {
  system.write("/proc/self/status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t" + allowed);
  system.write("/sys/devices/system/cpu/online", online);
}

TEST(CpuList, IsParsedAndFormatted) {
  EXPECT_EQ(parse_cpu_list("0-2,5,7-8"), (std::vector<int>{0, 1, 2, 5, 7, 8}));
  EXPECT_EQ(format_cpu_list({0, 1, 2, 5, 7, 8}), "0-2,5,7-8");
  for (const char* const malformed : {"", "x", "3-1", "-1", "0-", "1,,2", "0-99999999"}) {
    EXPECT_FALSE(parse_cpu_list(malformed)) << malformed;
  }
}

TEST(CpuAllowance, IsTheMaskWhereNoGroupHasAQuota) {
  FakeSystem system;
  has_cpus(system, "4-7", "0-15");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/sys/fs/cgroup/job/cpu.max", "max 100000");
  const CpuAllowance allowance = probe_cpus(system.roots());
  EXPECT_THAT(allowance.cpus, ElementsAre(4, 5, 6, 7));
  EXPECT_EQ(allowance.online, 16);
  EXPECT_FALSE(allowance.quota);
  EXPECT_EQ(allowance.usable(), 4);
  EXPECT_THAT(allowance.warnings, IsEmpty());
}

TEST(CpuAllowance, TakesTheSmallestQuotaOfAllAncestorsOfVersion2) {
  FakeSystem system;
  has_cpus(system, "0-15", "0-15");
  system.write("/proc/self/mountinfo", FakeSystem::v2_mount);
  system.write("/proc/self/cgroup", "0::/job/step");
  system.write("/sys/fs/cgroup/job/cpu.max", "250000 100000");
  system.write("/sys/fs/cgroup/job/step/cpu.max", "800000 100000");
  const CpuAllowance allowance = probe_cpus(system.roots());
  EXPECT_DOUBLE_EQ(allowance.quota.value(), 2.5);
  EXPECT_EQ(allowance.quota_file, system.at("/sys/fs/cgroup/job/cpu.max"));
  EXPECT_EQ(allowance.usable(), 3);
}

TEST(CpuAllowance, ReadsQuotasOfVersion1) {
  FakeSystem system;
  has_cpus(system, "0-15", "0-15");
  system.write("/proc/self/mountinfo", FakeSystem::v1_cpu_mount);
  system.write("/proc/self/cgroup", "3:cpu,cpuacct:/job");
  system.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1");
  system.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000");
  system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000");
  system.write("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  const CpuAllowance allowance = probe_cpus(system.roots());
  EXPECT_DOUBLE_EQ(allowance.quota.value(), 0.5);
  EXPECT_EQ(allowance.usable(), 1);
}

TEST(CpuAllowance, IsOneCpuAndAWarningWhereNothingIsKnown) {
  const FakeSystem system;
  const CpuAllowance allowance = probe_cpus(system.roots());
  EXPECT_EQ(allowance.usable(), 1);
  ASSERT_FALSE(allowance.warnings.empty());
  EXPECT_THAT(allowance.warnings.front(), HasSubstr("optimizer_threads"));
}

TEST(CpuAllowance, OfThisMachineIsNotEmpty) {
  const CpuAllowance allowance = probe_cpus();
  EXPECT_GE(allowance.usable(), 1);
  EXPECT_GE(allowance.online, static_cast<int>(allowance.cpus.size()));
}

TEST(ThreadWarnings, AreNoneWhereAllCpusAreUsable) {
  EXPECT_THAT(thread_warnings(allowance_of({0, 1, 2, 3}, 4), {}), IsEmpty());
  EXPECT_THAT(thread_warnings(allowance_of({0, 1, 2, 3}, 4), {"4", "false", {}}), IsEmpty());
  EXPECT_THAT(thread_warnings(allowance_of({0}, 1), {"1", "true", "cores"}), IsEmpty());
}

TEST(ThreadWarnings, NameAnAffinityMaskSmallerThanTheMachine) {
  EXPECT_THAT(
      thread_warnings(allowance_of({2, 3}, 72), {}),
      ElementsAre(AllOf(HasSubstr("2 of 72 CPUs"), HasSubstr("(2-3)"), HasSubstr("--cpus-per-task"))));
}

TEST(ThreadWarnings, NameAQuotaSmallerThanTheMask) {
  EXPECT_THAT(thread_warnings(allowance_of({0, 1, 2, 3}, 4, 1.5), {}),
              ElementsAre(AllOf(HasSubstr("cpu.max"), HasSubstr("1.50 CPUs"), HasSubstr("2 host threads"))));
}

TEST(ThreadWarnings, NameOneOpenMpThread) {
  for (const char* const one : {"1", "1,4"}) {
    EXPECT_THAT(thread_warnings(allowance_of({0, 1, 2, 3}, 4), {one, {}, {}}),
                ElementsAre(AllOf(HasSubstr("OMP_NUM_THREADS=1"), HasSubstr("set it to 4"))));
  }
}

TEST(ThreadWarnings, NameMoreOpenMpThreadsThanCpus) {
  EXPECT_THAT(thread_warnings(allowance_of({0, 1}, 2), {"16", {}, {}}),
              ElementsAre(HasSubstr("only 2 CPUs")));
}

TEST(ThreadWarnings, NameAThreadCountThatIsNone) {
  for (const char* const none : {"", "all", "0", "-2"}) {
    EXPECT_THAT(thread_warnings(allowance_of({0, 1}, 2), {none, {}, {}}),
                ElementsAre(HasSubstr("not a number")));
  }
}

TEST(ThreadWarnings, NameABindingThatPinnedTheMainThread) {
  const CpuAllowance pinned = allowance_of({5}, 16);
  EXPECT_THAT(thread_warnings(pinned, {{}, "close", {}}), ElementsAre(HasSubstr("OMP_PROC_BIND=false")));
  EXPECT_THAT(thread_warnings(pinned, {{}, {}, "cores"}), ElementsAre(HasSubstr("OMP_PROC_BIND=false")));
  EXPECT_THAT(thread_warnings(pinned, {{}, "FALSE", "cores"}), ElementsAre(HasSubstr("affinity mask")));
}

TEST(ThreadWarnings, RepeatWhatCouldNotBeRead) {
  CpuAllowance allowance = allowance_of({0}, 1);
  allowance.warnings = {"/proc/self/status does not list the allowed CPUs"};
  EXPECT_THAT(thread_warnings(allowance, {}), Each(HasSubstr("/proc/self/status")));
}

}  // namespace
}  // namespace layerstream

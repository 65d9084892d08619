// What the doctor says of recorded machines (tests/backends/fixtures) with devices as they would be there.

#include "doctor/checks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "backends/pinned_range.hpp"
#include "doctor/residency.hpp"
#include "doctor/scratch_file.hpp"
#include "tests/backends/forwarding_device.hpp"
#include "tests/backends/recorded_system.hpp"

namespace layerstream::doctor {
namespace {

using test::ForwardingDevice;
using test::RecordedSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::size_t mebibyte = std::size_t{1} << 20;

/// A GPU by what it says of itself; copies are the simulated device's.
class NamedGpu final : public ForwardingDevice {
 public:
  NamedGpu(std::string name, DeviceCapabilities capabilities)
      : ForwardingDevice(std::size_t{64} * mebibyte),
        name_(std::move(name)),
        capabilities_(std::move(capabilities)) {}
  std::string description() const override { return name_; }
  bool uses_host_memory() const override { return false; }
  std::size_t total_memory() const override { return 100 * mebibyte; }
  std::size_t used_bytes() const override { return 5 * mebibyte; }
  DeviceCapabilities capabilities() const override { return capabilities_; }

 private:
  std::string name_;
  DeviceCapabilities capabilities_;
};

NamedGpu gh200_gpu(bool with_ats = true, int node = 0) {
  return {"NVIDIA GH200 480GB (sm_90), 95 GiB of 96 GiB",
          {.shares_host_page_tables = with_ats,
           .pageable_memory_access = with_ats,
           .direct_managed_access_from_host = with_ats,
           .numa_node = node,
           .host_numa_id = node,
           .pci_bus_id = "00" + std::to_string(node) + "9:01:00.0"}};
}

NamedGpu h200_gpu() {
  return {"NVIDIA H200 (sm_90), 139 GiB of 140 GiB",
          {.numa_node = 1, .host_numa_id = 1, .pci_bus_id = "0000:99:00.0"}};
}

class DoctorTest : public ::testing::Test {
 protected:
  /// One check by its name.
  Finding found(const std::string& name, Device* device, const test::FakeSystem& system,
                std::optional<HostNode> node = {}) {
    const NumaTopology topology = read_numa_topology(system.roots());
    const HostNode chosen =
        choose_host_node(topology, "auto", device == nullptr ? DeviceCapabilities{} : device->capabilities());
    const Patient patient{.device = device,
                          .pool = pool_,
                          .roots = system.roots(),
                          .topology = topology,
                          .host_node = node.value_or(chosen),
                          .bytes = 8 * mebibyte,
                          .file_bytes = 8 * mebibyte,
                          .scratch = std::filesystem::temp_directory_path()};
    for (const Check& check : all_checks()) {
      if (check.name == name) return run_checks({check}, patient).front().finding;
    }
    ADD_FAILURE() << "no check is called " << name;
    return {};
  }

  WorkerPool pool_{2};
};

// --- how checks are run ---

TEST_F(DoctorTest, OutcomesSayNameVerdictWhatWasFoundExpectedAndWhatToDo) {
  const Patient patient{.pool = pool_};
  std::vector<std::string> told;
  const std::vector<Outcome> outcomes = run_checks(
      {{.name = "a", .run = [](const Patient&) { return Finding{.found = "1", .expected = "1"}; }},
       {.name = "b",
        .run =
            [](const Patient&) {
              return Finding{.verdict = Verdict::warn, .found = "2", .expected = "1", .remedy = "less"};
            }},
       {.name = "c", .run = [](const Patient&) -> Finding { throw std::runtime_error("broken"); }},
       {.name = "d", .needs_device = true, .run = [](const Patient&) { return Finding{}; }}},
      patient, [&](const Outcome& outcome) { told.push_back(outcome.name); });
  EXPECT_THAT(told, ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(outcomes[1].to_text(), "b: warn\n  found     2\n  expected  1\n  remedy    less\n");
  EXPECT_THAT(outcomes[2].to_text(), AllOf(HasSubstr("c: FAIL"), HasSubstr("broken"), HasSubstr("remedy")));
  EXPECT_THAT(outcomes[3].to_text(), AllOf(HasSubstr("not applicable"), HasSubstr("no device")));
  EXPECT_EQ(summary(outcomes), "4 checks: 1 ok, 1 warn, 1 FAIL, 1 not applicable; FAIL: c; warn: b");
}

TEST_F(DoctorTest, EveryCheckHasANameOfItsOwn) {
  std::set<std::string> names;
  for (const Check& check : all_checks()) EXPECT_TRUE(names.insert(check.name).second) << check.name;
}

// --- memory nodes ---

TEST_F(DoctorTest, MemoryNodesOfHealthyMachinesAreFine) {
  NamedGpu gh200 = gh200_gpu();
  const Finding finding = found("memory nodes", &gh200, RecordedSystem("gh200"));
  EXPECT_EQ(finding.verdict, Verdict::ok);
  EXPECT_THAT(finding.found, AllOf(HasSubstr("CPUs 0-71"), HasSubstr("host buffers: NUMA node 0")));
  NamedGpu third = gh200_gpu(true, 2);
  EXPECT_THAT(found("memory nodes", &third, RecordedSystem("alps-four-modules")).found,
              HasSubstr("host buffers: NUMA node 2"));
  NamedGpu h200 = h200_gpu();
  EXPECT_EQ(found("memory nodes", &h200, RecordedSystem("x86-two-sockets")).verdict, Verdict::ok);
}

TEST_F(DoctorTest, MemoryNodesThatAreNotUnderstoodOrWhoseLinkIsUnknownAreWarnedOf) {
  NamedGpu h200 = h200_gpu();
  const Finding broken = found("memory nodes", &h200, RecordedSystem("broken-garbage"));
  EXPECT_EQ(broken.verdict, Verdict::warn);
  EXPECT_THAT(broken.remedy, HasSubstr("cpulist"));
  NamedGpu lost("NVIDIA H200", {});
  const Finding unknown = found("memory nodes", &lost, RecordedSystem("x86-two-sockets"));
  EXPECT_EQ(unknown.verdict, Verdict::warn);
  EXPECT_THAT(unknown.remedy, HasSubstr("set numa"));
  NamedGpu torn("NVIDIA H200", {.numa_node = 0, .host_numa_id = 1});
  EXPECT_THAT(found("memory nodes", &torn, RecordedSystem("x86-two-sockets")).remedy,
              HasSubstr("the driver says 1"));
}

TEST_F(DoctorTest, ThreadsOnOtherNodesThanTheBuffersAreWarnedOf) {
  RecordedSystem system("x86-two-sockets");
  system.write("/proc/self/status", "Cpus_allowed_list:\t0-31");
  system.write("/sys/devices/system/cpu/online", "0-127");
  NamedGpu h200 = h200_gpu();
  const Finding finding = found("host threads", &h200, system);
  EXPECT_EQ(finding.verdict, Verdict::warn);
  EXPECT_THAT(finding.remedy, HasSubstr("numactl --cpunodebind=1"));
  system.write("/proc/self/status", "Cpus_allowed_list:\t0-127");
  EXPECT_THAT(found("host threads", &h200, system).remedy, Not(HasSubstr("cpunodebind")));
}

TEST_F(DoctorTest, KernelSettingsThatCostSpeedAreWarnedOf) {
  NamedGpu gh200 = gh200_gpu();
  const Finding finding = found("kernel settings", &gh200, RecordedSystem("gh200"));
  EXPECT_EQ(finding.verdict, Verdict::warn);
  EXPECT_THAT(finding.remedy, HasSubstr("numa_balancing=0"));
  EXPECT_EQ(found("kernel settings", &gh200, RecordedSystem("alps-four-modules")).verdict, Verdict::ok);
}

TEST_F(DoctorTest, MemoryLimitsNameTheFileThatBinds) {
  RecordedSystem system("gh200");
  system.has_meminfo("500000000", "400000000");
  system.write("/proc/self/cgroup", "0::/job");
  system.write("/proc/self/mountinfo", test::FakeSystem::v2_mount);
  system.write("/sys/fs/cgroup/job/memory.max", "1073741824");
  system.write("/sys/fs/cgroup/job/memory.current", "0");
  NamedGpu gh200 = gh200_gpu();
  const Finding finding = found("memory limits", &gh200, system);
  EXPECT_THAT(finding.found,
              AllOf(HasSubstr("1.00 GiB available"), HasSubstr("job/memory.max"), HasSubstr("NUMA node 0")));
}

// --- device ---

TEST_F(DoctorTest, AGraceModuleWithoutSharedPageTablesFailsWithWhereToLook) {
  NamedGpu healthy = gh200_gpu();
  NamedGpu broken = gh200_gpu(false);
  const RecordedSystem system("gh200");
  EXPECT_EQ(found("device", &healthy, system).verdict, Verdict::ok);
  const Finding finding = found("device", &broken, system);
  EXPECT_EQ(finding.verdict, Verdict::fail);
  EXPECT_THAT(finding.remedy, HasSubstr("Addressing Mode: ATS"));
  NamedGpu h200 = h200_gpu();
  EXPECT_EQ(found("device", &h200, system).verdict, Verdict::ok) << "a card on PCIe";
  NamedGpu contradicting("NVIDIA GH200", {.shares_host_page_tables = true});
  EXPECT_EQ(found("device", &contradicting, system).verdict, Verdict::fail);
}

TEST_F(DoctorTest, TheBackendIsSaidWithItsReason) {
  NamedGpu gh200 = gh200_gpu();
  EXPECT_THAT(found("backend", &gh200, RecordedSystem("gh200")).found,
              HasSubstr("coherent: the device shares"));
  NamedGpu h200 = h200_gpu();
  EXPECT_THAT(found("backend", &h200, RecordedSystem("gh200")).found, HasSubstr("explicit: "));
}

TEST_F(DoctorTest, ANarrowLinkIsWarnedOfButNotOnAModuleWhoseDataGoElsewhere) {
  RecordedSystem system("x86-two-sockets");
  NamedGpu h200 = h200_gpu();
  EXPECT_EQ(found("link", &h200, system).verdict, Verdict::ok);
  EXPECT_THAT(found("link", &h200, system).found, HasSubstr("PCIe 5.0 x16 at 0000:99:00.0"));
  system.write("/sys/bus/pci/devices/0000:99:00.0/current_link_width", "4");
  EXPECT_EQ(found("link", &h200, system).verdict, Verdict::warn);
  NamedGpu gh200 = gh200_gpu();
  const Finding module = found("link", &gh200, RecordedSystem("gh200"));
  EXPECT_EQ(module.verdict, Verdict::ok);
  EXPECT_THAT(module.found, HasSubstr("NVLink-C2C"));
}

TEST_F(DoctorTest, DeviceMemoryIsJudgedByWhatIsFree) {
  NamedGpu gh200 = gh200_gpu();
  const Finding finding = found("device memory", &gh200, RecordedSystem("gh200"));
  EXPECT_EQ(finding.verdict, Verdict::ok);
  EXPECT_THAT(finding.found, HasSubstr("95.00 MiB of 100.00 MiB free (95%)"));
}

// --- copies ---

TEST_F(DoctorTest, CopiesFarBelowTheLinksRateAreWarnedOf) {
  // A memcpy of this machine is far from NVLink-C2C's 300 GB/s.
  NamedGpu gh200 = gh200_gpu();
  const HostNode unbound;
  for (const char* const check : {"copies of registered memory", "copies of plain memory"}) {
    const Finding finding = found(check, &gh200, RecordedSystem("gh200"), unbound);
    EXPECT_EQ(finding.verdict, Verdict::warn) << check;
    EXPECT_THAT(finding.expected, HasSubstr("at least 300 and 240 GB/s"));
    EXPECT_THAT(finding.remedy, Not(IsEmpty()));
  }
  ForwardingDevice simulated(64 * mebibyte);
  EXPECT_EQ(found("copies of registered memory", &simulated, RecordedSystem("gh200"), unbound).verdict,
            Verdict::ok)
      << "nothing is expected of a simulated device";
}

TEST_F(DoctorTest, CopiesThatHoldTheirThreadAreWarnedOfOnASharedMemoryDevice) {
  NamedGpu gh200 = gh200_gpu();  // the calls of its link copy before they return
  const HostNode unbound;
  const Finding finding =
      found("asynchrony of copies of plain memory", &gh200, RecordedSystem("gh200"), unbound);
  EXPECT_EQ(finding.verdict, Verdict::warn);
  EXPECT_THAT(finding.remedy, HasSubstr("pin_memory: required"));
  NamedGpu h200 = h200_gpu();
  EXPECT_EQ(found("asynchrony of copies of plain memory", &h200, RecordedSystem("gh200"), unbound).verdict,
            Verdict::not_applicable);
}

TEST_F(DoctorTest, MemoryThatCannotBeBoundIsSaid) {
  ForwardingDevice device(64 * mebibyte);
  const HostNode absent{.node = 4711, .reason = "a test"};
  for (const char* const check : {"residency of host memory", "residency of memory that kernels use"}) {
    const Finding finding = found(check, &device, RecordedSystem("gh200"), absent);
    EXPECT_EQ(finding.verdict, Verdict::warn) << check;
    EXPECT_THAT(finding.remedy, HasSubstr("4711")) << check;
  }
}

// --- residency ---

PageResidency pages_on(int node, std::size_t elsewhere = 0) {
  return {
      .bytes = 4096 * 100, .sampled = 100, .pages_by_node = {{node, 100 - elsewhere}, {node + 1, elsewhere}}};
}

TEST(JudgeResidency, BoundPagesThatStayAreFine) {
  const Finding finding =
      judge_residency({.before = pages_on(0), .after = pages_on(0, 1), .use = "2 copies", .node = 0});
  EXPECT_EQ(finding.verdict, Verdict::ok) << "1% is tolerated";
  EXPECT_THAT(finding.found, HasSubstr("after 2 copies: "));
  EXPECT_EQ(judge_residency({.before = pages_on(0), .after = pages_on(1), .use = "", .node = {}}).verdict,
            Verdict::ok)
      << "nothing is expected of memory that is not to be bound";
}

TEST(JudgeResidency, PagesThatMoveAndPagesThatNeverWereThereFailForDifferentReasons) {
  const Finding moved = judge_residency({.before = pages_on(0),
                                         .after = pages_on(0, 2),
                                         .use = "",
                                         .node = 0,
                                         .remedy_for_moved = "hold them"});
  EXPECT_EQ(moved.verdict, Verdict::fail);
  EXPECT_EQ(moved.remedy, "hold them");
  const Finding astray = judge_residency(
      {.before = pages_on(1), .after = pages_on(1), .use = "", .node = 0, .remedy_for_moved = "hold them"});
  EXPECT_EQ(astray.verdict, Verdict::fail);
  EXPECT_THAT(astray.remedy, HasSubstr("memory policy"));
}

TEST(JudgeResidency, WhereBindingWasRefusedPagesMayLieAnywhere) {
  const Finding finding = judge_residency(
      {.before = pages_on(1), .after = pages_on(2), .use = "", .node = 0, .shortfall = "mbind refused"});
  EXPECT_EQ(finding.verdict, Verdict::warn);
  EXPECT_THAT(finding.remedy, AllOf(HasSubstr("mbind refused"), HasSubstr("SYS_NICE")));
}

TEST(JudgeResidency, WherePagesCannotBeAskedForThatIsAWarningOnlyIfTheyWereToBeBound) {
  const PageResidency unknown{.unavailable = "move_pages refused"};
  const Finding finding = judge_residency({.before = unknown, .after = pages_on(1), .use = "", .node = 0});
  EXPECT_EQ(finding.verdict, Verdict::warn);
  EXPECT_EQ(finding.found, "move_pages refused");
  EXPECT_THAT(finding.remedy, HasSubstr("seccomp"));
  EXPECT_EQ(judge_residency({.before = pages_on(0), .after = unknown, .use = "", .node = {}}).verdict,
            Verdict::not_applicable);
}

// --- kernels ---

/// A card whose driver pins nothing, as under a small locked-memory limit.
class UnpinnableGpu final : public ForwardingDevice {
 public:
  UnpinnableGpu() : ForwardingDevice(64 * mebibyte) {}
  bool uses_host_memory() const override { return false; }
  std::unique_ptr<HostPin> pin(void* data, std::size_t bytes, bool required,
                               const std::function<void(std::size_t, std::size_t)>&) override {
    const PinCalls calls{.pin = [](void*, std::size_t) { return std::string("no more"); },
                         .unpin = [](void*) {}};
    return std::make_unique<PinnedRange>(data, bytes, calls, PinnedRange::Options{.required = required});
  }
};

TEST_F(DoctorTest, WhereMemoryCannotBePinnedForKernelsNothingIsWrongWithTheMachine) {
  UnpinnableGpu device;
  for (const char* const check :
       {"kernels on host memory", "update in place", "residency of memory that kernels use", "promotion"}) {
    const Finding finding = found(check, &device, RecordedSystem("x86-one-socket"));
    EXPECT_EQ(finding.verdict, Verdict::not_applicable) << check;
    EXPECT_THAT(finding.found, HasSubstr("no more")) << check;
    EXPECT_THAT(finding.remedy, AllOf(HasSubstr("emulated coherent backend only"), HasSubstr("ulimit -l")));
  }
}

TEST_F(DoctorTest, EveryWarningAndFailureSaysWhatToDo) {
  // Binding, pinning and the scratch directory fail; memory nodes are not understood; no link is known.
  const RecordedSystem system("broken-garbage");
  UnpinnableGpu device;
  NamedGpu gh200 = gh200_gpu(false);
  for (Device* const examined : {static_cast<Device*>(&device), static_cast<Device*>(&gh200)}) {
    for (const bool required : {false, true}) {
      const Patient patient{.device = examined,
                            .pool = pool_,
                            .roots = system.roots(),
                            .topology = read_numa_topology(system.roots()),
                            .host_node = {.node = 4711, .required = required, .reason = "a test"},
                            .bytes = mebibyte,
                            .file_bytes = mebibyte,
                            .scratch = "/nowhere/at/all"};
      const std::vector<Outcome> outcomes = run_checks(all_checks(), patient);
      EXPECT_GE(count(outcomes, Verdict::warn) + count(outcomes, Verdict::fail), 4);
      for (const Outcome& outcome : outcomes) {
        if (outcome.finding.verdict != Verdict::warn && outcome.finding.verdict != Verdict::fail) continue;
        EXPECT_THAT(outcome.finding.remedy, Not(IsEmpty())) << outcome.to_text();
      }
    }
  }
}

TEST_F(DoctorTest, WhatOurReaderReadsLeavesThePageCache) {
  const Finding finding = found("file cache", nullptr, RecordedSystem("gh200"));
  if (finding.verdict == Verdict::not_applicable) GTEST_SKIP() << finding.found;
  EXPECT_EQ(finding.verdict, Verdict::ok) << finding.found;
}

TEST(ScratchFile, IsOfItsSizeAndGoneAfterwards) {
  std::filesystem::path path;
  {
    const ScratchFile file(std::filesystem::temp_directory_path(), 5 * mebibyte + 3);
    path = file.path();
    EXPECT_EQ(std::filesystem::file_size(path), 5 * mebibyte + 3);
    EXPECT_LE(file.share_in_page_cache(), 1.0);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace layerstream::doctor

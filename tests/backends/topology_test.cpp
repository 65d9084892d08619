// Which memory node host buffers go to, on recorded machines: see fixtures/README.md.

#include "backends/topology/numa_topology.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/topology/host_node.hpp"
#include "backends/topology/recording.hpp"
#include "core/error.hpp"
#include "recorded_system.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

NumaTopology topology_of(const std::string& machine) {
  return read_numa_topology(RecordedSystem(machine).roots());
}

/// A device on PCIe, or one that shares the host's page tables.
DeviceCapabilities device_at(std::optional<int> link_node, bool shares_page_tables = false) {
  return {.shares_host_page_tables = shares_page_tables, .numa_node = link_node};
}

HostNode chosen(const std::string& machine, std::optional<int> link_node,
                const std::string& setting = "auto") {
  const bool shares_page_tables = !machine.starts_with("x86");
  return choose_host_node(topology_of(machine), setting, device_at(link_node, shares_page_tables));
}

std::string refusal(const std::string& machine, const std::string& setting) {
  return message_of<ConfigError>([&] { chosen(machine, 0, setting); });
}

// --- reading ---

TEST(NumaTopology, IsReadFromATreeWithNodesThatHaveNoCpusAndNoMemory) {
  const NumaTopology gh200 = topology_of("gh200");
  EXPECT_TRUE(gh200.complete);
  EXPECT_THAT(gh200.warnings, IsEmpty());
  ASSERT_THAT(gh200.nodes, SizeIs(9));
  EXPECT_THAT(gh200.nodes[0].cpus, SizeIs(72));
  EXPECT_EQ(gh200.nodes[0].memory_bytes, std::uint64_t{490310} << 20);
  EXPECT_THAT(gh200.nodes[1].cpus, IsEmpty());
  EXPECT_EQ(gh200.nodes[1].memory_bytes, std::uint64_t{97280} << 20);
  EXPECT_FALSE(gh200.nodes[8].has_memory());
  EXPECT_EQ(gh200.nodes[1].distance_to.at(0), 80);
  EXPECT_EQ(gh200.nodes[1].distance_to.at(8), 255);
  EXPECT_EQ(gh200.num_with_memory(), 2);
  EXPECT_THAT(gh200.to_text(),
              AllOf(HasSubstr("node 0: CPUs 0-71, 478"), HasSubstr("node 1: no CPUs, 95.00 GiB"),
                    HasSubstr("7 without CPUs or memory")));
}

TEST(NumaTopology, NodeNumbersMayHaveGapsAndDistancesFollowTheNodesThatAreOnline) {
  FakeSystem system;
  system.write("/sys/devices/system/node/online", "0,2,5");
  for (const int node : {0, 2, 5}) {
    const std::string place = "/sys/devices/system/node/node" + std::to_string(node);
    system.write(place + "/cpulist", std::to_string(node));
    system.write(place + "/meminfo", "Node 0 MemTotal: 1024 kB");
    system.write(place + "/distance", node == 5 ? "31 21 10" : "10 21 31");
  }
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_THAT(topology.warnings, IsEmpty());
  ASSERT_NE(topology.find(5), nullptr);
  EXPECT_EQ(topology.find(5)->distance_to.at(2), 21);
  EXPECT_EQ(topology.find(1), nullptr);
}

TEST(NumaTopology, AKernelWithoutTheFolderHasOneNodeAndNothingToWarnOf) {
  const FakeSystem system;
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_TRUE(topology.complete);
  EXPECT_THAT(topology.nodes, IsEmpty());
  EXPECT_THAT(topology.warnings, IsEmpty());
  EXPECT_THAT(topology.to_text(), HasSubstr("one memory node"));
}

TEST(NumaTopology, AFolderWithoutItsListOfNodesIsUnknownAndSaysSo) {
  FakeSystem system;
  system.write("/sys/devices/system/node/node0/cpulist", "0");
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_FALSE(topology.complete);
  EXPECT_THAT(topology.nodes, IsEmpty());
  EXPECT_THAT(topology.warnings, ElementsAre(HasSubstr("node/online cannot be read")));
  EXPECT_EQ(topology.to_text(), "no memory nodes known");
}

TEST(NumaTopology, WhatIsMissingOrMalformedIsNamedAndMakesItIncomplete) {
  const NumaTopology missing = topology_of("broken-missing-cpulist");
  EXPECT_FALSE(missing.complete);
  EXPECT_THAT(missing.warnings, ElementsAre(HasSubstr("node1/cpulist is missing or malformed")));
  const NumaTopology garbage = topology_of("broken-garbage");
  EXPECT_FALSE(garbage.complete);
  EXPECT_THAT(garbage.warnings, ElementsAre(HasSubstr("node1/cpulist"), HasSubstr("node1/meminfo"),
                                            HasSubstr("node1/distance")));
  FakeSystem system;
  system.write("/sys/devices/system/node/online", "zero");
  EXPECT_THAT(read_numa_topology(system.roots()).warnings, ElementsAre(HasSubstr("says 'zero'")));
}

TEST(NumaTopology, OfThisMachineIsReadWithoutWarnings) {
  const NumaTopology topology = read_numa_topology();
  if (topology.nodes.empty()) GTEST_SKIP() << "this system lists no memory nodes";
  EXPECT_TRUE(topology.complete) << topology.to_text();
  EXPECT_GE(topology.num_with_memory(), 1);
}

// --- auto ---

TEST(HostNode, OneSocketHasNoChoiceToMake) {
  for (const std::optional<int> link : {std::optional<int>(), std::optional<int>(0)}) {
    const HostNode node = chosen("x86-one-socket", link);
    EXPECT_EQ(node.node, std::nullopt);
    EXPECT_THAT(node.reason, HasSubstr("no choice"));
    EXPECT_THAT(node.warnings, IsEmpty());
  }
}

TEST(HostNode, OfTwoSocketsTheOneThatTheLinkEndsAt) {
  for (const int link : {0, 1}) {
    const HostNode node = chosen("x86-two-sockets", link);
    EXPECT_EQ(node.node, link);
    EXPECT_FALSE(node.required);
    EXPECT_THAT(node.reason, HasSubstr("link ends at it"));
  }
}

TEST(HostNode, OfTwoSocketsNoneWhereTheLinksNodeIsUnknownOrNotThere) {
  EXPECT_EQ(chosen("x86-two-sockets", {}).node, std::nullopt);
  EXPECT_THAT(chosen("x86-two-sockets", {}).reason, HasSubstr("not known"));
  const HostNode absent = chosen("x86-two-sockets", 7);
  EXPECT_EQ(absent.node, std::nullopt);
  EXPECT_THAT(absent.warnings, ElementsAre(HasSubstr("NUMA node 7")));
}

TEST(HostNode, OnGraceHopperAlwaysTheCpusOwnSoThatNothingLandsInTheGpusMemory) {
  for (const std::optional<int> link : {std::optional<int>(), std::optional<int>(0), std::optional<int>(1)}) {
    const HostNode node = chosen("gh200", link);
    EXPECT_EQ(node.node, 0);
    EXPECT_THAT(node.reason, HasSubstr("alone has CPUs"));
  }
}

TEST(HostNode, OnGraceHopperWhoseGpuMemoryIsNoNodeThereIsNoChoiceToMake) {
  EXPECT_EQ(chosen("gh200-cdmm", 0).node, std::nullopt);
  EXPECT_THAT(chosen("gh200-cdmm", 0).reason, HasSubstr("no choice"));
}

TEST(HostNode, OfTwoModulesTheOneOfTheGpuWhicheverNodeItIsSaidToBeAt) {
  EXPECT_EQ(chosen("gh200-two-modules", 0).node, 0);
  EXPECT_EQ(chosen("gh200-two-modules", 1).node, 1) << "node 1 is the second Grace, not a GPU";
  EXPECT_EQ(chosen("gh200-two-modules", 2).node, 0);
  EXPECT_EQ(chosen("gh200-two-modules", 10).node, 1);
}

TEST(HostNode, OfFourModulesTheOneOfEachGpu) {
  for (int module = 0; module < 4; ++module) {
    EXPECT_EQ(chosen("alps-four-modules", module).node, module);
    const HostNode node = chosen("alps-four-modules", 4 + 8 * module);
    EXPECT_EQ(node.node, module);
    EXPECT_THAT(node.reason, AllOf(HasSubstr("nearest with CPUs"), HasSubstr("device's own memory")));
    EXPECT_EQ(chosen("alps-four-modules", 4 + 8 * module + 3).node, module) << "of a MIG instance";
  }
  EXPECT_EQ(chosen("alps-four-modules", {}).node, std::nullopt) << "four candidates and no link";
}

TEST(HostNode, NoneOnAMachineThatIsNotUnderstood) {
  for (const char* const machine : {"broken-missing-cpulist", "broken-garbage"}) {
    const HostNode node = chosen(machine, 1);
    EXPECT_EQ(node.node, std::nullopt) << machine;
    EXPECT_THAT(node.reason, HasSubstr("not all memory nodes are known"));
    EXPECT_THAT(node.warnings, Not(IsEmpty()));
  }
  FakeSystem system;
  system.write("/sys/devices/system/node/online", "zero");
  const HostNode unknown = choose_host_node(read_numa_topology(system.roots()), "auto", device_at(0));
  EXPECT_EQ(unknown.node, std::nullopt);
  EXPECT_THAT(unknown.reason, HasSubstr("not known"));
  EXPECT_THAT(unknown.warnings, SizeIs(1));
}

TEST(HostNode, AKernelThatListsNoNodesLeavesNoChoiceToMake) {
  const FakeSystem system;
  const HostNode node = choose_host_node(read_numa_topology(system.roots()), "auto", device_at(0));
  EXPECT_EQ(node.node, std::nullopt);
  EXPECT_THAT(node.reason, HasSubstr("no choice"));
  EXPECT_THAT(node.warnings, IsEmpty());
}

/// One socket whose second node is memory without CPUs: CXL, or a processor's HBM in flat mode.
TEST(HostNode, MemoryWithoutCpusBesideADeviceOnPcieIsTheHostsOwnAndTheChoiceTheUsers) {
  RecordedSystem system("x86-one-socket");
  system.write("/sys/devices/system/node/online", "0-1");
  system.write("/sys/devices/system/node/node0/distance", "10 14");
  system.write("/sys/devices/system/node/node1/distance", "14 10");
  system.write("/sys/devices/system/node/node1/cpulist", "");
  system.write("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 67108864 kB");
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_THAT(topology.warnings, IsEmpty());
  for (const std::optional<int> link : {std::optional<int>(), std::optional<int>(0)}) {
    const HostNode open = choose_host_node(topology, "auto", device_at(link));
    EXPECT_EQ(open.node, std::nullopt);
    EXPECT_THAT(open.reason, AllOf(HasSubstr("CXL"), HasSubstr("set numa: 0")));
    EXPECT_EQ(choose_host_node(topology, "auto", device_at(link, true)).node, 0) << "it may be the device's";
  }
  EXPECT_EQ(choose_host_node(topology, "0", device_at({})).node, 0);
}

TEST(HostNode, NoneWhereTheNearestIsSoughtAndDistancesAreMissing) {
  RecordedSystem system("alps-four-modules");
  system.write("/sys/devices/system/node/node12/distance", "10 20");
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_TRUE(topology.complete) << "distances are not needed for every choice";
  EXPECT_EQ(choose_host_node(topology, "auto", device_at(12)).node, std::nullopt);
  EXPECT_THAT(choose_host_node(topology, "auto", device_at(12)).reason, HasSubstr("how far node 12"));
  EXPECT_EQ(choose_host_node(topology, "auto", device_at(20)).node, 2);
}

TEST(HostNode, ANodeWithCpusAndNoMemoryIsNoHost) {
  RecordedSystem system("x86-two-sockets");
  system.write("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB");
  const NumaTopology topology = read_numa_topology(system.roots());
  EXPECT_EQ(choose_host_node(topology, "auto", device_at(1)).node, std::nullopt);
  EXPECT_THAT(message_of<ConfigError>([&] { choose_host_node(topology, "1", device_at(1)); }),
              HasSubstr("no memory"));
}

// --- off, a number ---

TEST(HostNode, OffBindsNothing) {
  EXPECT_EQ(chosen("alps-four-modules", 4, "off").node, std::nullopt);
  EXPECT_EQ(chosen("alps-four-modules", 4, "off").reason, "numa: off");
}

TEST(HostNode, ANumberIsTakenWhereverTheLinkEndsAndIsRequired) {
  const HostNode node = chosen("alps-four-modules", 4, "3");
  EXPECT_EQ(node.node, 3);
  EXPECT_TRUE(node.required);
  EXPECT_EQ(node.to_text(), "NUMA node 3 (set by numa)");
}

TEST(HostNode, ANumberThatIsNoNodeWithCpusIsRefusedNamingThoseThatAre) {
  EXPECT_THAT(refusal("alps-four-modules", "12"),
              AllOf(HasSubstr("numa: 12"), HasSubstr("no CPUs"), HasSubstr("(0, 1, 2, 3)")));
  EXPECT_THAT(refusal("x86-two-sockets", "2"),
              AllOf(HasSubstr("numa: 2"), HasSubstr("no such node"), HasSubstr("node 1: CPUs 32-63,96-127"),
                    HasSubstr("(0, 1)")));
  EXPECT_THAT(refusal("gh200", "1"), AllOf(HasSubstr("no CPUs"), HasSubstr("(0)")));
  EXPECT_THAT(refusal("gh200", "one"), HasSubstr("auto, off, or a node's number"));
}

TEST(HostNode, ANumberIsTakenOnTrustWhereTheMachineIsNotUnderstood) {
  EXPECT_EQ(chosen("broken-missing-cpulist", 0, "1").node, 1);
}

TEST(HostNode, ANumberWhereTheKernelListsNoNodesIsTakenWithAWarning) {
  const FakeSystem system;
  const HostNode node = choose_host_node(read_numa_topology(system.roots()), "1", {});
  EXPECT_EQ(node.node, 1);
  EXPECT_TRUE(node.required);
  EXPECT_THAT(node.warnings, ElementsAre(HasSubstr("numa: 1")));
}

// --- recording ---

TEST(Recording, OfAnUnfoldedRecordingIsTheRecording) {
  for (const auto& [machine, address] : {std::pair{"x86-one-socket", "0000:01:00.0"},
                                         {"x86-two-sockets", "0000:99:00.0"},
                                         {"gh200", "0009:01:00.0"},
                                         {"gh200-cdmm", "0009:01:00.0"},
                                         {"broken-garbage", "0000:99:00.0"}}) {
    EXPECT_EQ(record_system(address, RecordedSystem(machine).roots()), recording(machine)) << machine;
  }
}

TEST(Recording, OfASystemThatSaysNothingIsEmpty) {
  EXPECT_EQ(record_system("0000:01:00.0", FakeSystem().roots()), "");
}

}  // namespace
}  // namespace layerstream::test

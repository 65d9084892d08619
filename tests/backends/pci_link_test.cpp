#include "backends/topology/pci_link.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recorded_system.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* folder = "/sys/bus/pci/devices/0000:99:00.0/";

TEST(PciLink, IsDescribedByGenerationAndLanes) {
  const PciLink link = read_pci_link("0000:99:00.0", RecordedSystem("x86-two-sockets").roots());
  EXPECT_EQ(link.numa_node, 1);
  EXPECT_EQ(link.description(), "PCIe 5.0 x16");
  EXPECT_THAT(link.warnings, IsEmpty());
  EXPECT_THAT(link.notes, IsEmpty());
  // 32 GT/s · 16 lanes · 128/130 / 8 bits (PCI Express Base Specification 5.0).
  EXPECT_NEAR(link.bytes_per_second(), 63.0e9, 0.1e9);
}

TEST(PciLink, ALowerGenerationIsNotedAndNotWarnedOf) {
  const PciLink link = read_pci_link("0000:01:00.0", RecordedSystem("x86-one-socket").roots());
  EXPECT_EQ(link.numa_node, std::nullopt) << "-1: the kernel knows none";
  EXPECT_EQ(link.description(), "PCIe 1.0 x16");
  EXPECT_THAT(link.warnings, IsEmpty());
  EXPECT_THAT(link.notes, ElementsAre(AllOf(HasSubstr("1.0 now, 4.0 at most"), HasSubstr("idle"))));
  EXPECT_NEAR(link.bytes_per_second(), 31.5e9, 0.1e9) << "of a device at work";
}

TEST(PciLink, FewerLanesThanTheDeviceHasAreWarnedOf) {
  const RecordedSystem system("x86-two-sockets");
  system.write(std::string(folder) + "current_link_width", "8");
  system.write(std::string(folder) + "current_link_speed", "32 GT/s");  // as before Linux 5.7
  const PciLink link = read_pci_link("0000:99:00.0", system.roots());
  EXPECT_EQ(link.description(), "PCIe 5.0 x8");
  EXPECT_THAT(link.warnings, ElementsAre(AllOf(HasSubstr("8 of 16 lanes"), HasSubstr("0000:99:00.0"))));
}

TEST(PciLink, StaysUnknownWhereFilesAreMissingOrSayNothing) {
  for (const auto& [machine, address] : {std::pair{"broken-garbage", "0000:99:00.0"},
                                         {"gh200", "0009:01:00.0"},
                                         {"gh200", "0000:00:00.0"},
                                         {"gh200", ""}}) {
    const PciLink link = read_pci_link(address, RecordedSystem(machine).roots());
    EXPECT_EQ(link.description(), "PCIe link unknown") << machine << address;
    EXPECT_EQ(link.bytes_per_second(), 0.0);
    EXPECT_THAT(link.warnings, IsEmpty());
  }
}

TEST(PciLink, KnowsTheNodeOfEachGpuOfFourModules) {
  const RecordedSystem system("alps-four-modules");
  for (int module = 0; module < 4; ++module) {
    const std::string address = "00" + std::to_string(module) + "9:01:00.0";
    EXPECT_EQ(read_pci_link(address, system.roots()).numa_node, module);
  }
}

TEST(PciRate, OfASpeedThatNoGenerationHasIsSaidAsSuch) {
  EXPECT_EQ((PciRate{.gigatransfers = 3.0, .lanes = 4}.to_text()), "PCIe ? x4");
  EXPECT_EQ((PciRate{.gigatransfers = 3.0, .lanes = 4}.bytes_per_second()), 0.0);
}

}  // namespace
}  // namespace layerstream::test

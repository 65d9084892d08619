#include "backends/choose_backend.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/free_memory.hpp"
#include "core/error.hpp"
#include "tests/backends/forwarding_device.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr DeviceCapabilities on_pcie{};
const DeviceCapabilities on_ats{.shares_host_page_tables = true, .pageable_memory_access = true};

TEST(ChooseBackend, AutoFollowsWhatTheDeviceReaches) {
  const BackendDecision explicit_copies = choose_backend(BackendChoice::automatic, false, on_pcie);
  EXPECT_EQ(explicit_copies.backend, BackendChoice::explicit_copies);
  EXPECT_THAT(explicit_copies.reason, HasSubstr("does not share"));
  const BackendDecision coherent = choose_backend(BackendChoice::automatic, false, on_ats);
  EXPECT_TRUE(coherent.is_coherent());
  EXPECT_THAT(coherent.reason, HasSubstr("shares the host's page tables (ATS)"));
}

TEST(ChooseBackend, AutoWantsBothAttributes) {
  // HMM: pageable memory is reached through the GPU's own page tables, by page faults.
  const DeviceCapabilities faulting{.pageable_memory_access = true};
  EXPECT_FALSE(choose_backend(BackendChoice::automatic, false, faulting).is_coherent());
  const DeviceCapabilities contradicting{.shares_host_page_tables = true};
  EXPECT_FALSE(choose_backend(BackendChoice::automatic, false, contradicting).is_coherent());
}

TEST(ChooseBackend, AutoNeverEmulates) {
  EXPECT_FALSE(choose_backend(BackendChoice::automatic, true, on_pcie).is_coherent());
}

TEST(ChooseBackend, ExplicitIsAlwaysHad) {
  for (const DeviceCapabilities& device : {on_pcie, on_ats}) {
    EXPECT_EQ(choose_backend(BackendChoice::explicit_copies, false, device).backend,
              BackendChoice::explicit_copies);
  }
}

TEST(ChooseBackend, CoherentWithoutSharedPageTablesIsRefusedUnlessEmulationIsAskedFor) {
  EXPECT_THAT(message_of<ConfigError>([] { choose_backend(BackendChoice::coherent, false, on_pcie); }),
              AllOf(HasSubstr("backend: coherent"), HasSubstr("allow_emulation: true"),
                    HasSubstr("backend: explicit")));
  const BackendDecision emulated = choose_backend(BackendChoice::coherent, true, on_pcie);
  EXPECT_TRUE(emulated.is_coherent());
  EXPECT_THAT(emulated.reason, HasSubstr("emulated"));
  EXPECT_THAT(choose_backend(BackendChoice::coherent, true, on_ats).reason, Not(HasSubstr("emulated")));
}

/// A GPU of which others hold a part.
class OccupiedGpu final : public ForwardingDevice {
 public:
  OccupiedGpu(std::size_t free, std::size_t used, DeviceCapabilities capabilities)
      : ForwardingDevice(free), free_(free), used_(used), capabilities_(std::move(capabilities)) {}
  bool uses_host_memory() const override { return false; }
  std::size_t total_memory() const override { return free_ + used_; }
  std::size_t attainable_memory() const override { return free_ + 7; }  // for plans: more than is free
  std::size_t used_bytes() const override { return used_; }
  DeviceCapabilities capabilities() const override { return capabilities_; }

 private:
  std::size_t free_, used_;
  DeviceCapabilities capabilities_;
};

TEST(FreeDeviceMemory, LessThanNineTenthsIsWarnedOfWithTheCausesThatTheDeviceCanHave) {
  EXPECT_EQ(free_memory_warning(OccupiedGpu(91, 9, on_pcie)), "");
  EXPECT_DOUBLE_EQ(free_memory_of(OccupiedGpu(75, 25, on_pcie)).share(), 0.75);
  EXPECT_THAT(free_memory_warning(OccupiedGpu(89, 11, on_pcie)),
              AllOf(HasSubstr("89 B of 100 B"), HasSubstr("nvidia-smi"), Not(HasSubstr("drop_caches"))));
  EXPECT_THAT(free_memory_warning(OccupiedGpu(89, 11, on_ats)), HasSubstr("drop_caches"));
}

TEST(FreeDeviceMemory, OfASimulatedDeviceIsTheHostsAffair) {
  EXPECT_EQ(free_memory_warning(ForwardingDevice(1)), "");
}

}  // namespace
}  // namespace layerstream::test

// What the engine relies on in a GPU: the order that events keep between streams and threads, bytes that
// arrive whole from pinned and from ordinary memory, limits that are refused with need and have.

#include "backends/cuda/cuda_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <new>
#include <thread>
#include <vector>

#include "core/cuda_error.hpp"
#include "core/half.hpp"
#include "core/ledger.hpp"
#include "core/random.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::size_t mebibyte = std::size_t{1} << 20;
constexpr std::size_t page = 4096;

/// Page-aligned host memory that is not pinned.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(page, (bytes + page - 1) / page * page))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Pages() { std::free(data_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
};

/// Different numbers in every 8 bytes, so that no shifted or repeated piece goes unseen.
void fill(std::byte* to, std::size_t bytes, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (std::size_t i = 0; i < bytes; i += sizeof(state)) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(to + i, &state, std::min(sizeof(state), bytes - i));
  }
}

class CudaDeviceTest : public ::testing::Test {
 protected:
  static constexpr std::size_t limit = std::size_t{1} << 30;

  StreamView stream(Lane lane) { return device_.stream(lane); }
  Link& link() { return device_.link(); }

  CudaDevice device_{gpu_overhead_bytes + limit};
};

// --- memory ---

TEST_F(CudaDeviceTest, SaysWhatItIs) {
  EXPECT_FALSE(device_.uses_host_memory());
  EXPECT_EQ(device_.memory_limit(), gpu_overhead_bytes + limit);
  EXPECT_EQ(device_.overhead_bytes(), gpu_overhead_bytes);
  EXPECT_THAT(device_.description(),
              AllOf(HasSubstr("sm_"), HasSubstr(format_bytes(device_.memory_limit()))));
}

TEST_F(CudaDeviceTest, GivesExactlyItsLimitLessTheOverheadAndRefusesMoreNamingNeedAndHave) {
  {
    const auto first = device_.allocate(limit / 4);
    EXPECT_EQ(first->bytes(), limit / 4);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first->data()) % 256, 0U);
    EXPECT_THAT(
        message_of<ResourceError>([&] { device_.allocate(limit); }),
        AllOf(HasSubstr(format_bytes(limit) + " wanted"), HasSubstr(format_bytes(limit / 4) + " in use"),
              HasSubstr(format_bytes(gpu_overhead_bytes) + " for context"),
              HasSubstr("limit " + format_bytes(gpu_overhead_bytes + limit)),
              HasSubstr("raise device_memory_limit")));
    const auto rest = device_.allocate(limit - limit / 4);
    EXPECT_THROW(device_.allocate(1), ResourceError);
  }
  EXPECT_NO_THROW(device_.allocate(limit)) << "what was freed can be taken again";
  EXPECT_THROW(device_.allocate(std::numeric_limits<std::size_t>::max() - 1), ResourceError);
}

TEST(CudaDeviceLimit, MoreThanTheGpuHasIsRefusedWithWhatIsFree) {
  const std::size_t more = std::size_t{1} << 42;
  CudaDevice device(2 * more);
  EXPECT_THAT(message_of<ResourceError>([&] { device.allocate(more); }),
              AllOf(HasSubstr(format_bytes(more)), HasSubstr(" free"), HasSubstr("nvidia-smi"),
                    Not(HasSubstr("raise device_memory_limit"))));
  device.set_memory_limit(2 * more);
  EXPECT_THAT(message_of<ResourceError>([&] { device.allocate(more); }),
              AllOf(HasSubstr(format_bytes(more)), HasSubstr(" free"), HasSubstr("nvidia-smi"),
                    HasSubstr("set device_memory_limit to less")))
      << "where the driver refuses";
  EXPECT_NO_THROW(device.allocate(mebibyte)) << "a refusal leaves no error behind and takes nothing";
}

TEST(CudaDeviceLimit, LessThanTheOverheadGivesNothing) {
  CudaDevice device(gpu_overhead_bytes / 2);
  EXPECT_THROW(device.allocate(1), ResourceError);
}

TEST_F(CudaDeviceTest, PoisonReadsAsNaN) {
  const auto region = device_.allocate(256);
  const std::vector<float> zeros(64, 0.0F);
  link().copy(region->data(), zeros.data(), 256, stream(Lane::compute));
  device_.poison(region->data(), 128, stream(Lane::compute));
  std::vector<float> values(64);
  link().copy(values.data(), region->data(), 256, stream(Lane::compute));
  device_.synchronize();
  for (std::size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(values[i]));
  for (std::size_t i = 32; i < 64; ++i) EXPECT_EQ(values[i], 0.0F);
  std::vector<bf16> halves(64);
  std::memcpy(halves.data(), values.data(), 128);
  for (const bf16 half : halves) EXPECT_TRUE(std::isnan(to_float(half)));
}

// --- copies ---

/// To the device and back through `there` and `back`, which may be pinned or not.
void expect_round_trip(CudaDevice& device, std::byte* there, std::byte* back, std::size_t bytes) {
  fill(there, bytes, bytes);
  std::memset(back, 0, bytes);
  const auto region = device.allocate(bytes);
  device.link().copy(region->data(), there, bytes, device.stream(Lane::h2d));
  const auto arrived = device.make_event();
  arrived->reset();
  arrived->record(device.stream(Lane::h2d));
  arrived->wait(device.stream(Lane::d2h));
  device.link().copy(back, region->data(), bytes, device.stream(Lane::d2h));
  device.synchronize();
  EXPECT_EQ(std::memcmp(there, back, bytes), 0) << bytes << " B";
}

TEST_F(CudaDeviceTest, OrdinaryMemoryArrivesWholeThroughTheStagingRing) {
  // Its buffers hold 8 MiB each: less than one, exactly one, both, and many in turn, with a part at the end.
  for (const std::size_t bytes : {std::size_t{1}, 8 * mebibyte - 1, 8 * mebibyte, 8 * mebibyte + 1,
                                  16 * mebibyte + 12345, 100 * mebibyte + 7}) {
    const Pages there(bytes), back(bytes);
    expect_round_trip(device_, there.data(), back.data(), bytes);
  }
}

TEST_F(CudaDeviceTest, SourceMayChangeAsSoonAsAStagedCopyReturns) {
  constexpr std::size_t bytes = 40 * mebibyte;
  const Pages source(bytes), expected(bytes), back(bytes);
  fill(source.data(), bytes, 3);
  fill(expected.data(), bytes, 3);
  const auto region = device_.allocate(bytes);
  link().copy(region->data(), source.data(), bytes, stream(Lane::h2d));
  std::memset(source.data(), 0, bytes);
  device_.synchronize();
  link().copy(back.data(), region->data(), bytes, stream(Lane::d2h));
  EXPECT_EQ(std::memcmp(expected.data(), back.data(), bytes), 0) << "has arrived when the call returns";
}

TEST_F(CudaDeviceTest, PinnedMemoryArrivesWhole) {
  constexpr std::size_t bytes = 70 * mebibyte + 123;
  const Pages there(bytes), back(bytes);
  const auto pin_there = device_.pin(there.data(), bytes, true, {});
  const auto pin_back = device_.pin(back.data(), bytes, true, {});
  EXPECT_EQ(pin_there->pinned_bytes(), bytes);
  EXPECT_EQ(pin_there->shortfall(), "");
  expect_round_trip(device_, there.data(), back.data(), bytes);
}

TEST_F(CudaDeviceTest, MemoryThatIsNoLongerPinnedStillArrives) {
  constexpr std::size_t bytes = 10 * mebibyte;
  const Pages there(bytes), back(bytes);
  for (int round = 0; round < 2; ++round) {
    device_.pin(there.data(), bytes, true, {});
    expect_round_trip(device_, there.data(), back.data(), bytes);
    const auto pin = device_.pin(there.data(), bytes, true, {});
    expect_round_trip(device_, there.data(), back.data(), bytes);
  }
}

/// Calls that pin with the driver, but no more than `pieces` times.
PinCalls pinning(int pieces) {
  const auto left = std::make_shared<int>(pieces);
  return {
      .pin = [left](void* data, std::size_t bytes) -> std::string {
        if ((*left)-- <= 0) return "no more in this test";
        LAYERSTREAM_CUDA(cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
        return {};
      },
      .unpin = [](void* data) { LAYERSTREAM_CUDA(cudaHostUnregister(data)); }};
}

TEST_F(CudaDeviceTest, CopiesAcrossThePiecesOfAPinAndIntoWhatIsNotPinnedArriveWhole) {
  constexpr std::size_t bytes = 40 * mebibyte + 17;
  constexpr std::size_t piece = 3 * mebibyte;
  CudaLink& cuda_link = dynamic_cast<CudaLink&>(device_.link());
  for (const int pieces : {0, 1, 5, 14}) {  // of 14
    SCOPED_TRACE(pieces);
    const Pages there(bytes), back(bytes);
    PinnedRange from(there.data(), bytes, pinning(pieces), {.piece_bytes = piece});
    PinnedRange to(back.data(), bytes, pinning(pieces / 2), {.piece_bytes = piece - page});
    EXPECT_EQ(from.pinned_bytes(), std::min(bytes, static_cast<std::size_t>(pieces) * piece));
    cuda_link.add(from);
    cuda_link.add(to);
    expect_round_trip(device_, there.data(), back.data(), bytes);
    // Not from the start, and not to the end.
    expect_round_trip(device_, there.data() + 1000, back.data() + page + 3, bytes - 2 * page - 5);
    cuda_link.remove(from);
    cuda_link.remove(to);
  }
}

/// The driver takes ordinary memory of any GPU, if slowly on most.
TEST_F(CudaDeviceTest, CopiesOfOrdinaryMemoryWithoutTheRingArriveWholeAsWell) {
  constexpr std::size_t bytes = 21 * mebibyte + 5;
  const Pages there(bytes), back(bytes);
  fill(there.data(), bytes, 11);
  const auto region = device_.allocate(bytes);
  CudaLink direct(PageableCopies::direct);
  direct.copy(region->data(), there.data(), bytes, stream(Lane::h2d));
  direct.copy(back.data(), region->data(), bytes, stream(Lane::h2d));
  device_.synchronize();
  EXPECT_EQ(std::memcmp(there.data(), back.data(), bytes), 0);
}

TEST_F(CudaDeviceTest, CapabilitiesAreTheDriversAttributes) {
  const DeviceCapabilities capabilities = device_.capabilities();
  std::map<std::string, std::int64_t> attributes;
  for (const auto& [name, value] : device_.attributes()) attributes[name] = value;
  EXPECT_EQ(capabilities.shares_host_page_tables,
            attributes.at("PageableMemoryAccessUsesHostPageTables") != 0);
  EXPECT_EQ(capabilities.pageable_memory_access, attributes.at("PageableMemoryAccess") != 0);
  EXPECT_EQ(capabilities.host_numa_id.value_or(-1), attributes.at("HostNumaId"));
  EXPECT_THAT(capabilities.pci_bus_id, ::testing::MatchesRegex("[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\\.0"));
  EXPECT_GE(attributes.at("RuntimeVersion"), 12000);
}

TEST_F(CudaDeviceTest, DeviceToDeviceCopiesStayThere) {
  constexpr std::size_t bytes = 20 * mebibyte + 1;
  const Pages there(bytes), back(bytes);
  fill(there.data(), bytes, 9);
  const auto first = device_.allocate(bytes);
  const auto second = device_.allocate(bytes);
  link().copy(first->data(), there.data(), bytes, stream(Lane::compute));
  link().copy(second->data(), first->data(), bytes, stream(Lane::compute));
  link().copy(back.data(), second->data(), bytes, stream(Lane::compute));
  EXPECT_EQ(std::memcmp(there.data(), back.data(), bytes), 0);
}

TEST_F(CudaDeviceTest, StreamsOfDifferentLanesStageAtTheSameTime) {
  constexpr std::size_t bytes = 30 * mebibyte + 5;
  std::vector<std::thread> threads;
  std::vector<int> differences(all_lanes.size(), -1);
  for (std::size_t i = 0; i < all_lanes.size(); ++i) {
    if (all_lanes[i] == Lane::host) continue;
    threads.emplace_back([&, i] {
      const StreamView own = device_.stream(all_lanes[i]);
      const Pages there(bytes), back(bytes);
      fill(there.data(), bytes, i);
      const auto region = device_.allocate(bytes);
      for (int round = 0; round < 3; ++round) {
        std::memset(back.data(), 0, bytes);
        device_.link().copy(region->data(), there.data(), bytes, own);
        device_.link().copy(back.data(), region->data(), bytes, own);
        differences[i] = std::max(differences[i], std::memcmp(there.data(), back.data(), bytes) == 0 ? 0 : 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < all_lanes.size(); ++i) {
    EXPECT_EQ(differences[i], all_lanes[i] == Lane::host ? -1 : 0) << name_of(all_lanes[i]);
  }
}

// --- events ---

/// A chain: pinned memory → first → second → pinned memory, each copy on a lane of its own. 256 MiB take 5 ms
/// over the link, so whoever does not wait reads what was there before.
TEST_F(CudaDeviceTest, EventsOrderStreamsAndNoThreadWaitsForThem) {
  constexpr std::size_t bytes = 256 * mebibyte;
  const Pages there(bytes), back(bytes);
  const auto pin_there = device_.pin(there.data(), bytes, true, {});
  const auto pin_back = device_.pin(back.data(), bytes, true, {});
  const auto first = device_.allocate(bytes);
  const auto second = device_.allocate(bytes);
  const auto loaded = device_.make_event();
  const auto copied = device_.make_event();
  const auto stored = device_.make_event();
  for (int round = 1; round <= 3; ++round) {
    fill(there.data(), bytes, static_cast<std::uint64_t>(round));
    for (const auto* event : {&loaded, &copied, &stored}) (*event)->reset();
    const auto start = std::chrono::steady_clock::now();
    link().copy(first->data(), there.data(), bytes, stream(Lane::h2d));
    loaded->record(stream(Lane::h2d));
    loaded->wait(stream(Lane::compute));
    link().copy(second->data(), first->data(), bytes, stream(Lane::compute));
    copied->record(stream(Lane::compute));
    copied->wait(stream(Lane::d2h));
    link().copy(back.data(), second->data(), bytes, stream(Lane::d2h));
    stored->record(stream(Lane::d2h));
    const std::chrono::duration<double> issued = std::chrono::steady_clock::now() - start;
    stored->wait(stream(Lane::host));
    const std::chrono::duration<double> done = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(std::memcmp(there.data(), back.data(), bytes), 0) << "round " << round;
    // The first round also warms up. 512 MiB over a link of 64 GB/s at most take 8 ms; issuing takes
    // microseconds.
    if (round > 1) {
      EXPECT_LT(issued.count(), 0.5 * done.count());
    }
  }
  device_.synchronize();
}

TEST_F(CudaDeviceTest, WhatTheHostWritesComesBeforeTheCopiesThatWaitForItsEvent) {
  constexpr std::size_t bytes = 4 * mebibyte;
  const Pages there(bytes), back(bytes);
  const auto pin_there = device_.pin(there.data(), bytes, true, {});
  const auto pin_back = device_.pin(back.data(), bytes, true, {});
  const auto region = device_.allocate(bytes);
  const auto written = device_.make_event();
  const auto arrived = device_.make_event();
  for (std::uint64_t round = 0; round < 50; ++round) {
    written->reset();
    arrived->reset();
    std::thread host([&] {
      fill(there.data(), bytes, round);
      written->record(device_.stream(Lane::host));
    });
    written->wait(stream(Lane::h2d));
    link().copy(region->data(), there.data(), bytes, stream(Lane::h2d));
    link().copy(back.data(), region->data(), bytes, stream(Lane::h2d));
    arrived->record(stream(Lane::h2d));
    arrived->wait(stream(Lane::host));
    EXPECT_EQ(std::memcmp(there.data(), back.data(), bytes), 0) << "round " << round;
    host.join();
  }
}

TEST_F(CudaDeviceTest, WaitBeforeRecordBlocksTheThreadUntilItIsRecordedOrAbandoned) {
  for (const bool abandon : {false, true}) {
    const auto event = device_.make_event();
    event->reset();
    std::atomic<int> outcome{0};
    std::thread waiter([&] {
      try {
        event->wait(device_.stream(Lane::compute));
        outcome = 1;
      } catch (const Abandoned&) {
        outcome = 2;
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // long enough for one that does not wait
    EXPECT_EQ(outcome, 0);
    if (abandon) {
      event->abandon();
    } else {
      event->record(stream(Lane::h2d));
    }
    waiter.join();
    EXPECT_EQ(outcome, abandon ? 2 : 1);
  }
}

TEST_F(CudaDeviceTest, SynchronizeWaitsForEveryStream) {
  constexpr std::size_t bytes = 128 * mebibyte;
  for (const Lane lane : all_lanes) {
    if (lane == Lane::host) continue;
    const Pages there(bytes), back(bytes);
    const auto pin_there = device_.pin(there.data(), bytes, true, {});
    const auto pin_back = device_.pin(back.data(), bytes, true, {});
    fill(there.data(), bytes, 5);
    std::memset(back.data(), 0, bytes);
    const auto region = device_.allocate(bytes);
    link().copy(region->data(), there.data(), bytes, stream(lane));
    link().copy(back.data(), region->data(), bytes, stream(lane));
    device_.synchronize();
    EXPECT_EQ(std::memcmp(there.data(), back.data(), bytes), 0) << name_of(lane);
  }
}

}  // namespace
}  // namespace layerstream::test

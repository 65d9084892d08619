// Runs on the device of the build: the simulated one, or the GPU.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>

#include "backends/host_region.hpp"
#include "backends/make_device.hpp"
#include "backends/measure_rates.hpp"
#include "backends/peak_rates.hpp"
#include "core/error.hpp"
#include "core/worker_pool.hpp"

namespace layerstream::test {
namespace {

/// How far the clocks of host and device may be apart: a round trip to the device takes 10 to 20 µs, and the
/// thread may lose its CPU in between.
constexpr double tolerance = 2e-3;

class DeviceClockTest : public ::testing::Test {
 protected:
  static constexpr std::size_t bytes = std::size_t{64} << 20;

  std::unique_ptr<Device> device_ = make_device(std::nullopt, std::size_t{1} << 30);
  std::unique_ptr<DeviceClock> clock_ = device_->make_clock();
};

TEST_F(DeviceClockTest, MarksAroundACopyTellHowLongItTook) {
  const HostRegion host(bytes);
  const auto pin = device_->pin(host.data(), bytes, false, {});
  const auto device = device_->allocate(bytes);
  const StreamView stream = device_->stream(Lane::h2d);
  for (int round = 0; round < 3; ++round) {
    clock_->restart(6);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t copy = 0; copy < 3; ++copy) {
      clock_->mark(2 * copy, stream);
      device_->link().copy(device->data(), host.data(), bytes, stream);
      clock_->mark(2 * copy + 1, stream);
    }
    device_->synchronize();
    const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double previous = -tolerance;
    double copying = 0.0;
    for (std::size_t copy = 0; copy < 3; ++copy) {
      const double begin = clock_->seconds(2 * copy);
      const double end = clock_->seconds(2 * copy + 1);
      EXPECT_GE(begin, previous);
      EXPECT_GT(end - begin, static_cast<double>(bytes) / 2e12) << "no link or memory is that fast";
      previous = end;
      copying += end - begin;
    }
    EXPECT_LE(copying, whole + tolerance);
  }
}

TEST_F(DeviceClockTest, HostAndDeviceMarksShareOneAxis) {
  for (int round = 0; round < 20; ++round) {
    clock_->restart(3);
    clock_->mark(0, StreamView::host());
    clock_->mark(1, device_->stream(Lane::compute));
    device_->synchronize();
    clock_->mark(2, StreamView::host());
    EXPECT_GE(clock_->seconds(0), -tolerance);
    EXPECT_GE(clock_->seconds(1), clock_->seconds(0) - tolerance);
    EXPECT_GE(clock_->seconds(2), clock_->seconds(1) - tolerance);
  }
}

TEST_F(DeviceClockTest, RestartForgetsMarksAndCountsAnew) {
  clock_->restart(2);
  clock_->mark(0, device_->stream(Lane::d2h));
  device_->synchronize();
  EXPECT_NO_THROW((void)clock_->seconds(0));
  EXPECT_THROW((void)clock_->seconds(1), ContractError);
  clock_->restart(4);
  for (std::size_t mark = 0; mark < 4; ++mark) EXPECT_THROW((void)clock_->seconds(mark), ContractError);
}

TEST_F(DeviceClockTest, LinkAndMemoryAreMeasuredInPlaceAndQuickly) {
  const HostRegion host(bytes);
  const auto pin = device_->pin(host.data(), bytes, false, {});
  const auto device = device_->allocate(bytes);
  auto* const words = static_cast<std::uint32_t*>(host.data());
  const std::size_t count = bytes / sizeof(std::uint32_t);
  for (std::size_t i = 0; i < count; ++i) words[i] = static_cast<std::uint32_t>(i * 2654435761U);
  WorkerPool pool(2);
  const auto start = std::chrono::steady_clock::now();
  const MeasuredRates rates = measure_link(*device_, device->data(), host.data(), bytes);
  const double memory = measure_host_memory(pool, host.data(), bytes);
  // 448 MiB of copies and 256 MiB of memory traffic; a crowded CPU still does 1 GB/s.
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 2.0);
  for (const double rate : {rates.to_device, rates.to_host, memory}) {
    EXPECT_GT(rate, 0.1e9);
    EXPECT_LT(rate, 2e12);
  }
  std::size_t changed = 0;
  for (std::size_t i = 0; i < count; ++i) changed += words[i] != static_cast<std::uint32_t>(i * 2654435761U);
  EXPECT_EQ(changed, 0U);
}

TEST(PeakFlops, AreKnownByTheDevicesName) {
  EXPECT_EQ(peak_flops("NVIDIA H200 (sm_90), 120.00 GiB of 139.81 GiB", DType::bf16), 989e12);
  EXPECT_EQ(peak_flops("NVIDIA H200 (sm_90)", DType::f32), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe (sm_90)", DType::bf16), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA GeForce RTX 4090 (sm_89)", DType::bf16), 165.2e12);
  EXPECT_EQ(peak_flops("simulated device (host execution space), 1.00 GiB", DType::bf16), std::nullopt);
  EXPECT_EQ(peak_flops("NVIDIA H200 (sm_90)", DType::f16), std::nullopt);
}

}  // namespace
}  // namespace layerstream::test

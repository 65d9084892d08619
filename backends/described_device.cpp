#include "backends/described_device.hpp"

#include "core/error.hpp"

namespace layerstream {
namespace {

[[noreturn]] void not_here(std::string_view what) {
  throw ContractError(fmt::format("{} of a device that is only described", what));
}

}  // namespace

void DescribedDevice::NoLink::copy(void*, const void*, std::size_t, StreamView) {
  not_here("a copy");
}

std::unique_ptr<DeviceRegion> DescribedDevice::allocate(std::size_t) {
  not_here("memory");
}

std::unique_ptr<HostPin> DescribedDevice::pin(void*, std::size_t, bool,
                                              const std::function<void(std::size_t, std::size_t)>&) {
  not_here("pinned memory");
}

StreamView DescribedDevice::stream(Lane) {
  not_here("a stream");
}

std::unique_ptr<Event> DescribedDevice::make_event() {
  not_here("an event");
}

std::unique_ptr<DeviceClock> DescribedDevice::make_clock() {
  not_here("the clock");
}

void DescribedDevice::synchronize() {
  not_here("the streams");
}

void DescribedDevice::poison(void*, std::size_t, StreamView) {
  not_here("memory");
}

}  // namespace layerstream

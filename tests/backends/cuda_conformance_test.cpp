// The conformance suite for both backends over a GPU. Coherent memory is emulated: host memory is pinned and
// mapped, so that copies and kernels reach it in place.

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

#include "backends/coherent/coherent_backend.hpp"
#include "backends/cuda/cuda_device.hpp"
#include "backends/explicit/explicit_backend.hpp"
#include "conformance.hpp"

namespace layerstream::test {
namespace {

std::shared_ptr<std::byte> allocate_pages(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  void* const memory = std::aligned_alloc(page, (bytes + page - 1) / page * page);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* pages) { std::free(pages); }};
}

/// Host memory of a case that pins it: through the device that the case made last.
class PinnedMemory {
 public:
  void use(Device& device) { device_ = &device; }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) {
    const std::shared_ptr<std::byte> memory = allocate_pages(bytes);
    // Unpinned before it is freed.
    struct Pinned {
      std::shared_ptr<std::byte> memory;
      std::unique_ptr<HostPin> pin;
    };
    const auto pinned = std::make_shared<Pinned>(Pinned{memory, device_->pin(memory.get(), bytes, true, {})});
    return {pinned, memory.get()};
  }

 private:
  Device* device_ = nullptr;
};

/// Names the coherent backend whose weights come by a kernel.
struct PromotedByKernel;

template <class Backend>
BackendUnderTest make_on_gpu() {
  BackendUnderTest made;
  made.device = std::make_unique<CudaDevice>(gpu_overhead_bytes + (std::size_t{64} << 20));
  if constexpr (std::is_same_v<Backend, PromotedByKernel>) {
    made.backend = std::make_unique<CoherentBackend>(made.device->link(), made.device->kernel_link());
  } else {
    made.backend = std::make_unique<Backend>(made.device->link());
  }
  return made;
}

template <class Backend>
BackendCase pinned_case(const std::string& name) {
  const auto memory = std::make_shared<PinnedMemory>();
  return {.name = name,
          .make =
              [memory] {
                BackendUnderTest made = make_on_gpu<Backend>();
                memory->use(*made.device);
                return made;
              },
          .allocate_host = [memory](std::size_t bytes) { return memory->allocate(bytes); }};
}

INSTANTIATE_TEST_SUITE_P(Cuda, MemoryBackendConformance,
                         ::testing::Values(BackendCase{"ExplicitPageable", make_on_gpu<ExplicitBackend>,
                                                       allocate_pages},
                                           pinned_case<ExplicitBackend>("ExplicitPinned"),
                                           pinned_case<CoherentBackend>("CoherentEmulated"),
                                           pinned_case<PromotedByKernel>("CoherentEmulatedByKernel")),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace layerstream::test

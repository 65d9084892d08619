// The conformance suite for both backends over the simulated device.

#include "conformance.hpp"

#include <new>

#include "backends/coherent/coherent_backend.hpp"
#include "backends/explicit/explicit_backend.hpp"
#include "backends/link.hpp"
#include "backends/simulated_device.hpp"

namespace layerstream::test {
namespace {

template <class Backend>
BackendUnderTest make_simulated() {
  BackendUnderTest made;
  made.device = std::make_unique<SimulatedDevice>(std::size_t{64} << 20);
  made.backend = std::make_unique<Backend>(made.device->link());
  return made;
}

std::shared_ptr<std::byte> allocate_host(std::size_t bytes) {
  constexpr std::align_val_t alignment{256};
  return {static_cast<std::byte*>(::operator new(bytes, alignment)),
          [alignment](std::byte* memory) { ::operator delete(memory, alignment); }};
}

INSTANTIATE_TEST_SUITE_P(
    Simulated, MemoryBackendConformance,
    ::testing::Values(BackendCase{"explicit", make_simulated<ExplicitBackend>, allocate_host},
                      BackendCase{"coherent", make_simulated<CoherentBackend>, allocate_host}),
    [](const auto& info) { return info.param.name == "explicit" ? "Explicit" : "Coherent"; });

/// A link that fails half-way through a fetch.
class BrokenLink final : public Link {
 public:
  void copy(void*, const void*, std::size_t, StreamView) override { throw Error("the link is down"); }
};

TEST(SlotTags, SlotWhoseFetchFailedCannotBeAcquired) {
  BrokenLink link;
  ExplicitBackend backend(link);
  const std::shared_ptr<std::byte> memory = allocate_host(4096);
  const SlabSource slab{.hi = reinterpret_cast<const bf16*>(memory.get()),
                        .lo = reinterpret_cast<const std::int16_t*>(memory.get()),
                        .num_matrix_elements = 64,
                        .num_elements = 128};
  const std::shared_ptr<std::byte> slot = allocate_host(4096);
  void* const slots[] = {slot.get()};
  backend.attach_slots(slots, 4096);
  EXPECT_THROW(backend.fetch(0, 1, 1, {.slabs = {slab}, .low_halves = false}, StreamView::host()), Error);
  EXPECT_THROW(backend.acquire(0, 1, 1), ContractError);
}

TEST(FetchLanes, RunBesideComputation) {
  MemcpyLink link;
  EXPECT_EQ(ExplicitBackend(link).fetch_lane(), Lane::h2d);
  EXPECT_EQ(CoherentBackend(link).fetch_lane(), Lane::h2d);
}

TEST(CoherentBackendPlaces, MatricesComeByTheLinkThatPromotes) {
  struct CountingLink final : Link {
    std::size_t bytes = 0;
    void copy(void* to, const void* from, std::size_t count, StreamView stream) override {
      bytes += count;
      MemcpyLink().copy(to, from, count, stream);
    }
  } link, promotion;
  CoherentBackend backend(link, promotion);
  const std::shared_ptr<std::byte> hi = allocate_host(4096);
  const std::shared_ptr<std::byte> slot = allocate_host(8192);
  const BlockSource source{.slabs = {{.hi = reinterpret_cast<const bf16*>(hi.get()),
                                      .lo = reinterpret_cast<const std::int16_t*>(hi.get()),
                                      .num_matrix_elements = 1000,
                                      .num_elements = 1010}},
                           .low_halves = false};
  void* const slots[] = {slot.get()};
  backend.attach_slots(slots, 8192);
  backend.fetch(0, 1, 1, source, StreamView::host());
  EXPECT_EQ(promotion.bytes, 2000u);
  EXPECT_EQ(link.bytes, 0u);
  backend.copy_to_host(hi.get(), slot.get(), 64, StreamView::host());
  EXPECT_EQ(link.bytes, 64u);
}

TEST(CoherentBackendPlaces, TablesAndVectorsStayInHostMemory) {
  MemcpyLink link;
  CoherentBackend backend(link);
  const std::shared_ptr<std::byte> hi = allocate_host(4096);
  const std::shared_ptr<std::byte> lo = allocate_host(4096);
  SlabSource slab{.hi = reinterpret_cast<const bf16*>(hi.get()),
                  .lo = reinterpret_cast<const std::int16_t*>(lo.get()),
                  .num_matrix_elements = 512,
                  .num_elements = 640};
  const std::shared_ptr<std::byte> slot = allocate_host(4096);
  void* const slots[] = {slot.get()};
  backend.attach_slots(slots, 4096);
  backend.fetch(0, 1, 1, {.slabs = {slab}, .low_halves = true}, StreamView::host());
  BoundSlab bound = backend.acquire(0, 1, 1).at(0);
  EXPECT_EQ(static_cast<const void*>(bound.matrix_hi), slot.get());
  EXPECT_EQ(bound.vector_hi, slab.hi + 512);
  EXPECT_EQ(bound.vector_lo, slab.lo + 512);
  backend.release(0, 1);

  slab.gathered = true;
  EXPECT_EQ(backend.slot_bytes({.slabs = {slab}, .low_halves = true}), 0U);
  backend.fetch(0, 0, 1, {.slabs = {slab}, .low_halves = true}, StreamView::host());
  bound = backend.acquire(0, 0, 1).at(0);
  EXPECT_EQ(bound.matrix_hi, slab.hi);
  EXPECT_EQ(bound.matrix_lo, slab.lo);
}

}  // namespace
}  // namespace layerstream::test

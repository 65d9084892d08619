#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backends/device.hpp"
#include "backends/memory_backend.hpp"
#include "core/random.hpp"

// What every MemoryBackend must do. A test program includes this file and instantiates the suite:
//
//   INSTANTIATE_TEST_SUITE_P(Explicit, MemoryBackendConformance, ::testing::Values(BackendCase{...}), ...);

namespace layerstream::test {

/// A backend and the device that it stands on, which goes last.
struct BackendUnderTest {
  std::unique_ptr<Device> device;
  std::unique_ptr<MemoryBackend> backend;
};

struct BackendCase {
  std::string name;
  std::function<BackendUnderTest()> make;
  /// Host memory that the backend can fetch from, 256-byte aligned; freed by the deleter.
  std::function<std::shared_ptr<std::byte>(std::size_t bytes)> allocate_host;
};
inline void PrintTo(const BackendCase& backend_case, std::ostream* stream) {
  *stream << backend_case.name;
}

/// The halves of a slab in host memory, filled with numbers that depend on the seed.
class HostSlab {
 public:
  HostSlab(const BackendCase& backend_case, std::int64_t num_matrix, std::int64_t num_vector,
           std::uint64_t seed)
      : num_matrix_(num_matrix),
        num_elements_(num_matrix + num_vector),
        hi_(backend_case.allocate_host(bytes())),
        lo_(backend_case.allocate_host(bytes())) {
    fill(seed);
  }

  void fill(std::uint64_t seed) {
    for (std::size_t i = 0; i < bytes(); ++i) {
      hi_.get()[i] = static_cast<std::byte>(256.0 * uniform_at(seed, 0, i));
      lo_.get()[i] = static_cast<std::byte>(256.0 * uniform_at(seed, 1, i));
    }
  }

  SlabSource source(bool gathered = false) const {
    return {.hi = reinterpret_cast<const bf16*>(hi_.get()),
            .lo = reinterpret_cast<const std::int16_t*>(lo_.get()),
            .num_matrix_elements = num_matrix_,
            .num_elements = num_elements_,
            .gathered = gathered};
  }
  std::vector<std::byte> copy_of_both() const {
    std::vector<std::byte> copy(hi_.get(), hi_.get() + bytes());
    copy.insert(copy.end(), lo_.get(), lo_.get() + bytes());
    return copy;
  }

 private:
  std::size_t bytes() const { return 2 * static_cast<std::size_t>(num_elements_); }

  std::int64_t num_matrix_, num_elements_;
  std::shared_ptr<std::byte> hi_, lo_;
};

class MemoryBackendConformance : public ::testing::TestWithParam<BackendCase> {
 protected:
  MemoryBackendConformance() : under_test_(GetParam().make()) {}

  Device& device() { return *under_test_.device; }
  MemoryBackend& backend() { return *under_test_.backend; }

  HostSlab slab(std::int64_t num_matrix, std::int64_t num_vector, std::uint64_t seed = 1) const {
    return {GetParam(), num_matrix, num_vector, seed};
  }

  /// `count` slots of `bytes`, each with guard bytes behind it, all set to a pattern.
  void attach(int count, std::size_t bytes) {
    const std::size_t stride = (bytes + 255) / 256 * 256 + guard_bytes;
    region_ = device().allocate(stride * static_cast<std::size_t>(count));
    const std::vector<std::byte> pattern(region_->bytes(), guard);
    backend().copy_to_device(region_->data(), pattern.data(), pattern.size(), device().stream(Lane::h2d));
    device().synchronize();
    slots_.clear();
    for (int slot = 0; slot < count; ++slot) {
      slots_.push_back(static_cast<std::byte*>(region_->data()) + stride * static_cast<std::size_t>(slot));
    }
    backend().attach_slots(slots_, bytes);
  }

  void fetch(int slot, int block, std::int64_t version, const BlockSource& source) {
    backend().fetch(slot, block, version, source, device().stream(backend().fetch_lane()));
    device().synchronize();
  }

  std::vector<std::byte> read(const void* from, std::size_t bytes) {
    std::vector<std::byte> copy(bytes);
    backend().copy_to_host(copy.data(), from, bytes, device().stream(Lane::d2h));
    device().synchronize();
    return copy;
  }

  /// The bytes of slot memory from `first` to the end of the guard.
  std::vector<std::byte> slot_bytes_from(int slot, std::size_t first, std::size_t slot_size) {
    const auto* const data = static_cast<const std::byte*>(slots_[static_cast<std::size_t>(slot)]);
    return read(data + first, slot_size + guard_bytes - first);
  }

  template <class T>
  void expect_elements(const T* bound, const T* expected, std::int64_t count, const char* what) {
    if (count == 0) return;
    ASSERT_NE(bound, nullptr) << what;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    const std::vector<std::byte> copy = read(bound, bytes);
    EXPECT_EQ(std::memcmp(copy.data(), expected, bytes), 0) << what;
  }

  /// Expects the bound slabs to hold what the source holds.
  void expect_bound(const WeightBinding& binding, const BlockSource& source) {
    ASSERT_EQ(binding.size(), source.slabs.size());
    for (std::size_t i = 0; i < binding.size(); ++i) {
      SCOPED_TRACE("slab " + std::to_string(i));
      const SlabSource& slab = source.slabs[i];
      const BoundSlab& bound = binding[i];
      const std::int64_t num_matrix = slab.num_matrix_elements;
      const std::int64_t num_vector = slab.num_elements - num_matrix;
      expect_elements(bound.matrix_hi, slab.hi, num_matrix, "matrices, upper halves");
      if (source.low_halves) {
        expect_elements(bound.matrix_lo, slab.lo, num_matrix, "matrices, lower halves");
      } else {
        EXPECT_EQ(bound.matrix_lo, nullptr);
      }
      expect_elements(bound.vector_hi, slab.hi + num_matrix, num_vector, "vectors, upper halves");
      expect_elements(bound.vector_lo, slab.lo + num_matrix, num_vector, "vectors, lower halves");
    }
  }

  /// Expects a ContractError whose message has all of `parts`.
  template <class Function>
  void expect_refused(const std::vector<std::string>& parts, const Function& function) {
    try {
      function();
      ADD_FAILURE() << "no exception";
    } catch (const ContractError& error) {
      for (const std::string& part : parts) EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
    }
  }

  static constexpr std::byte guard{0xa5};
  static constexpr std::size_t guard_bytes = 1024;

  BackendUnderTest under_test_;
  std::unique_ptr<DeviceRegion> region_;
  std::vector<void*> slots_;
};

TEST_P(MemoryBackendConformance, FetchedBytesAreThoseOfTheSlabAndNoOthersChange) {
  // Sizes that are no multiple of the alignment; a slab without vectors, and one without matrices.
  const HostSlab decoder = slab(1000, 72, 1);
  const HostSlab embedding = slab(2333, 0, 2);
  const HostSlab norm = slab(0, 31, 3);
  const HostSlab head = slab(640, 32, 4);
  struct Block {
    const char* name;
    std::vector<SlabSource> slabs;
  };
  const std::vector<Block> blocks{{"decoder", {decoder.source()}},
                                  {"embedding", {embedding.source(true)}},
                                  {"head", {head.source()}},
                                  {"tied head", {norm.source(), embedding.source()}}};
  for (const bool low_halves : {false, true}) {
    for (const Block& block : blocks) {
      SCOPED_TRACE(fmt::format("{}, low halves {}", block.name, low_halves));
      const BlockSource source{.slabs = block.slabs, .low_halves = low_halves};
      const std::size_t needed = backend().slot_bytes(source);
      const std::size_t size = needed + 512;  // as for a larger block
      attach(2, size);
      const std::vector<std::byte> before = embedding.copy_of_both();
      fetch(1, 3, 7, source);
      expect_bound(backend().acquire(1, 3, 7), source);
      EXPECT_THAT(slot_bytes_from(1, needed, size), ::testing::Each(guard));
      EXPECT_THAT(slot_bytes_from(0, 0, size), ::testing::Each(guard));
      EXPECT_TRUE(embedding.copy_of_both() == before);
      backend().release(1, 3);
    }
  }
}

TEST_P(MemoryBackendConformance, SlotOfExactlySlotBytesIsEnoughAndOneByteLessIsRefused) {
  const HostSlab host = slab(1000, 72);
  for (const bool low_halves : {false, true}) {
    const BlockSource source{.slabs = {host.source()}, .low_halves = low_halves};
    const std::size_t needed = backend().slot_bytes(source);
    attach(1, needed);
    fetch(0, 5, 2, source);
    expect_bound(backend().acquire(0, 5, 2), source);
    EXPECT_THAT(slot_bytes_from(0, needed, needed), ::testing::Each(guard));

    attach(1, needed - 1);
    expect_refused({"slot 0", "block 5", "version 2", std::to_string(needed), std::to_string(needed - 1)},
                   [&] { fetch(0, 5, 2, source); });
    // Nothing was written, and the slot is still free.
    EXPECT_THAT(slot_bytes_from(0, 0, needed), ::testing::Each(guard));
    expect_refused({"slot 0", "free"}, [&] { backend().acquire(0, 5, 2); });
  }
}

TEST_P(MemoryBackendConformance, SlotTakesNoMoreThanTheSlabRoundedToTheAlignment) {
  const HostSlab host = slab(6400, 128);
  const std::size_t plain = backend().slot_bytes({.slabs = {host.source()}, .low_halves = false});
  const std::size_t with_low = backend().slot_bytes({.slabs = {host.source()}, .low_halves = true});
  // Two parts of at most 255 padding bytes each.
  EXPECT_LE(plain, 2U * 6400 + 4 * 128 + 2 * 255);
  EXPECT_LE(with_low, 4U * (6400 + 128) + 2 * 255);
  EXPECT_GE(plain, 2U * 6400);
  EXPECT_GE(with_low, 4U * 6400);
}

TEST_P(MemoryBackendConformance, AcquireOfWhatTheSlotDoesNotHoldIsRefused) {
  const HostSlab host = slab(256, 64);
  const BlockSource source{.slabs = {host.source()}, .low_halves = false};
  attach(3, backend().slot_bytes(source));
  expect_refused({"slot 1", "block 3", "version 7", "free"}, [&] { backend().acquire(1, 3, 7); });
  fetch(1, 3, 7, source);
  expect_refused({"slot 1", "block 3", "version 8", "version 7"}, [&] { backend().acquire(1, 3, 8); });
  expect_refused({"slot 1", "block 4", "block 3"}, [&] { backend().acquire(1, 4, 7); });
  expect_refused({"slot 2", "block 3", "version 7"}, [&] { backend().acquire(2, 3, 7); });
  backend().release(1, 3);
  expect_refused({"slot 1", "block 3", "version 7", "free"}, [&] { backend().acquire(1, 3, 7); });
  expect_refused({"slot 1", "block -1"}, [&] { backend().acquire(1, -1, 0); });
}

TEST_P(MemoryBackendConformance, FetchOverASlotInUseIsRefusedAndLeavesItAlone) {
  const HostSlab first = slab(256, 64, 1);
  const HostSlab second = slab(256, 64, 2);
  const BlockSource source{.slabs = {first.source()}, .low_halves = false};
  attach(1, backend().slot_bytes(source));
  fetch(0, 3, 7, source);
  for (const int block : {3, 4}) {
    expect_refused({"slot 0", fmt::format("block {} version 8", block), "block 3 version 7"},
                   [&] { fetch(0, block, 8, {.slabs = {second.source()}, .low_halves = false}); });
  }
  expect_bound(backend().acquire(0, 3, 7), source);
}

TEST_P(MemoryBackendConformance, ReleaseOfWhatTheSlotDoesNotHoldIsRefused) {
  const HostSlab host = slab(256, 64);
  const BlockSource source{.slabs = {host.source()}, .low_halves = false};
  attach(2, backend().slot_bytes(source));
  expect_refused({"slot 0", "block 3", "free"}, [&] { backend().release(0, 3); });
  fetch(0, 3, 7, source);
  expect_refused({"slot 0", "block 4", "block 3", "version 7"}, [&] { backend().release(0, 4); });
  expect_bound(backend().acquire(0, 3, 7), source);
  backend().release(0, 3);
  expect_refused({"slot 0", "block 3", "free"}, [&] { backend().release(0, 3); });
  expect_refused({"slot 0", "block -1"}, [&] { backend().release(0, -1); });
}

TEST_P(MemoryBackendConformance, SlotsThatDoNotExistAreRefused) {
  const HostSlab host = slab(256, 64);
  const BlockSource source{.slabs = {host.source()}, .low_halves = false};
  attach(2, backend().slot_bytes(source));
  for (const int slot : {-1, 2, 1000}) {
    const std::string name = fmt::format("slot {}", slot);
    expect_refused({name, "block 3", "version 7"}, [&] { fetch(slot, 3, 7, source); });
    expect_refused({name, "block 3", "version 7"}, [&] { backend().acquire(slot, 3, 7); });
    expect_refused({name, "block 3"}, [&] { backend().release(slot, 3); });
  }
}

TEST_P(MemoryBackendConformance, ReleasedSlotTakesANewVersion) {
  HostSlab host = slab(1000, 72, 1);
  const BlockSource source{.slabs = {host.source()}, .low_halves = true};
  attach(2, backend().slot_bytes(source));
  for (std::int64_t version = 0; version < 4; ++version) {
    host.fill(static_cast<std::uint64_t>(10 + version));
    fetch(0, 3, version, source);
    // Any number of times.
    expect_bound(backend().acquire(0, 3, version), source);
    expect_bound(backend().acquire(0, 3, version), source);
    backend().release(0, 3);
  }
}

TEST_P(MemoryBackendConformance, SlotsHoldDifferentBlocksAtOnce) {
  const HostSlab first = slab(1000, 72, 1);
  const HostSlab second = slab(700, 64, 2);
  const BlockSource source_a{.slabs = {first.source()}, .low_halves = false};
  const BlockSource source_b{.slabs = {second.source()}, .low_halves = false};
  attach(2, std::max(backend().slot_bytes(source_a), backend().slot_bytes(source_b)));
  fetch(0, 1, 5, source_a);
  fetch(1, 2, 6, source_b);
  expect_bound(backend().acquire(0, 1, 5), source_a);
  expect_bound(backend().acquire(1, 2, 6), source_b);
  backend().release(0, 1);
  expect_bound(backend().acquire(1, 2, 6), source_b);
}

TEST_P(MemoryBackendConformance, CopiesGoToTheDeviceAndBack) {
  for (const std::size_t bytes : {1, 255, 4096, 1 << 20}) {
    const std::unique_ptr<DeviceRegion> region = device().allocate(bytes + 2 * guard_bytes);
    const std::vector<std::byte> pattern(region->bytes(), guard);
    backend().copy_to_device(region->data(), pattern.data(), pattern.size(), device().stream(Lane::h2d));
    std::vector<std::byte> values(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
      values[i] = static_cast<std::byte>(256.0 * uniform_at(3, bytes, i));
    device().synchronize();
    backend().copy_to_device(static_cast<std::byte*>(region->data()) + guard_bytes, values.data(), bytes,
                             device().stream(Lane::h2d));
    device().synchronize();
    std::vector<std::byte> expected = pattern;
    std::copy(values.begin(), values.end(), expected.begin() + guard_bytes);
    EXPECT_TRUE(read(region->data(), region->bytes()) == expected) << bytes << " B";
  }
}

/// As in a step: one thread fetches, the other acquires, reads and releases; events order them.
TEST_P(MemoryBackendConformance, FetchingThreadRunsAheadOfTheComputingOne) {
  constexpr int num_slots = 3;
  constexpr int num_blocks = 5;
  constexpr int rounds = 200;
  std::vector<HostSlab> slabs;
  std::vector<BlockSource> sources;
  std::size_t size = 0;
  for (int block = 0; block < num_blocks; ++block) {
    slabs.push_back(slab(512 + 64 * block, 64, static_cast<std::uint64_t>(block)));
    sources.push_back({.slabs = {slabs.back().source()}, .low_halves = block % 2 == 0});
    size = std::max(size, backend().slot_bytes(sources.back()));
  }
  attach(num_slots, size);
  std::vector<std::unique_ptr<Event>> fetched, released;
  for (int round = 0; round < rounds; ++round) {
    fetched.push_back(device().make_event());
    released.push_back(device().make_event());
    fetched.back()->reset();
    released.back()->reset();
  }
  const auto abandon_all = [&] {
    for (const auto* events : {&fetched, &released}) {
      for (const auto& event : *events) event->abandon();
    }
  };

  std::exception_ptr failure;
  std::thread fetcher([&] {
    try {
      const StreamView stream = device().stream(backend().fetch_lane());
      for (int round = 0; round < rounds; ++round) {
        const auto index = static_cast<std::size_t>(round);
        if (round >= num_slots) released[index - num_slots]->wait(stream);
        const int block = round % num_blocks;
        backend().fetch(round % num_slots, block, round, sources[static_cast<std::size_t>(block)], stream);
        fetched[index]->record(stream);
      }
    } catch (...) {
      failure = std::current_exception();
      abandon_all();
    }
  });
  std::string problem;
  try {
    const StreamView stream = device().stream(Lane::compute);
    for (int round = 0; round < rounds && !HasFailure(); ++round) {
      const auto index = static_cast<std::size_t>(round);
      fetched[index]->wait(stream);
      const int block = round % num_blocks;
      const BlockSource& source = sources[static_cast<std::size_t>(block)];
      const WeightBinding binding = backend().acquire(round % num_slots, block, round);
      const std::size_t bytes = 2 * static_cast<std::size_t>(source.slabs[0].num_matrix_elements);
      std::vector<std::byte> copy(bytes);
      backend().copy_to_host(copy.data(), binding.at(0).matrix_hi, bytes, stream);
      device().synchronize();
      EXPECT_EQ(std::memcmp(copy.data(), source.slabs[0].hi, bytes), 0) << "round " << round;
      backend().release(round % num_slots, block);
      released[index]->record(stream);
    }
  } catch (const std::exception& error) {
    problem = error.what();
  }
  if (!problem.empty() || HasFailure()) abandon_all();
  fetcher.join();
  EXPECT_EQ(problem, "");
  if (failure && problem.empty()) std::rethrow_exception(failure);
}

}  // namespace layerstream::test

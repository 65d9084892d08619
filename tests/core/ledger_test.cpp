#include "core/ledger.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"

namespace layerstream {
namespace {

using ::testing::HasSubstr;

struct alignas(Arena::alignment) Memory {
  std::byte bytes[16384];
};

/// A layout such as a block's: odd sizes, several components, one of them twice.
void lay_out(Arena& arena) {
  arena.allocate(1, "weights");
  arena.tensor(DType::bf16, {3, 5, 7}, "weights");
  arena.tensor(DType::f32, {129}, "moments");
  arena.allocate(0, "nothing");
  arena.allocate(256, "gradients");
}

TEST(Ledger, KeepsOneLinePerSpaceAndComponentInOrderOfFirstMention) {
  Ledger ledger;
  ledger.add(Space::host, "moments", 10);
  ledger.add(Space::device, "slots", 5);
  ledger.add(Space::host, "moments", 3);
  ledger.add(Space::device, "moments", 2);
  ASSERT_EQ(ledger.lines().size(), 3u);
  EXPECT_EQ(ledger.lines()[0].component, "moments");
  EXPECT_EQ(ledger.lines()[0].bytes, 13u);
  EXPECT_EQ(ledger.lines()[1].component, "slots");
  EXPECT_EQ(ledger.total(Space::host), 13u);
  EXPECT_EQ(ledger.total(Space::device), 7u);
}

TEST(Ledger, TableNamesEveryComponentAndBothTotals) {
  Ledger ledger;
  ledger.add(Space::host, "moments", 3 << 20);
  ledger.add(Space::device, "slots", 1536);
  const std::string table = ledger.to_table();
  for (const char* const text : {"moments", "3.00 MiB", "3145728", "slots", "1.50 KiB", "1536", "total"}) {
    EXPECT_THAT(table, HasSubstr(text));
  }
}

TEST(Arena, ADryRunHasTheSameSizesAndLedgerAsTheRealRun) {
  Ledger planned, held;
  Arena dry = Arena::dry(Space::host, planned);
  lay_out(dry);
  Memory memory;
  Arena real(Space::host, memory.bytes, dry.used(), held);
  lay_out(real);
  EXPECT_TRUE(dry.is_dry());
  EXPECT_FALSE(real.is_dry());
  EXPECT_EQ(dry.used(), real.used());
  EXPECT_EQ(planned.to_table(), held.to_table());
  EXPECT_EQ(planned.total(Space::host), dry.used());
}

TEST(Arena, PiecesAreAlignedDisjointAndInsideTheRegion) {
  Memory memory;
  Ledger ledger;
  Arena arena(Space::host, memory.bytes, sizeof(memory.bytes), ledger);
  std::byte* free_from = memory.bytes;
  for (const std::size_t bytes : {1, 255, 256, 257, 1000}) {
    auto* const piece = static_cast<std::byte*>(arena.allocate(bytes, "piece"));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece) % Arena::alignment, 0u);
    EXPECT_GE(piece, free_from);
    free_from = piece + bytes;
  }
  EXPECT_LE(free_from, memory.bytes + sizeof(memory.bytes));
}

TEST(Arena, ThrowsWhenTheRegionIsExhaustedAndNamesTheComponent) {
  Memory memory;
  Ledger ledger;
  Arena arena(Space::host, memory.bytes, 1024, ledger);
  arena.allocate(768, "fits");
  try {
    arena.allocate(257, "too much");
    FAIL() << "the arena gave out more than it has";
  } catch (const ContractError& error) {
    EXPECT_THAT(error.what(), HasSubstr("too much"));
    EXPECT_THAT(error.what(), HasSubstr("1024"));
  }
  EXPECT_EQ(arena.used(), 768u);
  EXPECT_EQ(ledger.total(Space::host), 768u);
  EXPECT_NO_THROW(arena.allocate(256, "fits exactly"));
}

TEST(Arena, RefusesMemoryThatIsMissingOrNotAligned) {
  Memory memory;
  Ledger ledger;
  EXPECT_THROW(Arena(Space::host, nullptr, 1024, ledger), ContractError);
  EXPECT_THROW(Arena(Space::host, memory.bytes + 64, 1024, ledger), ContractError);
}

TEST(FormatBytes, UsesBinaryUnits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(std::size_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(format_bytes(std::size_t{5} << 50), "5120.00 TiB");
}

}  // namespace
}  // namespace layerstream

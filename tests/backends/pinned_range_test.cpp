// Pinning that fails half-way: what is kept, what is told, and that nothing stays pinned by mistake.

#include "backends/pinned_range.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <vector>

#include "core/error.hpp"
#include "core/ledger.hpp"
#include "tests/support/message_of.hpp"

namespace layerstream::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr std::size_t page = 4096;

/// A driver that pins nothing and remembers everything.
class FakeDriver {
 public:
  /// Refuses the `number`-th call to pin, counted from 0, and all later ones.
  void refuse_from(int number) { refused_from_ = number; }

  PinCalls calls() {
    return {
        .pin = [this](void* data, std::size_t bytes) -> std::string {
          if (num_pins_++ >= refused_from_) return "no more locked memory";
          EXPECT_TRUE(pinned_.emplace(data, bytes).second) << "pinned twice";
          return {};
        },
        .unpin = [this](void* data) { EXPECT_EQ(pinned_.erase(data), 1U) << "unpinned, but not pinned"; }};
  }
  const std::map<void*, std::size_t>& pinned() const { return pinned_; }
  int num_pins() const { return num_pins_; }

 private:
  std::map<void*, std::size_t> pinned_;
  int num_pins_ = 0;
  int refused_from_ = 1 << 30;
};

class PinnedRangeTest : public ::testing::Test {
 protected:
  /// Three whole pieces of two pages and a part of one: 7 pages and 100 bytes.
  static constexpr std::size_t piece = 2 * page;
  static constexpr std::size_t bytes = 7 * page + 100;

  std::byte* at(std::size_t offset) { return memory_.data() + offset; }
  PinnedRange range(bool required = false, std::function<void(std::size_t, std::size_t)> progress = {}) {
    return {memory_.data(),
            bytes,
            driver_.calls(),
            {.required = required, .piece_bytes = piece, .progress = std::move(progress)}};
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(bytes + page);
  FakeDriver driver_;
};

TEST_F(PinnedRangeTest, AllOfItIsPinnedPieceByPieceAndUnpinnedAtTheEnd) {
  {
    const PinnedRange pinned = range();
    EXPECT_EQ(pinned.pinned_bytes(), bytes);
    EXPECT_EQ(pinned.shortfall(), "");
    EXPECT_THAT(driver_.pinned(), ElementsAre(Pair(at(0), piece), Pair(at(piece), piece),
                                              Pair(at(2 * piece), piece), Pair(at(3 * piece), page + 100)));
  }
  EXPECT_TRUE(driver_.pinned().empty());
}

TEST_F(PinnedRangeTest, RefusedAtTheNthPieceItKeepsThoseBeforeAndSaysHowManyAndWhy) {
  for (int n = 0; n < 4; ++n) {
    SCOPED_TRACE(n);
    driver_ = {};
    driver_.refuse_from(n);
    {
      const PinnedRange pinned = range();
      EXPECT_EQ(pinned.pinned_bytes(), static_cast<std::size_t>(n) * piece);
      EXPECT_EQ(driver_.pinned().size(), static_cast<std::size_t>(n));
      EXPECT_EQ(driver_.num_pins(), n + 1) << "asked again after a refusal";
      EXPECT_THAT(pinned.shortfall(),
                  AllOf(HasSubstr(fmt::format("after {} of {}", format_bytes(pinned.pinned_bytes()),
                                              format_bytes(bytes))),
                        HasSubstr("no more locked memory"), HasSubstr("ulimit -l")));
    }
    EXPECT_TRUE(driver_.pinned().empty());
  }
}

TEST_F(PinnedRangeTest, WhenRequiredARefusalAtTheNthPieceNamesBytesAndLimitAndLeavesNothingPinned) {
  for (int n = 0; n < 4; ++n) {
    SCOPED_TRACE(n);
    driver_ = {};
    driver_.refuse_from(n);
    EXPECT_THAT(
        message_of<ResourceError>([&] { range(true); }),
        AllOf(HasSubstr(fmt::format("after {} of {}", format_bytes(static_cast<std::size_t>(n) * piece),
                                    format_bytes(bytes))),
              HasSubstr("no more locked memory"),
              ::testing::ContainsRegex("limit \\(ulimit -l\\): (unlimited|[0-9.]+ [KMGT]?i?B)"),
              HasSubstr("pin_memory: auto")));
    EXPECT_TRUE(driver_.pinned().empty());
  }
  driver_ = {};
  driver_.refuse_from(4);  // there are four pieces
  EXPECT_NO_THROW(range(true));
}

TEST_F(PinnedRangeTest, ProgressIsToldAfterEachPiece) {
  std::vector<std::size_t> told;
  const auto note = [&](std::size_t done, std::size_t total) {
    EXPECT_EQ(total, bytes);
    told.push_back(done);
  };
  range(false, note);
  EXPECT_THAT(told, ElementsAre(piece, 2 * piece, 3 * piece, bytes));
  told.clear();
  driver_.refuse_from(driver_.num_pins() + 2);
  range(false, note);
  EXPECT_THAT(told, ElementsAre(piece, 2 * piece));
}

TEST_F(PinnedRangeTest, WhenProgressThrowsNothingStaysPinned) {
  for (const std::size_t stop_at : {piece, 3 * piece, bytes}) {
    EXPECT_THAT(message_of<std::runtime_error>([&] {
                  range(false, [&](std::size_t done, std::size_t) {
                    if (done == stop_at) throw std::runtime_error("stopped by a signal");
                  });
                }),
                HasSubstr("stopped by a signal"));
    EXPECT_TRUE(driver_.pinned().empty());
  }
}

TEST_F(PinnedRangeTest, NothingToPinIsNoCallAndNoShortfall) {
  const PinnedRange pinned(memory_.data(), 0, driver_.calls(), {.required = true});
  EXPECT_EQ(pinned.pinned_bytes(), 0U);
  EXPECT_EQ(pinned.shortfall(), "");
  EXPECT_EQ(driver_.num_pins(), 0);
  EXPECT_FALSE(pinned.contains(memory_.data()));
}

TEST_F(PinnedRangeTest, ContainsItsBytesAndNoOthers) {
  const PinnedRange pinned = range();
  EXPECT_TRUE(pinned.contains(at(0)));
  EXPECT_TRUE(pinned.contains(at(bytes - 1)));
  EXPECT_FALSE(pinned.contains(at(bytes)));
  EXPECT_FALSE(pinned.contains(at(0) - 1));
  EXPECT_FALSE(pinned.contains(nullptr));
}

TEST_F(PinnedRangeTest, RunsEndWithPiecesAndWithTheRange) {
  const PinnedRange pinned = range();
  const auto expect_run = [&](std::size_t offset, std::size_t length) {
    const PinnedRange::Run run = pinned.run_from(at(offset));
    EXPECT_EQ(run.bytes, length) << offset;
    EXPECT_TRUE(run.pinned) << offset;
  };
  expect_run(0, piece);
  expect_run(1, piece - 1);
  expect_run(piece - 1, 1);
  expect_run(piece, piece);
  expect_run(3 * piece, page + 100);
  expect_run(bytes - 1, 1);
}

TEST_F(PinnedRangeTest, BehindTheLastPinnedPieceTheRestIsOneRunThatIsNotPinned) {
  driver_.refuse_from(2);
  const PinnedRange pinned = range();
  EXPECT_EQ(pinned.run_from(at(piece)).bytes, piece);
  EXPECT_TRUE(pinned.run_from(at(2 * piece - 1)).pinned);
  EXPECT_EQ(pinned.run_from(at(2 * piece - 1)).bytes, 1U);
  EXPECT_FALSE(pinned.run_from(at(2 * piece)).pinned);
  EXPECT_EQ(pinned.run_from(at(2 * piece)).bytes, bytes - 2 * piece);
  EXPECT_EQ(pinned.run_from(at(bytes - 1)).bytes, 1U);
}

/// Any copy, cut at the ends of runs, covers its bytes once, and no cut crosses what the driver pinned.
TEST_F(PinnedRangeTest, WalkingByRunsNeverCrossesWhatWasPinnedInOneCall) {
  for (int n = 0; n <= 4; ++n) {
    driver_ = {};
    driver_.refuse_from(n);
    const PinnedRange pinned = range();
    for (std::size_t first = 0; first < bytes; first += 1000) {
      std::size_t offset = first;
      while (offset < bytes) {
        const PinnedRange::Run run = pinned.run_from(at(offset));
        ASSERT_GT(run.bytes, 0U);
        if (run.pinned) {
          auto owner = driver_.pinned().upper_bound(at(offset));
          ASSERT_NE(owner, driver_.pinned().begin());
          --owner;
          EXPECT_LE(at(offset) + run.bytes, static_cast<std::byte*>(owner->first) + owner->second);
        }
        offset += run.bytes;
      }
      EXPECT_EQ(offset, bytes);
    }
  }
}

}  // namespace
}  // namespace layerstream::test

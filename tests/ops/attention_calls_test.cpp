#include "ops/detail/attention_calls.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.hpp"
#include "core/random.hpp"
#include "ops/detail/attention_written.hpp"
#include "tests/ops/attention_reference.hpp"

namespace layerstream::test {
namespace {

using ops::AttentionSegment;
using ops::detail::AttentionCall;
using ops::detail::AttentionCost;
using ops::detail::AttentionMask;
using ops::detail::AttentionWorkspaceLayout;
using ops::detail::Interval;
using Part = AttentionCall::QueryGradient;

struct Case {
  const char* name;
  AttentionCost cost;
  std::vector<AttentionSegment> segments;

  std::int64_t num_queries() const {
    std::int64_t end = 0;
    for (const AttentionSegment& s : segments) end = std::max(end, s.first_query + s.num_queries);
    return end;
  }
  std::int64_t num_keys() const {
    std::int64_t end = 0;
    for (const AttentionSegment& s : segments) end = std::max(end, s.first_key + s.num_keys);
    return end;
  }
  ops::AttentionLimits limits() const {
    const ops::detail::AttentionShape shape{cost.heads, cost.key_heads, cost.head_dim, 1.0,
                                            cost.deterministic};
    return shape.limits(DType::bf16, num_queries(), num_keys(), segments);
  }
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

std::vector<AttentionSegment> squares(std::initializer_list<std::int64_t> lengths, std::int64_t earlier = 0) {
  std::vector<AttentionSegment> segments;
  std::int64_t at = 0;
  for (const std::int64_t length : lengths) {
    segments.push_back({at, length, at + earlier, length});
    at += length;
  }
  return segments;
}

constexpr AttentionCost qwen{28, 4, 128, true};
constexpr AttentionCost small_tiles{8192, 4096, 8, true};  // 256 by 256

std::vector<Case> all_cases() {
  return {
      {"rows of one length", qwen, squares({256, 256, 256})},
      {"rows of one length under a window", qwen, under_window(100, squares({256, 256}))},
      {"rows of one odd length", qwen, squares({250, 250, 250})},
      {"one token", qwen, squares({1})},
      {"documents", qwen, squares({300, 5, 129, 1, 64, 257, 128, 0, 900})},
      {"documents under a window", qwen, under_window(70, squares({300, 5, 129, 1, 64, 257, 128, 900}))},
      {"documents late in a row", qwen, squares({300, 5, 129}, 1000)},
      {"chunk of a row", qwen, {{0, 512, 0, 2048}}},
      {"odd chunk of a row", qwen, {{0, 300, 0, 1111}}},
      {"one query of many", qwen, {{0, 1, 0, 3000}}},
      {"one query under a window", qwen, under_window(40, {{0, 1, 0, 3000}})},
      {"chunk under a window", qwen, under_window(200, {{0, 300, 0, 1111}})},
      {"chunk under a window of one", qwen, under_window(1, {{0, 300, 0, 1111}})},
      {"chunk, then documents", qwen, {{0, 90, 120, 370}, {90, 150, 490, 150}, {240, 60, 640, 60}}},
      {"shared keys", qwen, {{0, 50, 0, 180}, {50, 70, 0, 250}, {120, 30, 100, 30}}},
      {"any order", qwen, {{50, 40, 10, 40}, {0, 50, 100, 280}, {90, 10, 0, 10}}},
      {"row of tiles", small_tiles, squares({1024})},
      {"odd row of tiles", small_tiles, squares({1000})},
      {"rows of tiles", small_tiles, squares({512, 512})},
      {"documents of tiles", small_tiles, squares({10, 700, 256, 90})},
      {"chunk of tiles", small_tiles, {{0, 600, 0, 1300}}},
      {"chunk of tiles under a window", small_tiles, under_window(300, {{0, 600, 0, 1300}})},
      {"rectangle", qwen, {{0, 300, 7, 40, false}}},
      {"rectangle of tiles", small_tiles, {{0, 600, 0, 700, false}}},
      {"first keys and a window",
       qwen,
       {{0, 90, 0, 590}, {90, 310, 0, 30, false}, {90, 310, 30, 870, true, 560}}},
      {"first keys and blocks",
       qwen,
       {{0, 100, 0, 20, false},
        {0, 100, 200, 300},
        {100, 128, 0, 20, false},
        {100, 128, 300, 328},
        {228, 40, 0, 20, false},
        {228, 40, 428, 240}}},
      {"documents with first keys and windows",
       qwen,
       {{0, 300, 0, 300},
        {300, 90, 0, 50, false},
        {300, 90, 50, 340, true, 250},
        {390, 17, 390, 17},
        {407, 300, 407, 300},
        {707, 1, 407, 50, false},
        {707, 1, 457, 251, true, 250}}},
      {"ranges of tiles under a window",
       small_tiles,
       {{0, 700, 0, 300, false}, {0, 700, 300, 1000, true, 400}}},
      {"ranges of tiles",
       small_tiles,
       {{0, 700, 900, 800}, {0, 700, 300, 600, false}, {0, 700, 0, 1, false}}},
      {"not deterministic", {28, 4, 128, false}, squares({300, 5, 129, 512})},
  };
}

class AttentionCalls : public ::testing::TestWithParam<Case> {
 protected:
  const Case& c = GetParam();
  std::vector<AttentionCall> forward() const { return ops::detail::attention_forward_calls(c.segments); }
  std::vector<AttentionCall> backward() const {
    return ops::detail::attention_backward_calls(c.segments, c.cost);
  }
};

/// How often each query (rows) meets each key (columns).
using Meetings = std::vector<std::vector<int>>;

void meet(Meetings& meetings, const AttentionSegment& segment, AttentionMask mask, std::int64_t window) {
  for (std::int64_t i = 0; i < segment.num_queries; ++i) {
    // As cuDNN defines its masks: a diagonal from the top left or to the bottom right of the entry.
    const std::int64_t diagonal =
        mask == AttentionMask::bottom_right ? i + segment.num_keys - segment.num_queries : i;
    for (std::int64_t j = 0; j < segment.num_keys; ++j) {
      if (mask != AttentionMask::none && j > diagonal) continue;
      if (window > 0 && j + window <= diagonal) continue;
      ++meetings[static_cast<std::size_t>(segment.first_query + i)]
                [static_cast<std::size_t>(segment.first_key + j)];
    }
  }
}

Meetings expected_meetings(const Case& c) {
  Meetings meetings(static_cast<std::size_t>(c.num_queries()),
                    std::vector<int>(static_cast<std::size_t>(c.num_keys())));
  for (const AttentionSegment& segment : c.segments) {
    for (std::int64_t i = 0; i < segment.num_queries; ++i) {
      const Interval visible = ops::detail::visible_keys(segment, i);
      for (std::int64_t j = visible.begin; j < visible.end; ++j) {
        ++meetings[static_cast<std::size_t>(segment.first_query + i)]
                  [static_cast<std::size_t>(segment.first_key + j)];
      }
    }
  }
  return meetings;
}

Meetings meetings_of(const Case& c, const std::vector<AttentionCall>& calls) {
  Meetings meetings(static_cast<std::size_t>(c.num_queries()),
                    std::vector<int>(static_cast<std::size_t>(c.num_keys())));
  for (const AttentionCall& call : calls) {
    for (const AttentionSegment& entry : call.entries) meet(meetings, entry, call.mask, call.window);
  }
  return meetings;
}

TEST_P(AttentionCalls, MeetEachVisiblePairOnce) {
  EXPECT_EQ(meetings_of(c, forward()), expected_meetings(c));
  EXPECT_EQ(meetings_of(c, backward()), expected_meetings(c));
}

TEST_P(AttentionCalls, FitTheirPlans) {
  for (const auto& calls : {forward(), backward()}) {
    for (const AttentionCall& call : calls) {
      ASSERT_FALSE(call.entries.empty());
      const auto count = static_cast<std::int64_t>(call.entries.size());
      EXPECT_TRUE(call.ragged ? call.batch >= count && call.batch <= ops::detail::attention_call_entries
                              : call.batch == count);
      std::int64_t query = call.first_query();
      for (const AttentionSegment& entry : call.entries) {
        EXPECT_GT(entry.num_queries, 0);
        EXPECT_EQ(entry.first_key - entry.first_query, call.first_key() - call.first_query());
        if (call.mask == AttentionMask::causal) {
          EXPECT_EQ(entry.num_queries, entry.num_keys);
        }
        if (call.ragged) {
          EXPECT_GE(entry.first_query, query);
          EXPECT_LE(entry.num_queries, call.queries);
          EXPECT_LE(entry.num_keys, call.keys);
        } else {
          EXPECT_EQ(entry.first_query, query);
          EXPECT_EQ(entry.num_queries, call.queries);
          EXPECT_EQ(entry.num_keys, call.keys);
        }
        query = entry.first_query + entry.num_queries;
      }
    }
  }
}

TEST_P(AttentionCalls, FitTheWorkspace) {
  const AttentionWorkspaceLayout layout(c.limits());
  const auto within = [&](std::size_t begin, std::size_t end, std::int64_t bytes) {
    EXPECT_LE(begin + static_cast<std::size_t>(bytes), end);
  };
  EXPECT_EQ(layout.bytes, layout.plan + (layout.plan_bytes + 255) / 256 * 256);
  for (const AttentionCall& call : forward()) {
    EXPECT_LE(c.cost.forward_bytes(call.batch), layout.plan_bytes);
    if (!call.joins) continue;
    within(layout.lse, layout.dk, 4 * (call.first_query() + call.query_rows()) * c.cost.heads);
    within(layout.dq, layout.dq_sum, 2 * call.query_rows() * c.cost.heads * c.cost.head_dim);
  }
  for (const AttentionCall& call : backward()) {
    const std::size_t bytes = c.cost.backward_bytes(call.batch, call.queries, call.keys);
    EXPECT_LE(bytes, layout.plan_bytes);
    EXPECT_LE(bytes, ops::detail::attention_plan_bytes);
    if (!call.ragged) within(layout.lse, layout.dk, 4 * call.batch * call.queries * c.cost.heads);
    within(layout.dk, layout.dv, 2 * call.key_rows() * c.cost.key_heads * c.cost.head_dim);
    within(layout.dv, layout.dq, 2 * call.key_rows() * c.cost.key_heads * c.cost.head_dim);
    if (call.query_gradient == Part::whole) continue;
    within(layout.dq, layout.dq_sum, 2 * call.query_rows() * c.cost.heads * c.cost.head_dim);
    within(layout.dq_sum, layout.plan, 4 * call.query_rows() * c.cost.heads * c.cost.head_dim);
  }
}

TEST_P(AttentionCalls, GatherEachQueryGradientInARow) {
  const std::vector<AttentionCall> calls = backward();
  std::vector<int> finished(static_cast<std::size_t>(c.num_queries()));
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Part part = calls[i].query_gradient;
    if (part == Part::next || part == Part::last) {
      ASSERT_GT(i, 0u);
      EXPECT_TRUE(calls[i - 1].query_gradient == Part::first || calls[i - 1].query_gradient == Part::next);
      EXPECT_EQ(calls[i - 1].first_query(), calls[i].first_query());
      EXPECT_EQ(calls[i - 1].query_rows(), calls[i].query_rows());
    }
    if (part != Part::whole && part != Part::last) continue;
    for (const AttentionSegment& entry : calls[i].entries) {
      for (std::int64_t q = 0; q < entry.num_queries; ++q) {
        ++finished[static_cast<std::size_t>(entry.first_query + q)];
      }
    }
  }
  EXPECT_EQ(finished, std::vector<int>(static_cast<std::size_t>(c.num_queries()), 1));
}

TEST_P(AttentionCalls, WriteEachOutputOnceAndThenJoin) {
  std::vector<bool> written(static_cast<std::size_t>(c.num_queries()));
  for (const AttentionCall& call : forward()) {
    EXPECT_TRUE(!call.joins || call.entries.size() == 1);
    for (const AttentionSegment& entry : call.entries) {
      for (std::int64_t q = entry.first_query; q < entry.first_query + entry.num_queries; ++q) {
        EXPECT_EQ(written[static_cast<std::size_t>(q)], call.joins) << "query " << q;
        written[static_cast<std::size_t>(q)] = true;
      }
    }
  }
  EXPECT_EQ(written, std::vector<bool>(written.size(), true));
}

TEST_P(AttentionCalls, OverwriteEachKeyOnceAndThenAdd) {
  const auto keys = static_cast<std::size_t>(c.num_keys());
  std::vector<int> expected(keys);
  std::vector<std::optional<int>> parts(keys);  // in the sum of each key's gradient; none: whatever was there
  ops::detail::WrittenKeys written;
  const auto clear = [&](const std::vector<Interval>& runs) {
    for (const Interval run : runs) {
      for (std::int64_t key = run.begin; key < run.end; ++key) {
        EXPECT_FALSE(parts[static_cast<std::size_t>(key)].has_value());
        parts[static_cast<std::size_t>(key)] = 0;
      }
    }
  };
  for (const AttentionCall& call : backward()) {
    const auto step = written.write(call);
    clear(step.clear);
    for (const AttentionSegment& entry : call.entries) {
      for (std::int64_t key = entry.first_key; key < entry.first_key + entry.num_keys; ++key) {
        std::optional<int>& part = parts[static_cast<std::size_t>(key)];
        EXPECT_EQ(part.has_value(), !step.store);
        part = part.value_or(0) + 1;
        ++expected[static_cast<std::size_t>(key)];
      }
    }
  }
  clear(written.mark({0, c.num_keys()}));
  EXPECT_TRUE(written.mark({0, c.num_keys()}).empty());
  EXPECT_EQ(std::vector<std::optional<int>>(expected.begin(), expected.end()), parts);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionCalls, ::testing::ValuesIn(all_cases()));

TEST(AttentionCallsOfOneChunk, StoreAllTheirKeyGradients) {
  for (const auto& segments : {squares({1024, 1024, 1024}), squares({300, 5, 129, 900}), squares({8192})}) {
    ops::detail::WrittenKeys written;
    for (const AttentionCall& call : ops::detail::attention_backward_calls(segments, qwen)) {
      const auto step = written.write(call);
      EXPECT_TRUE(step.store);
      EXPECT_TRUE(step.clear.empty());
    }
  }
}

TEST(WrittenKeys, RemembersWhichRowsItWasToldOf) {
  for (std::uint64_t round = 0; round < 200; ++round) {
    ops::detail::WrittenKeys written;
    std::vector<bool> seen(60);
    for (std::uint64_t i = 0; i < 12; ++i) {
      const auto begin = static_cast<std::int64_t>(40.0 * uniform_at(1, round, 2 * i));
      const auto end = begin + 1 + static_cast<std::int64_t>(15.0 * uniform_at(1, round, 2 * i + 1));
      std::vector<bool> fresh(60), told(60);
      for (const Interval gap : written.mark({begin, end})) {
        ASSERT_LT(gap.begin, gap.end);
        for (std::int64_t row = gap.begin; row < gap.end; ++row) told[static_cast<std::size_t>(row)] = true;
      }
      for (auto row = static_cast<std::size_t>(begin); row < static_cast<std::size_t>(end); ++row) {
        fresh[row] = !seen[row];
        seen[row] = true;
      }
      ASSERT_EQ(told, fresh);
    }
  }
}

TEST(AttentionBackwardCalls, AreFewForUniformRows) {
  const auto calls = [](std::int64_t rows, std::int64_t length) {
    std::vector<AttentionSegment> segments;
    for (std::int64_t row = 0; row < rows; ++row) {
      segments.push_back({row * length, length, row * length, length});
    }
    return ops::detail::attention_backward_calls(segments, qwen).size();
  };
  EXPECT_EQ(calls(8, 1024), 1u);
  EXPECT_EQ(calls(16, 1024), 1u);
  EXPECT_EQ(calls(4, 4096), 1u);
  EXPECT_EQ(calls(1, 8192), 1u);
  EXPECT_EQ(calls(1, 16384), 3u);  // two squares and what lies between them
}

TEST(AttentionCallsOfRandomPacks, FitTheWorkspaceOfTheirLimitsAndNeedFewPlans) {
  constexpr std::int64_t tokens = 8192;
  const AttentionWorkspaceLayout layout(
      {qwen.heads, qwen.key_heads, qwen.head_dim, DType::bf16, tokens, tokens, 0, true, 4000});
  std::set<std::tuple<std::int64_t, std::int64_t, std::int64_t, AttentionMask, bool>> plans;
  for (std::uint64_t pack = 0; pack < 200; ++pack) {
    std::vector<AttentionSegment> segments;
    for (std::int64_t at = 0; at < tokens;) {
      const double uniform = uniform_at(1, pack, segments.size());
      const auto length =
          std::min(tokens - at, std::int64_t{1} + static_cast<std::int64_t>(4000 * uniform * uniform));
      segments.push_back({at, length, at, length});
      at += length;
    }
    for (const AttentionCall& call : ops::detail::attention_backward_calls(segments, qwen)) {
      ASSERT_LE(qwen.backward_bytes(call.batch, call.queries, call.keys), layout.plan_bytes);
      plans.emplace(call.batch, call.queries, call.keys, call.mask, call.ragged);
    }
  }
  // Six buckets, each with a handful of batches.
  EXPECT_LE(plans.size(), 30u);
}

TEST(AttentionCost, OfASquareIsWhatCudnn919AsksForOnHopper) {
  // cuDNN 9.19 for sm_90; the bound adds a little for ragged batches.
  const auto expect_near = [](std::size_t bound, std::size_t asked) {
    EXPECT_GE(bound, asked);
    EXPECT_LE(bound, asked + (64u << 10));
  };
  expect_near(qwen.backward_bytes(8, 1024, 1024), 588'120'320);
  expect_near(qwen.backward_bytes(1, 8192, 8192), 3'876'454'656);
  expect_near(qwen.backward_bytes(1, 2000, 8100), 1'055'869'952);
  expect_near((AttentionCost{28, 4, 128, false}).backward_bytes(1, 8192, 8192), 235'798'784);
  expect_near((AttentionCost{28, 28, 128, true}).backward_bytes(8, 1024, 1024), 470'679'808);
}

TEST(AttentionWorkspaceLayout, IsBoundedHoweverLongTheRow) {
  const auto bytes = [](std::int64_t keys, std::int64_t window) {
    return AttentionWorkspaceLayout({28, 4, 128, DType::bf16, 8192, keys, window}).bytes;
  };
  constexpr std::size_t most = ops::detail::attention_plan_bytes + (std::size_t{300} << 20);
  EXPECT_EQ(bytes(std::int64_t{1} << 19, 0), bytes(8192, 0));
  EXPECT_LE(bytes(8192, 0), most);
  EXPECT_LE(bytes(std::int64_t{1} << 19, 4096), most);
}

TEST(AttentionWorkspaceLayout, ShrinksWithTheLongestSegmentAndTheTokens) {
  const auto bytes = [](std::int64_t tokens, std::int64_t longest) {
    return AttentionWorkspaceLayout({28, 4, 128, DType::bf16, tokens, tokens, 0, true, longest}).bytes;
  };
  EXPECT_EQ(bytes(8192, 0), bytes(8192, 8192));
  EXPECT_LE(bytes(8192, 1024), std::size_t{1400} << 20);
  EXPECT_LE(bytes(2048, 0), std::size_t{700} << 20);
  for (std::int64_t longest = 1; longest < 8192; longest += 97) {
    EXPECT_LE(bytes(8192, longest), bytes(8192, longest + 97)) << longest;
  }
}

TEST(AttentionCallsUnderAHugeWindow, AreRefusedWithTheBytesTheyWouldNeed) {
  const auto calls = [](std::int64_t window) {
    const std::vector<AttentionSegment> row = under_window(window, {{0, 128, 0, 1 << 20}});
    return ops::detail::attention_backward_calls(row, qwen);
  };
  EXPECT_THROW(calls(1 << 19), ResourceError);
  EXPECT_NO_THROW(calls(1 << 15));
}

}  // namespace
}  // namespace layerstream::test

#include "longctx/attention_pattern.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "longctx/chunk_plan.hpp"
#include "tests/ops/attention_reference.hpp"
#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

/// Sparse patterns against their definition as a mask.
namespace layerstream::test {
namespace {

using ops::AttentionSegment;
using Type = AttentionPatternType;

struct Named {
  std::string name;
  AttentionPattern pattern;
};
void PrintTo(const Named& named, std::ostream* out) {
  *out << named.name;
}

AttentionPattern window(std::int64_t size, std::int64_t global_tokens) {
  return {.type = Type::window, .window = size, .global_tokens = global_tokens};
}

AttentionPattern blocks(std::int64_t size, std::int64_t local, std::int64_t global_tokens) {
  return {.type = Type::blocks, .block = size, .local_blocks = local, .global_tokens = global_tokens};
}

std::vector<Named> patterns() {
  return {{"full", {}},
          {"window", window(7, 0)},
          {"window_of_one", window(1, 0)},
          {"sinks_and_window", window(7, 3)},
          {"one_sink_and_window_of_one", window(1, 1)},
          {"more_sinks_than_window", window(2, 11)},
          {"window_wider_than_any_document", window(1000, 4)},
          {"own_block", blocks(5, 1, 0)},
          {"three_blocks", blocks(4, 3, 0)},
          {"sinks_within_a_block", blocks(6, 2, 4)},
          {"sinks_of_whole_blocks", blocks(4, 2, 8)},
          {"sinks_across_a_block", blocks(4, 1, 9)},
          {"blocks_of_one", blocks(1, 2, 1)},
          {"more_sinks_than_tokens", blocks(8, 1, 500)}};
}

/// The definition, for query i and key j of one document.
bool sees(const AttentionPattern& pattern, std::int64_t i, std::int64_t j) {
  if (j > i) return false;
  if (pattern.type == Type::full || j < pattern.global_tokens) return true;
  if (pattern.type == Type::window) return i - j < pattern.window;
  return j / pattern.block > i / pattern.block - pattern.local_blocks;
}

/// A row of packed documents, longer and shorter than any span of the patterns.
constexpr std::int64_t row_length = 90;
const std::vector<std::int64_t> document_starts = {0, 37, 38, 45, 72};

TokenRow packed_row() {
  TokenRow row;
  row.input_ids.assign(row_length, 0);
  row.targets.assign(row_length, -100);
  row.document_starts = document_starts;
  return row;
}

ChunkPlan plan_of(std::int64_t chunk_tokens) {
  const std::vector<TokenRow> rows{packed_row()};
  return make_chunk_plan(rows, chunk_tokens);
}

/// What each token of the row sees by the definition, ascending.
std::vector<KeyRows> defined_rows(const AttentionPattern& pattern) {
  std::vector<KeyRows> rows(row_length);
  for (std::int64_t i = 0; i < row_length; ++i) {
    const std::int64_t start = *std::prev(std::ranges::upper_bound(document_starts, i));
    for (std::int64_t j = start; j <= i; ++j) {
      if (sees(pattern, i - start, j - start)) rows[static_cast<std::size_t>(i)].push_back(j);
    }
  }
  return rows;
}

class SparseAttention : public ::testing::TestWithParam<Named> {
 protected:
  const AttentionPattern& pattern = GetParam().pattern;

  AttentionCase case_of(const Chunk& chunk) const {
    return {"",
            4,
            2,
            16,
            chunk.num_tokens,
            chunk.offset_in_group + chunk.num_tokens,
            apply_pattern(pattern, chunk.segments)};
  }
  AttentionCase whole() const { return case_of(plan_of(row_length).chunks.front()); }
};

TEST_P(SparseAttention, RunsMeetThePairsOfTheMaskOnceHoweverTheRowIsCut) {
  const std::vector<KeyRows> expected = defined_rows(pattern);
  for (std::int64_t chunk_tokens = 1; chunk_tokens <= row_length; ++chunk_tokens) {
    for (const Chunk& chunk : plan_of(chunk_tokens).chunks) {
      const AttentionCase c = case_of(chunk);
      std::vector<KeyRows> rows = visible_rows(c);
      std::int64_t pairs = 0;
      for (std::int64_t i = 0; i < chunk.num_tokens; ++i) {
        KeyRows& keys = rows[static_cast<std::size_t>(i)];
        std::ranges::sort(keys);
        ASSERT_EQ(keys, expected[static_cast<std::size_t>(chunk.first_token + i)])
            << "chunks of " << chunk_tokens << ", token " << chunk.first_token + i;
        pairs += std::ssize(keys);
      }
      ASSERT_EQ(visible_pairs(pattern, chunk.segments), pairs);
      ASSERT_TRUE(pattern.has_several_ranges() || !c.limits(DType::f64).several_ranges);
    }
  }
}

void forward(const AttentionCase& c, AttentionTensors& t, std::int64_t first) {
  Scratch scratch(ops::attention_workspace(c.limits(t.q.dtype())));
  const auto queries = [&](OwnedTensor& tensor) { return tensor.view().rows(first, c.num_queries); };
  const auto keys = [&](OwnedTensor& tensor) { return tensor.view().rows(0, c.num_keys); };
  ops::attention_forward(scratch, {queries(t.o), queries(t.lse), queries(t.q), keys(t.k), keys(t.v)},
                         c.segments, c.settings());
}

void backward(const AttentionCase& c, AttentionTensors& t, std::int64_t first) {
  Scratch scratch(ops::attention_workspace(c.limits(t.q.dtype())));
  const auto queries = [&](OwnedTensor& tensor) { return tensor.view().rows(first, c.num_queries); };
  const auto keys = [&](OwnedTensor& tensor) { return tensor.view().rows(0, c.num_keys); };
  ops::attention_backward(scratch,
                          {queries(t.dq), keys(t.dk), keys(t.dv), queries(t.dout), queries(t.q), keys(t.k),
                           keys(t.v), queries(t.o), queries(t.lse)},
                          c.segments, c.settings());
}

void both(const AttentionCase& c, AttentionTensors& t) {
  forward(c, t, 0);
  backward(c, t, 0);
}

constexpr auto results = {&AttentionTensors::o, &AttentionTensors::lse, &AttentionTensors::dq,
                          &AttentionTensors::dk, &AttentionTensors::dv};

TEST_P(SparseAttention, IsTheSoftmaxOverTheMaskAndItsGradient) {
  const AttentionCase c = whole();
  AttentionTensors t(c, DType::f64);
  both(c, t);
  AttentionReference reference(c, defined_rows(pattern));
  reference_forward(c, t.q, t.k, t.v, reference);
  reference_backward(c, t.q, t.k, t.v, t.o, t.lse, t.dout, reference);
  // Sums of at most 180 numbers of order one to ten, in another order.
  const auto near = [](std::int64_t) { return 1e-12; };
  expect_within(t.o, reference.o, near);
  expect_within(t.lse, reference.lse, near);
  expect_within(t.dq, reference.dq, near);
  expect_within(t.dk, reference.dk, near);
  expect_within(t.dv, reference.dv, near);
}

TEST_P(SparseAttention, OfChunksIsThatOfTheWholeRow) {
  const AttentionCase c = whole();
  AttentionTensors once(c, DType::f64);
  both(c, once);
  for (const std::int64_t chunk_tokens : {5, 8, 41}) {
    AttentionTensors chunked(c, DType::f64);
    const ChunkPlan plan = plan_of(chunk_tokens);
    for (const Chunk& chunk : plan.chunks) forward(case_of(chunk), chunked, chunk.first_token);
    for (auto chunk = plan.chunks.rbegin(); chunk != plan.chunks.rend(); ++chunk) {
      backward(case_of(*chunk), chunked, chunk->first_token);
    }
    // Another order of sums of at most 180 numbers of order one to ten.
    for (const auto tensor : results) {
      expect_within(chunked.*tensor, once.*tensor, [](std::int64_t) { return 1e-12; });
    }
  }
}

TEST_P(SparseAttention, EditingADocumentLeavesTheOthersBitwiseEqual) {
  constexpr std::int64_t begin = 45, end = 72;
  const AttentionCase c = whole();
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    AttentionTensors before(c, dtype), edited(c, dtype);
    for (OwnedTensor* tensor : {&edited.q, &edited.k, &edited.v, &edited.dout}) {
      const std::int64_t row = tensor->numel() / row_length;
      for (std::int64_t i = begin * row; i < end * row; ++i) tensor->set(i, 100.0 * (*tensor)[i] + 1.0);
    }
    both(c, before);
    both(c, edited);
    // The softmax over one key is one, whatever the score: nothing for dq and dk to tell.
    const bool sees_one_key = GetParam().pattern.window == 1 && GetParam().pattern.global_tokens == 0;
    for (const auto tensor : results) {
      const bool is_zero =
          sees_one_key && (tensor == &AttentionTensors::dq || tensor == &AttentionTensors::dk);
      const auto same = [&](std::int64_t first, std::int64_t last) {
        const TensorView a = (before.*tensor).view().rows(first, last - first);
        return std::memcmp(a.data(), (edited.*tensor).view().rows(first, last - first).data(), a.bytes()) ==
               0;
      };
      EXPECT_TRUE(same(0, begin)) << name_of(dtype);
      EXPECT_TRUE(is_zero || !same(begin, end)) << name_of(dtype);
      EXPECT_TRUE(same(end, row_length)) << name_of(dtype);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, SparseAttention, ::testing::ValuesIn(patterns()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionPattern, HasTheGradientThatFiniteDifferencesOfForwardHave) {
  const std::vector<AttentionSegment> documents = {{0, 9, 0, 9}, {9, 4, 9, 4}};
  for (const AttentionPattern& pattern : {window(2, 3), blocks(2, 2, 1)}) {
    const AttentionCase c{"", 2, 1, 3, 13, 13, apply_pattern(pattern, documents)};
    ASSERT_TRUE(c.limits(DType::f64).several_ranges);
    AttentionTensors t(c, DType::f64);
    const auto objective = [&] {
      forward(c, t, 0);
      return dot(t.o, t.dout);
    };
    objective();
    backward(c, t, 0);
    // Truncation and rounding of the difference are near 1e-11 (finite_difference.hpp).
    expect_gradient(t.q, t.dq, objective, 1e-9);
    expect_gradient(t.k, t.dk, objective, 1e-9);
    expect_gradient(t.v, t.dv, objective, 1e-9);
  }
}

TEST(AttentionPattern, WithoutFirstTokensAWindowIsOneSegmentPerDocument) {
  const std::vector<AttentionSegment> segments = apply_pattern(window(7, 0), plan_of(50).chunks[1].segments);
  ASSERT_EQ(segments.size(), 2u);
  for (const AttentionSegment& segment : segments) {
    EXPECT_TRUE(segment.causal);
    EXPECT_EQ(segment.window, 7);
  }
}

TEST(AttentionPattern, OfALongRowIsFewRuns) {
  const std::vector<AttentionSegment> chunk = {{0, 8192, 0, 1 << 19}};
  EXPECT_EQ(apply_pattern(window(4096, 64), chunk).size(), 2u);
  EXPECT_EQ(apply_pattern(blocks(1024, 4, 64), chunk).size(), 16u);
}

TEST(AttentionPattern, ThatMakesNoSenseBreaksTheContract) {
  const std::vector<AttentionSegment> row = {{0, 9, 0, 9}};
  EXPECT_THROW(apply_pattern(window(0, 1), row), ContractError);
  EXPECT_THROW(apply_pattern(window(1, -1), row), ContractError);
  EXPECT_THROW(apply_pattern(blocks(0, 1, 1), row), ContractError);
  EXPECT_THROW(apply_pattern(blocks(1, 0, 1), row), ContractError);
  EXPECT_THROW(apply_pattern({}, under_window(3, row)), ContractError);
}

}  // namespace
}  // namespace layerstream::test

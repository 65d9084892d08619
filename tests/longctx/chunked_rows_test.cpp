// One decoder layer in FP64 on a row of several chunks: equal to the whole row under every mask, with
// whatever is saved; its gradients against finite differences; documents of a row never see each other.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/model/decoder_harness.hpp"

namespace layerstream::test {
namespace {

constexpr std::int64_t row_tokens = 48;

/// Chunks of 5, 8 and 16 cut the second document twice or more, end on its end and within the last one, and
/// hold the short third one whole.
const std::vector<std::int64_t> document_starts{7, 32, 35};

ModelSpec small_spec() {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = 6;
  spec.intermediate_size = 9;
  spec.num_hidden_layers = 1;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 4;  // 4 · 4 ≠ hidden_size: no shape can be taken for another
  spec.max_position_embeddings = 64;
  return spec;
}

/// What a query sees, besides keys before it.
struct Mask {
  std::string name;
  std::int64_t window;  ///< 0: none
  bool packed;
};

std::vector<Mask> masks() {
  return {{"causal", 0, false},
          {"packed", 0, true},
          {"window_shorter_than_a_chunk", 4, false},
          {"window_over_several_chunks", 19, false},
          {"window_longer_than_the_row", 1000, false},
          {"packed_window_shorter_than_a_chunk", 4, true},
          {"packed_window_over_several_chunks", 19, true}};
}

struct Projections {
  std::string name;
  std::int64_t key_heads;  ///< of 4 query heads
  bool bias, qk_norm;
};

std::vector<Projections> projections() {
  return {{"grouped", 2, false, false},     {"every_head_its_own", 4, false, false},
          {"one_key_head", 1, true, false}, {"bias", 2, true, false},
          {"qk_norm", 2, false, true},      {"every_head_its_own_bias_qk_norm", 4, true, true}};
}

using Case = std::tuple<Mask, Projections>;

ModelSpec spec_of(const Mask& mask, const Projections& how) {
  ModelSpec spec = small_spec();
  spec.sliding_window = mask.window;
  spec.num_key_value_heads = how.key_heads;
  spec.qkv_bias = spec.output_bias = spec.mlp_bias = how.bias;
  spec.qk_norm = how.qk_norm;
  return spec;
}

std::vector<TokenRow> row_of(std::int64_t tokens, bool packed, const std::vector<std::int64_t>& starts) {
  return rows_of_lengths(std::vector<std::int64_t>{tokens}, packed ? starts : std::vector<std::int64_t>{});
}

class ChunkedRow : public ::testing::TestWithParam<Case> {};

TEST_P(ChunkedRow, EqualsTheWholeRowWhateverIsSaved) {
  const auto& [mask, how] = GetParam();
  const DecoderLayer layer(spec_of(mask, how));
  const OwnedTensor x = normal_tensor(DType::f64, {row_tokens, layer.spec.hidden_size}, 3);
  const OwnedTensor dy = normal_tensor(DType::f64, x.shape(), 4);
  const auto rows = row_of(row_tokens, mask.packed, document_starts);
  const DecoderResult whole = DecoderHarness(layer, rows, row_tokens).run(x, dy, saving_modes().front());
  for (const std::int64_t chunk_tokens : {5, 8, 16, 48}) {
    for (const SavingMode& mode : saving_modes()) {
      SCOPED_TRACE(fmt::format("chunks of {}, {}", chunk_tokens, mode.name));
      DecoderHarness harness(layer, rows, chunk_tokens);
      ASSERT_EQ(harness.plan().num_chunks(), (row_tokens + chunk_tokens - 1) / chunk_tokens);
      // The contract. Sums of some hundred FP64 terms in another order differ by a few 1e-16.
      expect_same_result(layer, harness.run(x, dy, mode), whole, 1e-11);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, ChunkedRow,
                         ::testing::Combine(::testing::ValuesIn(masks()), ::testing::ValuesIn(projections())),
                         [](const auto& info) {
                           return std::get<Mask>(info.param).name + "_" +
                                  std::get<Projections>(info.param).name;
                         });

TEST(ChunkedRowMasks, EachChangesTheFunctionExceptTheWindowLongerThanTheRow) {
  const Projections grouped = projections().front();
  const OwnedTensor x = normal_tensor(DType::f64, {row_tokens, small_spec().hidden_size}, 3);
  const auto output = [&](const Mask& mask) {
    const DecoderLayer layer(spec_of(mask, grouped));
    return DecoderHarness(layer, row_of(row_tokens, mask.packed, document_starts), 8).forward(x);
  };
  const OwnedTensor causal = output(masks().front());
  for (const Mask& mask : masks()) {
    if (mask.name == "causal") continue;
    EXPECT_EQ(output(mask).same_bits(causal), mask.name == "window_longer_than_the_row") << mask.name;
  }
}

TEST(ChunkedRowRope, AnglesThatDependOnTheRowsLengthAreTheSameInEveryChunk) {
  const RopeSpec dynamic{.type = RopeType::dynamic, .factor = 2.0};
  const RopeSpec longrope{.type = RopeType::longrope,
                          .factor = 4.0,
                          .original_max_position_embeddings = 16,
                          .short_factor = {1, 1},
                          .long_factor = {2, 3}};
  const auto rows = row_of(row_tokens, false, {});
  const OwnedTensor x = normal_tensor(DType::f64, {row_tokens, small_spec().hidden_size}, 3);
  const OwnedTensor dy = normal_tensor(DType::f64, x.shape(), 4);
  const auto result_of = [&](const DecoderLayer& layer, std::int64_t chunk_tokens, const SavingMode& mode) {
    return DecoderHarness(layer, rows, chunk_tokens).run(x, dy, mode);
  };
  for (const RopeSpec& rope : {dynamic, longrope}) {
    ModelSpec spec = small_spec();
    spec.max_position_embeddings = 16;
    const DecoderLayer unscaled(spec);
    spec.rope = rope;
    const DecoderLayer layer(spec);
    const DecoderResult whole = result_of(layer, row_tokens, saving_modes().front());
    for (const std::int64_t chunk_tokens : {5, 8, 16}) {
      for (const SavingMode& mode : saving_modes()) {
        SCOPED_TRACE(fmt::format("chunks of {}, {}", chunk_tokens, mode.name));
        expect_same_result(layer, result_of(layer, chunk_tokens, mode), whole, 1e-11);
      }
    }
    // The scaling matters: without it, as for a row of a chunk's length, the result is another.
    EXPECT_GT(relative_distance(whole.y, result_of(unscaled, row_tokens, saving_modes().front()).y), 1e-3);
  }
}

class ChunkedGradient : public ::testing::TestWithParam<Case> {};

/// The objective is sum(w · y) over a row of 17 tokens in chunks of 5, the last of 2.
TEST_P(ChunkedGradient, EqualsFiniteDifferencesForEveryParameterAndTheInput) {
  const auto& [mask, how] = GetParam();
  DecoderLayer layer(spec_of(mask, how));
  const auto rows = row_of(17, mask.packed, {3, 14});
  DecoderHarness harness(layer, rows, 5);
  ASSERT_EQ(harness.plan().num_chunks(), 4);
  expect_finite_difference_gradients(layer, harness, 17);
}

INSTANTIATE_TEST_SUITE_P(Masks, ChunkedGradient,
                         ::testing::Values(Case{{"causal", 0, false}, {"grouped", 2, false, false}},
                                           Case{{"packed", 0, true}, {"bias_qk_norm", 2, true, true}},
                                           Case{{"packed_window", 7, true},
                                                {"every_head_its_own", 4, false, false}}),
                         [](const auto& info) { return std::get<Mask>(info.param).name; });

/// A row of documents of 14 and 20 tokens, and the tensors of their tokens.
class PackedRow : public ::testing::TestWithParam<Case> {
 protected:
  static constexpr std::int64_t first_tokens = 14, tokens = 34;

  PackedRow() : layer_(spec_of(std::get<Mask>(GetParam()), std::get<Projections>(GetParam()))) {}

  std::int64_t hidden() const { return layer_.spec.hidden_size; }

  /// Normal numbers, other ones in rows [begin, end).
  OwnedTensor edited(const OwnedTensor& original, std::int64_t begin, std::int64_t end) const {
    OwnedTensor result = original;
    for (std::int64_t i = begin * hidden(); i < end * hidden(); ++i) result.set(i, 3.0 - 2.0 * original[i]);
    return result;
  }

  /// The gradient of an output of which only rows [begin, end) count.
  OwnedTensor gradient_of(std::int64_t begin, std::int64_t end) const {
    OwnedTensor dy = constant_tensor(DType::f64, {tokens, hidden()}, 0.0);
    for (std::int64_t i = begin * hidden(); i < end * hidden(); ++i) {
      dy.set(i, normal_at(6, 0, static_cast<std::uint64_t>(i)));
    }
    return dy;
  }

  /// Expects y and dx of rows [begin, end), and all weight gradients, to be the bits of another result.
  void expect_same_bits(const DecoderResult& a, const DecoderResult& b, std::int64_t begin,
                        std::int64_t end) const {
    EXPECT_EQ(relative_distance(a.y, b.y, begin * hidden(), (end - begin) * hidden()), 0.0);
    EXPECT_EQ(relative_distance(a.dx, b.dx, begin * hidden(), (end - begin) * hidden()), 0.0);
    EXPECT_TRUE(a.gradients.same_bits(b.gradients));
  }

  DecoderLayer layer_;
};

TEST_P(PackedRow, EditingADocumentLeavesTheOtherOneAsItIsBitForBit) {
  const OwnedTensor x = normal_tensor(DType::f64, {tokens, hidden()}, 5);
  const auto rows = row_of(tokens, true, {first_tokens});
  struct Span {
    std::int64_t begin, end;
  };
  const Span first{0, first_tokens}, second{first_tokens, tokens};
  for (const std::int64_t chunk_tokens : {5, 8, 34}) {
    for (const SavingMode& mode : saving_modes()) {
      for (const auto& [kept, other] : {std::pair(first, second), std::pair(second, first)}) {
        SCOPED_TRACE(fmt::format("chunks of {}, {}, document at {}", chunk_tokens, mode.name, kept.begin));
        const OwnedTensor dy = gradient_of(kept.begin, kept.end);
        const DecoderResult before = DecoderHarness(layer_, rows, chunk_tokens).run(x, dy, mode);
        const DecoderResult after =
            DecoderHarness(layer_, rows, chunk_tokens).run(edited(x, other.begin, other.end), dy, mode);
        expect_same_bits(after, before, kept.begin, kept.end);
        for (std::int64_t i = other.begin * hidden(); i < other.end * hidden(); ++i) {
          ASSERT_EQ(before.dx[i], 0.0) << "the loss of a document depends on an input of the other";
        }
        // The test can fail: the edit does reach the document itself.
        EXPECT_FALSE(after.y.same_bits(before.y));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Masks, PackedRow,
    ::testing::Combine(::testing::Values(Mask{"packed", 0, true}, Mask{"packed_window", 16, true}),
                       ::testing::Values(Projections{"grouped", 2, false, false},
                                         Projections{"every_head_its_own_bias_qk_norm", 4, true, true})),
    [](const auto& info) {
      return std::get<Mask>(info.param).name + "_" + std::get<Projections>(info.param).name;
    });

}  // namespace
}  // namespace layerstream::test

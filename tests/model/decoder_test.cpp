// One decoder layer in FP64: its gradients against finite differences, and chunks of any size against the
// whole row.

#include <gtest/gtest.h>

#include <functional>

#include "decoder_harness.hpp"

namespace layerstream::test {
namespace {

/// A layer with grouped queries: 4 query heads over 2 key heads.
ModelSpec small_spec() {
  ModelSpec spec;
  spec.vocab_size = 11;
  spec.hidden_size = 6;
  spec.intermediate_size = 9;
  spec.num_hidden_layers = 2;
  spec.num_attention_heads = 4;
  spec.num_key_value_heads = 2;
  spec.head_dim = 4;  // 4 · 4 ≠ hidden_size: no shape can be taken for another
  spec.max_position_embeddings = 64;
  return spec;
}

struct Variant {
  std::string name;
  std::function<void(ModelSpec&)> change;
};
void PrintTo(const Variant& variant, std::ostream* stream) {
  *stream << variant.name;
}

void add_biases(ModelSpec& spec) {
  spec.qkv_bias = spec.output_bias = spec.mlp_bias = true;
}
void add_window(ModelSpec& spec) {
  spec.sliding_window = 4;
}

void add_window_pattern(ModelSpec& spec) {
  spec.attention_pattern = {.type = AttentionPatternType::window, .window = 3, .global_tokens = 2};
}
void add_blocks_pattern(ModelSpec& spec) {
  spec.attention_pattern = {
      .type = AttentionPatternType::blocks, .block = 2, .local_blocks = 2, .global_tokens = 1};
}

std::vector<Variant> variants() {
  return {{"grouped_queries", [](ModelSpec&) {}},
          {"one_key_head", [](ModelSpec& spec) { spec.num_key_value_heads = 1; }},
          {"biases", add_biases},
          {"qk_norm", [](ModelSpec& spec) { spec.qk_norm = true; }},
          {"window", add_window},
          {"window_pattern", add_window_pattern},
          {"blocks_pattern", add_blocks_pattern},
          // Attention scaling makes the rotation more than a rotation.
          {"yarn", [](ModelSpec& spec) { spec.rope = {.type = RopeType::yarn, .factor = 4.0}; }},
          {"everything", [](ModelSpec& spec) {
             add_biases(spec);
             add_window(spec);
             spec.qk_norm = true;
           }}};
}

std::string name_of_variant(const ::testing::TestParamInfo<Variant>& info) {
  return info.param.name;
}

DecoderLayer layer_of(const Variant& variant) {
  ModelSpec spec = small_spec();
  variant.change(spec);
  return DecoderLayer(spec);
}

class DecoderGradient : public ::testing::TestWithParam<Variant> {};

/// The objective is sum(w · y) over two rows, one of two documents and cut into chunks.
TEST_P(DecoderGradient, EqualsFiniteDifferencesForEveryParameterAndTheInput) {
  DecoderLayer layer = layer_of(GetParam());
  const auto rows = rows_of_lengths(std::vector<std::int64_t>{7, 3}, std::vector<std::int64_t>{3});
  DecoderHarness harness(layer, rows, 4);
  ASSERT_EQ(harness.plan().num_chunks(), 3);
  expect_finite_difference_gradients(layer, harness, 10);
}

INSTANTIATE_TEST_SUITE_P(Variants, DecoderGradient, ::testing::ValuesIn(variants()), name_of_variant);

class DecoderChunks : public ::testing::TestWithParam<Variant> {};

/// Sums of some tens of FP64 terms in another order differ by a few 1e-16 (measured: 1.1e-15 at most).
constexpr double chunk_tolerance = 1e-13;

TEST_P(DecoderChunks, OfAnySizeEqualTheWholeRow) {
  const DecoderLayer layer = layer_of(GetParam());
  constexpr std::int64_t length = 24;
  const OwnedTensor x = normal_tensor(DType::f64, {length, layer.spec.hidden_size}, 3);
  const OwnedTensor dy = normal_tensor(DType::f64, x.shape(), 4);
  for (const bool packed : {false, true}) {
    const auto rows =
        rows_of_lengths(std::vector<std::int64_t>{length},
                        packed ? std::vector<std::int64_t>{7, 16} : std::vector<std::int64_t>{});
    const DecoderResult whole = DecoderHarness(layer, rows, length).run(x, dy, saving_modes().front());
    for (const std::int64_t chunk_tokens : {1, 5, 8}) {
      for (const SavingMode& mode : saving_modes()) {
        SCOPED_TRACE(fmt::format("chunks of {}, packed {}, {}", chunk_tokens, packed, mode.name));
        DecoderHarness harness(layer, rows, chunk_tokens);
        ASSERT_EQ(harness.plan().num_chunks(), (length + chunk_tokens - 1) / chunk_tokens);
        expect_same_result(layer, harness.run(x, dy, mode), whole, chunk_tolerance);
      }
    }
  }
}

TEST_P(DecoderChunks, SavedIntermediatesGiveTheBitsOfRecomputedOnes) {
  const DecoderLayer layer = layer_of(GetParam());
  const auto rows = rows_of_lengths(std::vector<std::int64_t>{6, 13, 4}, std::vector<std::int64_t>{3, 10});
  const OwnedTensor x = normal_tensor(DType::f64, {23, layer.spec.hidden_size}, 5);
  const OwnedTensor dy = normal_tensor(DType::f64, x.shape(), 6);
  for (const std::int64_t chunk_tokens : {1, 5, 8, 13, 23}) {
    DecoderHarness harness(layer, rows, chunk_tokens);
    const DecoderResult recomputed = harness.run(x, dy, saving_modes().front());
    for (const SavingMode& mode : saving_modes()) {
      SCOPED_TRACE(fmt::format("chunks of {}, {}", chunk_tokens, mode.name));
      const DecoderResult saved = harness.run(x, dy, mode);
      EXPECT_TRUE(saved.y.same_bits(recomputed.y));
      EXPECT_TRUE(saved.dx.same_bits(recomputed.dx));
      EXPECT_TRUE(saved.gradients.same_bits(recomputed.gradients));
    }
  }
}

TEST_P(DecoderChunks, RowsThatShareAChunkDoNotSeeEachOther) {
  const DecoderLayer layer = layer_of(GetParam());
  const std::vector<std::int64_t> lengths{6, 13, 5};
  const OwnedTensor x = normal_tensor(DType::f64, {24, layer.spec.hidden_size}, 7);
  const OwnedTensor dy = normal_tensor(DType::f64, x.shape(), 8);
  const auto rows = rows_of_lengths(lengths);
  DecoderHarness together(layer, rows, 24);
  ASSERT_EQ(together.plan().num_chunks(), 1);
  const DecoderResult joint = together.run(x, dy, saving_modes().front());

  DecoderResult apart{OwnedTensor(DType::f64, x.shape()), OwnedTensor(DType::f64, x.shape()),
                      constant_tensor(DType::f64, layer.slab.shape(), 0.0)};
  std::int64_t first = 0;
  for (const std::int64_t length : lengths) {
    const std::int64_t at = first * layer.spec.hidden_size;
    OwnedTensor row_x(DType::f64, {length, layer.spec.hidden_size});
    OwnedTensor row_dy(DType::f64, row_x.shape());
    for (std::int64_t i = 0; i < row_x.numel(); ++i) {
      row_x.set(i, x[at + i]);
      row_dy.set(i, dy[at + i]);
    }
    DecoderHarness alone(layer, rows_of_lengths(std::vector<std::int64_t>{length}), length);
    const DecoderResult result = alone.run(row_x, row_dy, saving_modes().front());
    for (std::int64_t i = 0; i < row_x.numel(); ++i) {
      apart.y.set(at + i, result.y[i]);
      apart.dx.set(at + i, result.dx[i]);
    }
    for (std::int64_t i = 0; i < apart.gradients.numel(); ++i) {
      apart.gradients.set(i, apart.gradients[i] + result.gradients[i]);
    }
    first += length;
  }
  expect_same_result(layer, joint, apart, chunk_tolerance);
}

INSTANTIATE_TEST_SUITE_P(Variants, DecoderChunks, ::testing::ValuesIn(variants()), name_of_variant);

TEST(DecoderWindow, HoldsFromTheFirstWindowLayerOn) {
  ModelSpec windowed = small_spec();
  windowed.sliding_window = 3;
  windowed.first_window_layer = 1;
  const auto rows = rows_of_lengths(std::vector<std::int64_t>{9});
  const OwnedTensor x = normal_tensor(DType::f64, {9, windowed.hidden_size}, 9);
  for (const std::int64_t layer_index : {0, 1}) {
    const DecoderLayer layer(windowed, layer_index);
    const DecoderLayer unlimited(small_spec(), layer_index);
    const OwnedTensor y = DecoderHarness(layer, rows, 4).forward(x);
    const OwnedTensor reference = DecoderHarness(unlimited, rows, 4).forward(x);
    const std::int64_t hidden = windowed.hidden_size;
    // The first three queries see no more than three keys anyway.
    EXPECT_EQ(relative_distance(y, reference, 0, 3 * hidden), 0.0);
    for (std::int64_t t = 3; t < 9; ++t) {
      EXPECT_EQ(relative_distance(y, reference, t * hidden, hidden) > 1e-6, layer_index == 1)
          << "layer " << layer_index << ", token " << t;
    }
  }
}

}  // namespace
}  // namespace layerstream::test

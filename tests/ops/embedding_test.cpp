#include "ops/embedding.hpp"

#include <gtest/gtest.h>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

struct Sizes {
  std::int64_t tokens, vocab_size, hidden_size;
};
// Single elements, also added many times, tokens that repeat (more tokens than rows), widths around the
// 64-column ranges, more tokens than a device looks at once with ids that occur early or late only, ids of
// hundreds of tokens, more columns than a team of a device has at once with ids of few and of many tokens.
constexpr Sizes all_sizes[] = {{1, 1, 1},     {20, 2, 1},     {1, 3, 5},         {50, 3, 63},
                               {50, 11, 64},  {29, 100, 130}, {10000, 5000, 40}, {5000, 7, 20},
                               {60, 3, 5000}, {40, 11, 4104}};

TEST(Embedding, CopiesRowsOfAPlainTable) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto [tokens, vocab_size, hidden_size] : all_sizes) {
      const OwnedTensor table = normal_tensor(dtype, {vocab_size, hidden_size}, 1);
      const OwnedTensor ids = integer_tensor({tokens}, vocab_size, 2);
      OwnedTensor out(dtype, {tokens, hidden_size}), expected(dtype, {tokens, hidden_size});
      for (std::int64_t i = 0; i < out.numel(); ++i) {
        expected.set(i,
                     table[static_cast<std::int64_t>(ids[i / hidden_size]) * hidden_size + i % hidden_size]);
      }
      embedding_forward(no_workspace(), out, table, ids);
      expect_equal(out, expected);
    }
  }
}

TEST(Embedding, SplitTableGivesUpperHalvesOrExactFp32) {
  const OwnedTensor weights = normal_tensor(DType::f32, {13, 37}, 3), ids = integer_tensor({21}, 13, 4);
  OwnedTensor hi(DType::bf16, {13, 37}), lo(DType::i16, {13, 37});
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    const SplitFloat halves = split(weights.as<float>()[i]);
    hi.as<bf16>()[i] = halves.hi;
    lo.as<std::int16_t>()[i] = halves.lo;
  }
  OwnedTensor full(DType::f32, {21, 37}), upper(DType::bf16, {21, 37});
  OwnedTensor expected_full(DType::f32, {21, 37}), expected_upper(DType::bf16, {21, 37});
  embedding_forward(no_workspace(), expected_full, weights, ids);
  embedding_forward(no_workspace(), expected_upper, hi, ids);
  embedding_forward(no_workspace(), full, SplitMatrix{.hi = hi, .lo = lo}, ids);
  embedding_forward(no_workspace(), upper, SplitMatrix{.hi = hi, .lo = {}}, ids);
  expect_equal(full, expected_full);
  expect_equal(upper, expected_upper);
}

TEST(Embedding, GradientAddsTokensInOrderOntoWhatIsThere) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto [tokens, vocab_size, hidden_size] : all_sizes) {
      const OwnedTensor dx = normal_tensor(dtype, {tokens, hidden_size}, 5);
      const OwnedTensor ids = integer_tensor({tokens}, vocab_size, 6);
      OwnedTensor dtable = normal_tensor(accumulator_of(dtype), {vocab_size, hidden_size}, 7);
      OwnedTensor expected = dtable;
      for (std::int64_t i = 0; i < dx.numel(); ++i) {
        const std::int64_t element =
            static_cast<std::int64_t>(ids[i / hidden_size]) * hidden_size + i % hidden_size;
        expected.set(element, expected[element] + dx[i]);
      }
      embedding_backward(no_workspace(), dtable, dx, ids, by_id(ids));
      expect_equal(dtable, expected);
    }
  }
}

TEST(Embedding, TokensByIdKeepTheOrderOfEqualOnesAndBeginWithTheLongestWork) {
  const std::vector<std::int32_t> expected = {1, 5, 3, 3,  //
                                              4, 0, 0, 2,  //
                                              3, 2, 2, 1,  //
                                              0, 0, 0, 0,  //
                                              2, 0, 0, 0,  //
                                              5, 0, 0, 0};
  EXPECT_EQ(tokens_by_id(std::vector<std::int32_t>{5, 0, 5, 2, 0, 5}), expected);
  EXPECT_TRUE(tokens_by_id({}).empty());

  // Eight tokens of an id are one share, nine are eight.
  std::vector<std::int32_t> ids(17, 3);
  std::fill_n(ids.begin(), 8, 1);
  const std::vector<std::int32_t> rows = tokens_by_id(ids);
  for (int i = 0; i < 17; ++i) {
    const std::vector<std::int32_t> share(rows.begin() + 4 * i + 1, rows.begin() + 4 * i + 4);
    EXPECT_EQ(share, i < 8    ? (std::vector<std::int32_t>{3, 8, 9})
                     : i == 8 ? (std::vector<std::int32_t>{1, 0, 8})
                              : (std::vector<std::int32_t>{0, 0, 0}))
        << i;
  }
}

TEST(Embedding, BackwardIsTheDerivative) {
  OwnedTensor table = normal_tensor(DType::f64, {4, 3}, 8), dtable = constant_tensor(DType::f64, {4, 3}, 0.0);
  const OwnedTensor ids = integer_tensor({7}, 4, 9), dx = normal_tensor(DType::f64, {7, 3}, 10);
  embedding_backward(no_workspace(), dtable, dx, ids, by_id(ids));
  const auto objective = [&] {
    OwnedTensor out(DType::f64, {7, 3});
    embedding_forward(no_workspace(), out, table, ids);
    return dot(out, dx);
  };
  expect_gradient(table, dtable, objective, 1e-11);
}

TEST(Embedding, EmitsRowsThatAreUsedAndClearsThoseThatWere) {
  constexpr std::int64_t vocab_size = 300;
  for (const std::int64_t hidden_size : {1, 7, 64, 130}) {
    const Shape shape{vocab_size, hidden_size};
    // What lies there before the first call may be anything.
    OwnedTensor out = normal_tensor(DType::f32, shape, 1);
    OwnedTensor written(DType::u8, {vocab_size});
    std::ranges::fill_n(written.as<std::uint8_t>(), vocab_size, std::uint8_t{1});
    for (std::uint64_t step = 0; step < 3; ++step) {
      const OwnedTensor ids = integer_tensor({40}, vocab_size, 10 + step);
      const OwnedTensor gradient = normal_tensor(DType::f32, {40, hidden_size}, 20 + step);
      OwnedTensor table = constant_tensor(DType::f32, shape, 0.0);
      embedding_backward(no_workspace(), table, gradient, ids, by_id(ids));
      emit_rows(no_workspace(), out, table, written, ids);
      expect_equal(out, table);
    }
    // A row that nothing uses or used is not touched.
    const OwnedTensor ids = integer_tensor({1}, 1, 0), table = constant_tensor(DType::f32, shape, 0.0);
    emit_rows(no_workspace(), out, table, written, ids);
    out.set(5 * hidden_size, 3.0);
    emit_rows(no_workspace(), out, table, written, ids);
    EXPECT_EQ(out[5 * hidden_size], 3.0);
  }
}

TEST(Embedding, RefusesWhatDoesNotFit) {
  OwnedTensor out(DType::f32, {4, 8}), hi(DType::bf16, {3, 8}), lo(DType::i16, {3, 8}), ids(DType::i32, {4});
  OwnedTensor out64(DType::f64, {4, 8}), narrow(DType::bf16, {3, 7}), long_ids(DType::i32, {5});
  const SplitMatrix whole{.hi = hi, .lo = lo};
  EXPECT_THROW(embedding_forward(no_workspace(), out, SplitMatrix{.hi = hi, .lo = {}}, ids), ContractError);
  EXPECT_THROW(embedding_forward(no_workspace(), out64, whole, ids), ContractError);
  EXPECT_THROW(embedding_forward(no_workspace(), out, whole, long_ids), ContractError);
  EXPECT_THROW(embedding_forward(no_workspace(), out, hi, ids), ContractError);
  EXPECT_THROW(embedding_forward(no_workspace(), out, SplitMatrix{.hi = narrow, .lo = lo}, ids),
               ContractError);
  OwnedTensor gradient(DType::f32, {4, 8});
  EXPECT_THROW(embedding_backward(no_workspace(), hi, out, ids, ids), ContractError);
  EXPECT_THROW(embedding_backward(no_workspace(), out, out64, ids, ids), ContractError);
  EXPECT_THROW(embedding_backward(no_workspace(), gradient, out, ids, long_ids), ContractError);
  OwnedTensor other(DType::f32, {4, 8}), few(DType::u8, {3}), marks(DType::u8, {4});
  EXPECT_THROW(emit_rows(no_workspace(), out, other, few, ids), ContractError);
  EXPECT_THROW(emit_rows(no_workspace(), out64, other, marks, ids), ContractError);
}

}  // namespace
}  // namespace layerstream::ops

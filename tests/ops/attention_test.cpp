#include "ops/attention.hpp"

#include <cmath>
#include <limits>

#include "tests/ops/attention_reference.hpp"
#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::test {
namespace {

using ops::AttentionSegment;

Scratch workspace_of(const AttentionCase& c, DType dtype) {
  return Scratch(ops::attention_workspace(c.limits(dtype)));
}

void forward(const AttentionCase& c, AttentionTensors& t) {
  Scratch scratch = workspace_of(c, t.q.dtype());
  ops::attention_forward(scratch, {t.o, t.lse, t.q, t.k, t.v}, c.segments, c.settings());
}

void backward(const AttentionCase& c, AttentionTensors& t, bool deterministic = true,
              bool accumulate = true) {
  Scratch scratch(ops::attention_workspace(c.limits(t.q.dtype(), deterministic)));
  ops::attention_backward(scratch, {t.dq, t.dk, t.dv, t.dout, t.q, t.k, t.v, t.o, t.lse, accumulate},
                          c.segments, c.settings(deterministic));
}

/// Fills dk and dv, which `t` has zero at first.
void poison_key_gradients(AttentionTensors& t) {
  t.dk = constant_tensor(t.dk.dtype(), t.dk.shape(), std::numeric_limits<double>::quiet_NaN());
  t.dv = OwnedTensor(t.dk);
}

// Tiles are 64 queries by 256 keys: the cases sit on, beside and across their edges.
const std::vector<AttentionCase> cases = {
    {"one query", 2, 1, 8, 1, 1, {{0, 1, 0, 1}}},
    {"one document", 4, 2, 8, 70, 70, {{0, 70, 0, 70}}},
    {"packed documents",
     3,
     1,
     20,
     323,
     323,
     {{0, 1, 0, 1}, {1, 63, 1, 63}, {64, 64, 64, 64}, {128, 65, 128, 65}, {193, 130, 193, 130}}},
    {"chunk late in a row", 4, 2, 64, 100, 613, {{0, 100, 0, 613}}},
    {"one tile exactly", 2, 2, 64, 64, 256, {{0, 64, 0, 256}}},
    {"one beyond a tile", 2, 2, 20, 65, 257, {{0, 65, 0, 257}}},
    {"one query of many keys", 4, 4, 64, 1, 1025, {{0, 1, 0, 1025}}},
    {"window over tiles", 4, 2, 20, 300, 700, under_window(100, {{0, 300, 0, 700}})},
    {"window wider than a tile", 2, 1, 8, 300, 900, under_window(391, {{0, 300, 0, 900}})},
    {"window of one", 2, 1, 8, 130, 130, under_window(1, {{0, 130, 0, 130}})},
    {"window wider than all", 2, 1, 8, 80, 120,
     under_window(std::numeric_limits<std::int64_t>::max(), {{0, 80, 0, 120}})},
    {"window over packed chunks", 6, 2, 8, 150, 650,
     under_window(77, {{0, 20, 0, 300}, {20, 0, 300, 0}, {20, 130, 300, 350}})},
    {"segments in any order, unused keys between", 2, 1, 8, 90, 400, {{50, 40, 10, 60}, {0, 50, 100, 280}}},
    {"segments that share keys", 4, 2, 8, 120, 300, {{0, 50, 0, 180}, {50, 70, 0, 250}}},
    {"windows of one segment each", 2, 1, 8, 150, 350, {{0, 70, 0, 180, true, 20}, {70, 80, 180, 170}}},
    {"a rectangle", 4, 2, 8, 90, 20, {{0, 90, 3, 11, false}}},
    {"first keys and a window",
     4,
     2,
     20,
     300,
     640,
     {{0, 60, 0, 400}, {60, 240, 0, 30, false}, {60, 240, 30, 610, true, 370}}},
    {"three ranges in any order",
     2,
     1,
     8,
     75,
     700,
     {{0, 75, 400, 280, true, 33}, {0, 75, 20, 1, false}, {0, 75, 40, 300, false}}},
};

// What cuDNN computes in a CUDA build: every way in which a call is cut (detail/attention_calls.hpp).
const std::vector<AttentionCase> fused_cases = {
    {"uniform rows", 7, 1, 128, 768, 768, {{0, 256, 0, 256}, {256, 256, 256, 256}, {512, 256, 512, 256}}},
    {"uniform rows under a window", 4, 4, 64, 256, 256,
     under_window(33, {{0, 128, 0, 128}, {128, 128, 128, 128}})},
    {"rows of a head size between powers of two", 4, 2, 80, 384, 384, {{0, 384, 0, 384}}},
    {"documents of three buckets",
     7,
     1,
     128,
     884,
     884,
     {{0, 300, 0, 300},
      {300, 5, 300, 5},
      {305, 129, 305, 129},
      {434, 1, 434, 1},
      {435, 64, 435, 64},
      {499, 257, 499, 257},
      {756, 128, 756, 128}}},
    {"documents on both sides of a window", 4, 2, 96, 310, 310,
     under_window(50, {{0, 30, 0, 30}, {30, 280, 30, 280}})},
    {"chunk late in a row, whole tiles", 7, 1, 128, 256, 1024, {{0, 256, 0, 1024}}},
    {"chunk late in a row, odd extents", 4, 2, 64, 200, 777, {{0, 200, 0, 777}}},
    {"chunk of packed documents, the first from earlier",
     4,
     2,
     40,
     300,
     700,
     {{0, 90, 120, 370}, {90, 150, 490, 150}, {240, 60, 640, 60}}},
    {"chunk late in a row under a window", 4, 2, 64, 200, 900, under_window(300, {{0, 200, 0, 900}})},
    {"first keys and a window, round extents",
     7,
     1,
     128,
     512,
     1024,
     {{0, 128, 0, 640}, {128, 384, 0, 128, false}, {128, 384, 128, 896, true, 384}}},
    {"first keys and a window, odd extents",
     4,
     2,
     64,
     333,
     700,
     {{0, 100, 0, 467}, {100, 233, 0, 4, false}, {100, 233, 4, 696, true, 100}}},
    {"first keys and blocks",
     4,
     2,
     80,
     384,
     768,
     {{0, 128, 0, 70, false},
      {0, 128, 256, 256},
      {128, 128, 0, 70, false},
      {128, 128, 384, 256},
      {256, 128, 0, 70, false},
      {256, 128, 512, 256}}},
    {"documents with first keys and a window",
     4,
     2,
     40,
     500,
     500,
     {{0, 110, 0, 110},
      {110, 70, 0, 10, false},
      {110, 70, 10, 170, true, 100},
      {180, 20, 180, 20},
      {200, 110, 200, 110},
      {310, 190, 200, 10, false},
      {310, 190, 210, 290, true, 100}}},
    {"three ranges",
     4,
     2,
     64,
     200,
     900,
     {{0, 200, 0, 5, false}, {0, 200, 64, 128, false}, {0, 200, 300, 600, true, 90}}},
};

AttentionCase many_documents() {
  AttentionCase c{"more documents than a call takes", 4, 2, 16, 0, 0, {}};
  for (std::int64_t i = 0; i < 300; ++i) {
    const std::int64_t tokens = 1 + i % 7;
    c.segments.push_back({c.num_queries, tokens, c.num_queries, tokens});
    c.num_queries += tokens;
  }
  c.num_keys = c.num_queries;
  return c;
}

/// So many heads that a tile of the deterministic backward pass is 512 by 512: three parts of dq.
const AttentionCase tiled_case{"tiles", 2048, 1024, 8, 20, 600, {{0, 20, 0, 600}}};

struct Accuracy {
  AttentionCase problem;
  DType dtype;
  bool deterministic = true;
};
void PrintTo(const Accuracy& accuracy, std::ostream* out) {
  *out << accuracy.problem.name << ", " << name_of(accuracy.dtype)
       << (accuracy.deterministic ? "" : ", not deterministic");
}

class AttentionAccuracy : public ::testing::TestWithParam<Accuracy> {
 protected:
  const AttentionCase& c = GetParam().problem;
  const DType dtype = GetParam().dtype;

  /// Roundoff of the arithmetic; in fp64 the reference errs by as much.
  double arithmetic() const { return dtype == DType::f64 ? 2.0 * 0x1p-53 : fp32_roundoff; }
  /// Roundoff of a result on its way into memory, past that of the arithmetic.
  double storage() const { return dtype == DType::bf16 ? bf16_roundoff : 0.0; }
  bool joins() const { return c.limits(dtype).several_ranges; }
  /// Roundoff of P and dS before the products with v, k, q and dout.
  double inner() const { return ops::attention_rounds_products(c.head_dim, dtype) ? bf16_roundoff : 0.0; }
  OwnedTensor exact(const OwnedTensor& tensor) const { return tensor.to(DType::f64); }
};

// The bounds below are first-order: n summands in any order err by at most n roundoffs of the sum of their
// magnitudes. A score q·k errs by (d + 1) roundoffs of its magnitude, and exp turns the absolute error of
// its argument into a relative one.

TEST_P(AttentionAccuracy, ForwardIsTheSumOverVisibleKeys) {
  AttentionTensors t(c, dtype);
  AttentionReference reference(c);
  reference_forward(c, exact(t.q), exact(t.k), exact(t.v), reference);
  forward(c, t);

  // A score, its shift and exp, twice: in p and in the total; then the sum of p · v, rescaled once a tile.
  // Where ranges are joined, exp of the difference of two lse for each; and their o have been rounded.
  const double d = static_cast<double>(c.head_dim), n = static_cast<double>(reference.most_summands);
  const double argument = (d + 3.0) * reference.largest_score;
  const double joining = joins() && inner() > 0.0 ? 2.0 * (2.0 * reference.largest_score + 4.0) : 0.0;
  const double roundings = 2.0 * (argument + 3.0) + 2.0 * n + 8.0 + 2.0 * joining;
  const double rounded_parts = joins() ? inner() : 0.0;
  expect_within(t.o, reference.o, [&](std::int64_t i) {
    return (arithmetic() * roundings + inner() + rounded_parts) * reference.o_magnitude[i] +
           storage() * std::fabs(reference.o[i]);
  });
  expect_within(t.lse, reference.lse,
                [&](std::int64_t) { return arithmetic() * (argument + n + 8.0 + joining); });
}

TEST_P(AttentionAccuracy, BackwardIsTheSumOverVisiblePairsAddedToWhatWasThere) {
  AttentionTensors t(c, dtype);
  forward(c, t);
  AttentionReference reference(c);
  reference_forward(c, exact(t.q), exact(t.k), exact(t.v), reference);  // for largest_score alone
  reference_backward(c, exact(t.q), exact(t.k), exact(t.v), exact(t.o), exact(t.lse), exact(t.dout),
                     reference);
  const OwnedTensor dk_before = normal_tensor(accumulator_of(dtype), c.key_shape(), 8);
  const OwnedTensor dv_before = normal_tensor(accumulator_of(dtype), c.key_shape(), 9);
  t.dk = OwnedTensor(dk_before);
  t.dv = OwnedTensor(dv_before);
  backward(c, t, GetParam().deterministic);

  // p as in forward with lse in place of the total; dout · v and D, (d + 1) each; sums over keys, or over
  // the queries and heads that see a key, onto what was there.
  const double d = static_cast<double>(c.head_dim);
  const double pair = (d + 3.0) * reference.largest_score + 3.0 + d + 4.0;
  const double over_keys = static_cast<double>(reference.most_summands) + 2.0;
  const double over_queries = static_cast<double>(c.num_queries * (c.heads / c.key_heads)) + 2.0;
  // dS, which has a rounded P in it, and a part of dq that is rounded before it is added; dS or P, and the
  // part of each query head and that of the group before they are added.
  const double products = 4.0 * inner();
  expect_within(t.dq, reference.dq, [&](std::int64_t i) {
    return (arithmetic() * (pair + over_keys) + products) * reference.dq_magnitude[i] +
           storage() * std::fabs(reference.dq[i]);
  });
  const auto expect_added = [&](const OwnedTensor& after, const OwnedTensor& before, const OwnedTensor& sum,
                                const OwnedTensor& magnitude) {
    for (std::int64_t i = 0; i < sum.numel(); ++i) {
      if (magnitude[i] == 0.0) {
        ASSERT_EQ(after[i], before[i]) << "a key that nobody sees, element " << i;
      }
    }
    OwnedTensor expected = exact(before);
    for (std::int64_t i = 0; i < sum.numel(); ++i) expected.set(i, before[i] + sum[i]);
    expect_within(after, expected, [&](std::int64_t i) {
      return arithmetic() * ((pair + over_queries) * magnitude[i] + over_queries * std::fabs(before[i])) +
             products * magnitude[i];
    });
  };
  expect_added(t.dk, dk_before, reference.dk, reference.dk_magnitude);
  expect_added(t.dv, dv_before, reference.dv, reference.dv_magnitude);
}

TEST_P(AttentionAccuracy, OverwritingLeavesTheBitsOfAddingToZerosAndLaterCallsAdd) {
  if (!GetParam().deterministic) GTEST_SKIP() << "two runs need not agree";
  AttentionTensors added(c, dtype), overwritten(c, dtype);
  forward(c, added);
  forward(c, overwritten);
  poison_key_gradients(overwritten);
  backward(c, added);
  backward(c, overwritten, true, false);
  EXPECT_TRUE(overwritten.dq.same_bits(added.dq));
  EXPECT_TRUE(overwritten.dk.same_bits(added.dk));
  EXPECT_TRUE(overwritten.dv.same_bits(added.dv));
  const OwnedTensor dv_once = added.dv;
  backward(c, added);
  backward(c, overwritten);
  EXPECT_FALSE(overwritten.dv.same_bits(dv_once));
  EXPECT_TRUE(overwritten.dk.same_bits(added.dk));
  EXPECT_TRUE(overwritten.dv.same_bits(added.dv));
}

std::vector<Accuracy> all_accuracies() {
  std::vector<Accuracy> all;
  for (const AttentionCase& problem : cases) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) all.push_back({problem, dtype});
  }
  for (const AttentionCase& problem : fused_cases) all.push_back({problem, DType::bf16});
  all.push_back({many_documents(), DType::bf16});
  if (ops::attention_rounds_products(8, DType::bf16)) {
    all.push_back({tiled_case, DType::bf16});
    for (const AttentionCase& problem : fused_cases) all.push_back({problem, DType::bf16, false});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, AttentionAccuracy, ::testing::ValuesIn(all_accuracies()));

class AttentionGradient : public ::testing::TestWithParam<std::vector<AttentionSegment>> {};

TEST_P(AttentionGradient, IsTheFiniteDifferenceOfForwardInFp64) {
  const AttentionCase c{"", 2, 1, 3, 5, 7, GetParam()};
  AttentionTensors t(c, DType::f64);
  Scratch scratch = workspace_of(c, DType::f64);
  const auto objective = [&] {
    ops::attention_forward(scratch, {t.o, t.lse, t.q, t.k, t.v}, c.segments, c.settings());
    return dot(t.o, t.dout);
  };
  objective();
  backward(c, t);
  // Truncation and rounding of the difference are near 1e-11 (finite_difference.hpp).
  expect_gradient(t.q, t.dq, objective, 1e-9);
  expect_gradient(t.k, t.dk, objective, 1e-9);
  expect_gradient(t.v, t.dv, objective, 1e-9);
}
const std::vector<AttentionSegment> two_documents = {{0, 2, 0, 2}, {2, 3, 2, 5}};
INSTANTIATE_TEST_SUITE_P(Masks, AttentionGradient,
                         ::testing::Values(two_documents, under_window(2, two_documents),
                                           under_window(3, two_documents),
                                           std::vector<AttentionSegment>{
                                               {0, 2, 0, 2}, {2, 3, 0, 1, false}, {2, 3, 2, 5, true, 2}}));

TEST(Attention, GivesTheSameBitsEachTime) {
  for (const AttentionCase& c : fused_cases) {
    AttentionTensors first(c, DType::bf16), second(c, DType::bf16);
    for (AttentionTensors* t : {&first, &second}) {
      forward(c, *t);
      backward(c, *t);
    }
    for (const auto tensor : {&AttentionTensors::o, &AttentionTensors::lse, &AttentionTensors::dq,
                              &AttentionTensors::dk, &AttentionTensors::dv}) {
      EXPECT_TRUE((first.*tensor).same_bits(second.*tensor)) << c.name;
    }
  }
}

TEST(Attention, LargeScoresNeitherOverflowNorLoseTheLargest) {
  const AttentionCase c{"", 1, 1, 8, 300, 300, {{0, 300, 0, 300}}};
  AttentionTensors t(c, DType::f32);
  // Scores grow with the key up to 300² · 8 / √8, far past what exp holds: each query attends to itself.
  for (std::int64_t i = 0; i < t.q.numel(); ++i) {
    t.q.set(i, 300.0);
    t.k.set(i, static_cast<double>(i / 8));
  }
  forward(c, t);
  backward(c, t);
  EXPECT_TRUE(t.o.same_bits(t.v));
  EXPECT_TRUE(t.dv.same_bits(t.dout));
  const OwnedTensor dout = t.dout.to(DType::f64), v = t.v.to(DType::f64);
  // dout · v − D is zero but for the (d + 1) roundoffs of either sum.
  for (std::int64_t i = 0; i < t.dq.numel(); ++i) {
    const double pair = dot_rows(dout, i / 8, v, i / 8, 8).magnitude;
    ASSERT_LE(std::fabs(t.dq[i]), 2.0 * 9.0 * fp32_roundoff * pair * c.scale() * 300.0);
  }
}

TEST(Attention, NanInAnyInputReachesTheOutput) {
  const AttentionCase c{"", 1, 1, 8, 3, 40, {{0, 3, 0, 40}}};
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const int which : {0, 1, 2}) {
      AttentionTensors t(c, dtype);
      OwnedTensor& poisoned = which == 0 ? t.q : which == 1 ? t.k : t.v;
      poisoned.set(8 + 3, std::numeric_limits<double>::quiet_NaN());  // query 1, or key 1, which all see
      forward(c, t);
      const std::int64_t first = which == 0 ? 1 : 0, last = which == 0 ? 1 : 2;
      for (std::int64_t row = 0; row < 3; ++row) {
        const bool hit = first <= row && row <= last;
        EXPECT_EQ(std::isnan(t.o[row * 8 + 3]), hit)
            << name_of(dtype) << " input " << which << " row " << row;
        EXPECT_EQ(std::isnan(t.lse[row]), hit && which < 2);
      }
      backward(c, t);
      EXPECT_EQ(std::isnan(t.dv[0]), which < 2);
      EXPECT_TRUE(std::isnan(t.dk[0]));
      EXPECT_TRUE(std::isnan(t.dq[first * 8]));
    }
  }
}

TEST(Attention, OverwritingClearsKeysThatNoQuerySees) {
  // Keys before the window, of no segment, and of a segment without queries.
  const AttentionCase c{
      "", 2, 1, 16, 140, 900, under_window(60, {{0, 130, 100, 500}, {130, 0, 610, 30}, {130, 10, 650, 40}})};
  const auto seen = [](std::int64_t key) {
    return (key >= 470 - 59 && key < 600) || (key >= 650 && key < 690);
  };
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    AttentionTensors t(c, dtype);
    forward(c, t);
    poison_key_gradients(t);
    backward(c, t, true, false);
    for (std::int64_t key = 0; key < 900; ++key) {
      // Of a key that is seen a single element may cancel out in bf16, not all of them.
      bool any = false;
      for (std::int64_t i = 16 * key; i < 16 * (key + 1); ++i) {
        ASSERT_TRUE(std::isfinite(t.dk[i]) && std::isfinite(t.dv[i])) << "key " << key;
        ASSERT_TRUE(seen(key) || (t.dk[i] == 0.0 && t.dv[i] == 0.0)) << "key " << key;
        any = any || t.dv[i] != 0.0;
      }
      ASSERT_EQ(any, seen(key)) << "key " << key << ", " << name_of(dtype);
    }
  }
}

TEST(Attention, ACallWithoutQueriesDoesNothing) {
  const AttentionCase c{"", 2, 1, 8, 0, 5, {{0, 0, 0, 5}}};
  AttentionTensors t(c, DType::f32);
  const OwnedTensor before = t.dk;
  forward(c, t);
  backward(c, t);
  EXPECT_TRUE(t.dk.same_bits(before));
  poison_key_gradients(t);
  backward(c, t, true, false);
  EXPECT_TRUE(t.dk.same_bits(before));
  EXPECT_TRUE(t.dv.same_bits(before));
}

TEST(Attention, MismatchesBreakTheContractBeforeAnythingIsWritten) {
  const AttentionCase good{"", 4, 2, 8, 10, 20, {{0, 10, 0, 20}}};
  AttentionTensors t(good, DType::f32);
  const OwnedTensor untouched = t.o;
  const auto call = [&](const AttentionCase& c, ConstTensorView q, ConstTensorView k, TensorView lse,
                        std::size_t missing_workspace = 0) {
    Scratch scratch(ops::attention_workspace(good.limits(DType::f32)) - missing_workspace);
    ops::attention_forward(scratch, {t.o, lse, q, k, t.v}, c.segments, c.settings());
  };
  const auto refuse = [&](const AttentionCase& c) { EXPECT_THROW(call(c, t.q, t.k, t.lse), ContractError); };
  const auto with = [&](std::vector<AttentionSegment> segments) {
    AttentionCase c = good;
    c.segments = std::move(segments);
    return c;
  };
  refuse(with({}));                                                           // queries left out
  refuse(with({{0, 9, 0, 20}}));                                              // one left out
  refuse(with({{0, 11, 0, 20}}));                                             // past the end
  refuse(with({{0, 6, 0, 20}, {4, 4, 0, 20}}));                               // covered twice
  refuse(with({{5, 5, 0, 20}, {0, 5, 0, 20}, {5, 0, 0, 0}, {2, 0, 0, 21}}));  // keys past the end
  refuse(with({{0, 10, 11, 10}}));                                            // keys past the end
  refuse(with({{0, 10, 0, 9}}));                                              // fewer keys than queries
  refuse(with({{0, 10, -1, 20}}));
  refuse(with({{0, 10, 0, 20, true, -1}}));
  refuse(with({{0, 10, 0, 0, false}}));                      // no key
  refuse(with({{0, 10, 0, 20, false, 3}}));                  // a window without a diagonal
  refuse(with({{0, 10, 0, 5, false}, {0, 10, 4, 16}}));      // a key twice
  refuse(with({{0, 10, 0, 5, false}, {0, 9, 5, 15}}));       // other queries
  refuse(with({{0, 5, 0, 5}, {5, 5, 0, 9}, {0, 5, 6, 8}}));  // a run in two pieces
  const OwnedTensor three_heads = normal_tensor(DType::f32, {10, 3, 8}, 1);
  const OwnedTensor half = t.k.to(DType::bf16);
  OwnedTensor narrow_lse(DType::f32, {10, 2});
  EXPECT_THROW(call(good, three_heads, t.k, t.lse), ContractError);
  EXPECT_THROW(call(good, t.q, half, t.lse), ContractError);
  EXPECT_THROW(call(good, t.q, t.k, narrow_lse), ContractError);
  EXPECT_THROW(call(good, t.q, t.k, t.lse, 1), ContractError);
  EXPECT_TRUE(t.o.same_bits(untouched));
  EXPECT_NO_THROW(call(good, t.q, t.k, t.lse));
}

}  // namespace
}  // namespace layerstream::test

#include "ops/heads.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "tests/ops/ops_test.hpp"
#include "tests/support/finite_difference.hpp"

namespace layerstream::ops {
namespace {

using namespace layerstream::test;

constexpr double eps = 1e-6;

/// Which parts a transform has.
struct Parts {
  bool bias, norm, rope;
};

std::vector<Parts> every_subset() {
  std::vector<Parts> subsets;
  for (int bits = 0; bits < 8; ++bits) subsets.push_back({(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
  return subsets;
}

/// Random inputs of one head group that lies somewhere inside a projection's output, as q, k and v do.
struct Group {
  std::int64_t tokens, heads, head_dim;
  HeadColumns columns;
  OwnedTensor raw, bias, norm_weight, cos, sin, positions;

  Group(DType dtype, std::int64_t t, std::int64_t h, std::int64_t d, HeadColumns c)
      : Group(dtype, t, h, d, c, normal_tensor(dtype, {t, c.row_stride}, 1, 1.5)) {}
  Group(DType dtype, std::int64_t t, std::int64_t h, std::int64_t d, HeadColumns c, OwnedTensor r)
      : tokens(t),
        heads(h),
        head_dim(d),
        columns(c),
        raw(std::move(r)),
        bias(normal_tensor(accumulator_of(dtype), {h * d}, 2)),
        norm_weight(normal_tensor(accumulator_of(dtype), {d}, 3, 0.3, 1.0)),
        cos(accumulator_of(dtype), {max_positions, d / 2}),
        sin(accumulator_of(dtype), {max_positions, d / 2}),
        positions(integer_tensor({t}, max_positions, 4)) {
    for (std::int64_t i = 0; i < cos.numel(); ++i) {
      const double angle = 6.28 * uniform_at(5, 0, static_cast<std::uint64_t>(i));
      cos.set(i, std::cos(angle));
      sin.set(i, std::sin(angle));
    }
  }

  Group widened() const {
    Group wide(DType::f64, tokens, heads, head_dim, columns);
    wide.raw = raw.to(DType::f64);
    wide.bias = bias.to(DType::f64);
    wide.norm_weight = norm_weight.to(DType::f64);
    wide.cos = cos.to(DType::f64);
    wide.sin = sin.to(DType::f64);
    return wide;
  }

  HeadTransform transform(Parts parts) const {
    HeadTransform result;
    if (parts.bias) result.bias = bias;
    if (parts.norm) {
      result.norm_weight = norm_weight;
      result.norm_eps = eps;
    }
    if (parts.rope) {
      result.cos = cos;
      result.sin = sin;
      result.positions = positions;
    }
    return result;
  }

  OwnedTensor forward(Parts parts) const {
    OwnedTensor out(raw.dtype(), {tokens, heads, head_dim});
    head_transform_forward(no_workspace(), out, raw, columns, transform(parts));
    return out;
  }

  static constexpr std::int64_t max_positions = 11;
};

struct Gradients {
  OwnedTensor draw, dbias, dnorm_weight;
};

Gradients backward(const Group& group, Parts parts, const OwnedTensor& dout) {
  const DType accumulator = accumulator_of(group.raw.dtype());
  Gradients result{OwnedTensor(group.raw.dtype(), group.raw.shape()),
                   constant_tensor(accumulator, group.bias.shape(), 0.0),
                   constant_tensor(accumulator, group.norm_weight.shape(), 0.0)};
  Scratch scratch(
      head_transform_backward_workspace(group.tokens, group.heads, group.head_dim, group.raw.dtype()));
  head_transform_backward(scratch,
                          {.draw = result.draw,
                           .draw_columns = group.columns,
                           .dout = dout,
                           .raw = parts.norm ? ConstTensorView(group.raw) : ConstTensorView(),
                           .raw_columns = group.columns,
                           .dbias = parts.bias ? TensorView(result.dbias) : TensorView(),
                           .dnorm_weight = parts.norm ? TensorView(result.dnorm_weight) : TensorView()},
                          group.transform(parts));
  return result;
}

/// Whether flat element i of a (T, row_stride) tensor belongs to the group.
bool belongs(const Group& group, std::int64_t i) {
  const std::int64_t column = i % group.columns.row_stride - group.columns.first_column;
  return column >= 0 && column < group.heads * group.head_dim;
}

/// The transform of one token's head in plain FP64, one part after the other.
std::vector<double> expected_head(const Group& group, Parts parts, std::int64_t t, std::int64_t h) {
  const std::int64_t d = group.head_dim;
  std::vector<double> values;
  for (std::int64_t i = 0; i < d; ++i) {
    values.push_back(group.raw[t * group.columns.row_stride + group.columns.first_column + h * d + i] +
                     (parts.bias ? group.bias[h * d + i] : 0.0));
  }
  if (parts.norm) {
    double squares = 0.0;
    for (const double value : values) squares += value * value;
    const double rms = std::sqrt(squares / static_cast<double>(d) + eps);
    for (std::int64_t i = 0; i < d; ++i) values[static_cast<std::size_t>(i)] *= group.norm_weight[i] / rms;
  }
  if (!parts.rope) return values;
  const auto position = static_cast<std::int64_t>(group.positions[t]);
  std::vector<double> turned(values.size());
  for (std::int64_t i = 0; i < d; ++i) {
    const std::int64_t half = d / 2, pair = i < half ? i + half : i - half;
    const double partner = (i < half ? -1.0 : 1.0) * values[static_cast<std::size_t>(pair)];
    turned[static_cast<std::size_t>(i)] =
        values[static_cast<std::size_t>(i)] * group.cos[position * half + i % half] +
        partner * group.sin[position * half + i % half];
  }
  return turned;
}

struct Sizes {
  std::int64_t tokens, heads, head_dim;
  HeadColumns columns;
};
// A whole projection; a group in the middle of q|k|v; odd counts; a realistic head.
const Sizes all_sizes[] = {{1, 1, 2, {2, 0}},
                           {3, 2, 6, {12, 0}},
                           {19, 3, 6, {37, 11}},
                           {33, 1, 34, {70, 36}},
                           {5, 4, 128, {1024, 512}}};

TEST(HeadTransform, Fp64FollowsTheFormulaForEverySubsetOfParts) {
  for (const auto& [tokens, heads, head_dim, columns] : all_sizes) {
    const Group group(DType::f64, tokens, heads, head_dim, columns);
    for (const Parts parts : every_subset()) {
      const OwnedTensor out = group.forward(parts);
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::vector<double> expected = expected_head(group, parts, t, h);
          for (std::int64_t i = 0; i < head_dim; ++i) {
            // Values below 20; a dozen roundings and two orders of a short sum.
            ASSERT_NEAR(out[(t * heads + h) * head_dim + i], expected[static_cast<std::size_t>(i)], 1e-13);
          }
        }
      }
    }
  }
}

TEST(HeadTransform, OddHeadsWorkWithoutRope) {
  const Group group(DType::f64, 4, 2, 5, {13, 2});
  for (const Parts parts : {Parts{false, false, false}, Parts{true, true, false}}) {
    const OwnedTensor out = group.forward(parts);
    const std::vector<double> expected = expected_head(group, parts, 3, 1);
    for (std::int64_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(out[(3 * 2 + 1) * 5 + i], expected[static_cast<std::size_t>(i)], 1e-13);
    }
  }
}

TEST(HeadTransform, BackwardIsTheDerivativeForEverySubsetOfParts) {
  Group group(DType::f64, 18, 2, 6, {19, 4});
  const OwnedTensor dout = normal_tensor(DType::f64, {18, 2, 6}, 6);
  for (const Parts parts : every_subset()) {
    Gradients gradients = backward(group, parts, dout);
    for (std::int64_t i = 0; i < gradients.draw.numel(); ++i) {
      // What is outside the group keeps its poison.
      ASSERT_EQ(std::isnan(gradients.draw[i]), !belongs(group, i));
      if (!belongs(group, i)) gradients.draw.set(i, 0.0);
    }
    const auto objective = [&] { return dot(group.forward(parts), dout); };
    // Truncation at step 1e-3 through the norm of six values; without a norm the map is linear.
    expect_gradient(group.raw, gradients.draw, objective, parts.norm ? 1e-8 : 1e-10);
    if (parts.bias) expect_gradient(group.bias, gradients.dbias, objective, parts.norm ? 1e-8 : 1e-10);
    if (parts.norm) expect_gradient(group.norm_weight, gradients.dnorm_weight, objective, 1e-10);
  }
}

TEST(HeadTransform, ParameterGradientsAreAddedToWhatIsThere) {
  const Group group(DType::f32, 40, 2, 4, {8, 0});
  const Parts all{true, true, true};
  const OwnedTensor dout = normal_tensor(DType::f32, {40, 2, 4}, 7);
  const Gradients once = backward(group, all, dout);
  OwnedTensor draw(DType::f32, group.raw.shape()), dbias = once.dbias, dnorm_weight = once.dnorm_weight;
  Scratch scratch(head_transform_backward_workspace(40, 2, 4, DType::f32));
  head_transform_backward(scratch,
                          {.draw = draw,
                           .draw_columns = group.columns,
                           .dout = dout,
                           .raw = group.raw,
                           .raw_columns = group.columns,
                           .dbias = dbias,
                           .dnorm_weight = dnorm_weight},
                          group.transform(all));
  const auto twice = [](double value) { return 2.0 * value; };
  expect_equal(dbias, once.dbias.mapped(DType::f32, twice));
  expect_equal(dnorm_weight, once.dnorm_weight.mapped(DType::f32, twice));
}

TEST(HeadTransform, GradientMayArriveInTheAccumulatorDtype) {
  const Group group(DType::bf16, 21, 3, 8, {30, 5});
  const OwnedTensor dout = normal_tensor(DType::bf16, {21, 3, 8}, 8);
  for (const Parts parts : every_subset()) {
    const Gradients narrow = backward(group, parts, dout), wide = backward(group, parts, dout.to(DType::f32));
    EXPECT_TRUE(narrow.draw.same_bits(wide.draw));
    EXPECT_TRUE(narrow.dbias.same_bits(wide.dbias));
    EXPECT_TRUE(narrow.dnorm_weight.same_bits(wide.dnorm_weight));
  }
}

/// The backward of `count` tokens at a time, whose parameter gradients add up.
Gradients backward_in_slices(const Group& group, Parts parts, const OwnedTensor& dout, std::int64_t count) {
  const DType accumulator = accumulator_of(group.raw.dtype());
  Gradients result{OwnedTensor(group.raw.dtype(), group.raw.shape()),
                   constant_tensor(accumulator, group.bias.shape(), 0.0),
                   constant_tensor(accumulator, group.norm_weight.shape(), 0.0)};
  Scratch scratch(
      head_transform_backward_workspace(group.tokens, group.heads, group.head_dim, group.raw.dtype()));
  for (std::int64_t begin = 0; begin < group.tokens; begin += count) {
    const std::int64_t tokens = std::min(count, group.tokens - begin);
    HeadTransform transform = group.transform(parts);
    if (parts.rope) transform.positions = transform.positions.rows(begin, tokens);
    head_transform_backward(scratch,
                            {.draw = result.draw.view().rows(begin, tokens),
                             .draw_columns = group.columns,
                             .dout = dout.view().rows(begin, tokens),
                             .raw = parts.norm ? group.raw.view().rows(begin, tokens) : ConstTensorView(),
                             .raw_columns = group.columns,
                             .dbias = parts.bias ? TensorView(result.dbias) : TensorView(),
                             .dnorm_weight = parts.norm ? TensorView(result.dnorm_weight) : TensorView()},
                            transform);
  }
  return result;
}

// Shapes that a device shares out in every way it has: more tokens than it works on at once; several warps
// for the heads of a token, also in several teams; several tokens in a warp, also more than at once; heads of
// several pieces for a lane.
const Sizes shared_sizes[] = {{3500, 4, 128, {512, 0}}, {300, 28, 128, {4608, 0}}, {45, 40, 128, {5120, 0}},
                              {90, 70, 32, {2240, 0}},  {400, 3, 64, {256, 64}},   {52000, 2, 16, {32, 0}},
                              {9, 3, 1200, {3600, 0}}};

TEST(HeadTransform, TokensDoNotDependOnHowManyThereAre) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [tokens, heads, head_dim, columns] : shared_sizes) {
      if (dtype == DType::f32 && head_dim > 1024) continue;  // beyond what a device's backward takes
      const Group group(dtype, tokens, heads, head_dim, columns);
      const OwnedTensor dout = normal_tensor(dtype, {tokens, heads, head_dim}, 10);
      const std::int64_t count = tokens / 7 + 1;
      for (const Parts parts :
           {Parts{true, false, true}, Parts{false, true, true}, Parts{true, true, true}}) {
        OwnedTensor out(dtype, dout.shape());
        for (std::int64_t begin = 0; begin < tokens; begin += count) {
          const std::int64_t here = std::min(count, tokens - begin);
          HeadTransform transform = group.transform(parts);
          transform.positions = transform.positions.rows(begin, here);
          head_transform_forward(no_workspace(), out.view().rows(begin, here),
                                 group.raw.view().rows(begin, here), columns, transform);
        }
        EXPECT_TRUE(out.same_bits(group.forward(parts))) << tokens << " tokens of " << heads << " heads";
        const Gradients whole = backward(group, parts, dout),
                        sliced = backward_in_slices(group, parts, dout, count);
        EXPECT_TRUE(whole.draw.same_bits(sliced.draw)) << tokens << " tokens of " << heads << " heads";
        // Sums of n terms of standard normal size (below 10 after a norm of weight 1), in two orders: partial
        // sums stay below 10 √n, and six standard deviations of their n independent rounding errors of at
        // most that times the unit are 60 n units. A term that is left out or added twice is of size 1.
        const auto error = [](double n) { return 60.0 * n * fp32_roundoff; };
        if (parts.bias) {
          expect_within(whole.dbias, sliced.dbias,
                        [&](std::int64_t) { return error(static_cast<double>(tokens)); });
        }
        if (parts.norm) {
          expect_within(whole.dnorm_weight, sliced.dnorm_weight,
                        [&](std::int64_t) { return error(static_cast<double>(tokens * heads)); });
        }
      }
    }
  }
}

/// Queries, keys and values of one projection, as a decoder layer has them: keys and values with wide
/// gradients, values without a norm and a rope.
struct Projection {
  static constexpr std::int64_t num_groups = 3;
  std::int64_t tokens;
  bool has_norm;
  std::vector<Group> groups;
  std::vector<OwnedTensor> douts;

  Projection(DType dtype, std::int64_t t, std::int64_t query_heads, std::int64_t key_heads, std::int64_t d,
             bool norm)
      : tokens(t), has_norm(norm) {
    const std::int64_t stride = (query_heads + 2 * key_heads) * d;
    const OwnedTensor raw = normal_tensor(dtype, {t, stride}, 1, 1.5);
    for (std::int64_t g = 0; g < num_groups; ++g) {
      const std::int64_t heads = g == 0 ? query_heads : key_heads;
      const std::int64_t first = g == 0 ? 0 : (query_heads + (g - 1) * key_heads) * d;
      groups.emplace_back(dtype, t, heads, d, HeadColumns{stride, first}, raw);
      douts.push_back(normal_tensor(g == 0 ? dtype : accumulator_of(dtype), {t, heads, d},
                                    static_cast<std::uint64_t>(20 + g)));
    }
  }
  Parts parts(std::int64_t g) const {
    return has_norm ? Parts{false, g < 2, g < 2} : Parts{true, false, g < 2};
  }
};

TEST(HeadTransform, GroupsOfOneCallHaveTheBitsOfCallsOfTheirOwn) {
  struct Shape {
    std::int64_t tokens, query_heads, key_heads, head_dim;
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // A 7B model's heads, with more tokens than a device works on at once; few tokens; heads that share warps
    // unevenly and are no whole pieces; more heads than one team has.
    for (const auto& [tokens, query_heads, key_heads, head_dim] :
         {Shape{700, 28, 4, 128}, Shape{1, 28, 4, 128}, Shape{77, 6, 2, 80}, Shape{133, 5, 1, 6},
          Shape{90, 70, 70, 32}, Shape{9, 3, 1, 600}}) {
      for (const bool has_norm : {false, true}) {
        const Projection projection(dtype, tokens, query_heads, key_heads, head_dim, has_norm);
        std::vector<OwnedTensor> outs;
        std::vector<HeadTransformForward> forward;
        std::vector<Gradients> gradients;
        OwnedTensor draw(dtype, projection.groups[0].raw.shape());
        for (std::size_t g = 0; g < projection.groups.size(); ++g) {
          const Group& group = projection.groups[g];
          outs.push_back(OwnedTensor(dtype, {tokens, group.heads, head_dim}));
          gradients.push_back({OwnedTensor(dtype, {0}),
                               constant_tensor(accumulator_of(dtype), group.bias.shape(), 0.0),
                               constant_tensor(accumulator_of(dtype), group.norm_weight.shape(), 0.0)});
        }
        std::vector<HeadGroupBackward> backward_groups;
        for (std::size_t g = 0; g < projection.groups.size(); ++g) {
          const Group& group = projection.groups[g];
          const Parts parts = projection.parts(static_cast<std::int64_t>(g));
          forward.push_back({outs[g], group.raw, group.columns, group.transform(parts)});
          backward_groups.push_back(
              {{.draw = draw,
                .draw_columns = group.columns,
                .dout = projection.douts[g],
                .raw = parts.norm ? ConstTensorView(group.raw) : ConstTensorView(),
                .raw_columns = group.columns,
                .dbias = parts.bias ? TensorView(gradients[g].dbias) : TensorView(),
                .dnorm_weight = parts.norm ? TensorView(gradients[g].dnorm_weight) : TensorView()},
               group.transform(parts)});
        }
        Scratch scratch(head_transform_backward_workspace(tokens, query_heads, head_dim, dtype));
        head_transform_forward(no_workspace(), forward);
        head_transform_backward(scratch, backward_groups);
        for (std::size_t g = 0; g < projection.groups.size(); ++g) {
          const Group& group = projection.groups[g];
          const Parts parts = projection.parts(static_cast<std::int64_t>(g));
          const auto what =
              fmt::format("group {} of {} tokens, {} heads of {}", g, tokens, group.heads, head_dim);
          EXPECT_TRUE(outs[g].same_bits(group.forward(parts))) << what;
          const Gradients alone = backward(group, parts, projection.douts[g]);
          std::int64_t differing = 0;
          for (std::int64_t t = 0; t < tokens; ++t) {
            const std::int64_t first = t * group.columns.row_stride + group.columns.first_column;
            for (std::int64_t i = first; i < first + group.heads * head_dim; ++i) {
              if (!(draw[i] == alone.draw[i])) ++differing;
            }
          }
          EXPECT_EQ(differing, 0) << what;
          // As for tokens that are split among calls: a device shares out its teams by all groups of a call.
          const auto error = [](double n) { return 60.0 * n * fp32_roundoff; };
          if (parts.bias) {
            expect_within(gradients[g].dbias, alone.dbias,
                          [&](std::int64_t) { return error(static_cast<double>(tokens)); });
          }
          if (parts.norm) {
            expect_within(gradients[g].dnorm_weight, alone.dnorm_weight,
                          [&](std::int64_t) { return error(static_cast<double>(tokens * group.heads)); });
          }
        }
      }
    }
  }
}

TEST(HeadTransform, LowerPrecisionStaysWithinItsRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double output = dtype == DType::bf16 ? bf16_roundoff : fp32_roundoff;
    for (const auto& [tokens, heads, head_dim, columns] : all_sizes) {
      const Group low(dtype, tokens, heads, head_dim, columns);
      const Group high = low.widened();
      const double inner = (static_cast<double>(head_dim) / 16.0 + 12.0) * fp32_roundoff;
      for (const Parts parts : every_subset()) {
        const OwnedTensor expected = high.forward(parts);
        const OwnedTensor before_rope = high.forward({parts.bias, parts.norm, false});
        // Rounded: after the bias (which also moves the rms), the norm, its weight, and the rope. A rope
        // mixes the errors of both elements of a pair.
        const double roundings =
            (parts.bias ? (parts.norm ? 2.0 : 1.0) : 0.0) + (parts.norm ? 2.0 : 0.0) + 1.0;
        expect_within(low.forward(parts), expected, [&](std::int64_t i) {
          const std::int64_t half = head_dim / 2, pair = i % head_dim < half ? i + half : i - half;
          const double size = std::fabs(before_rope[i]) + (parts.rope ? std::fabs(before_rope[pair]) : 0.0);
          return (1.02 * roundings * output + inner) * size;
        });
      }
    }
  }
}

TEST(HeadTransform, LowerPrecisionGradientsStayWithinTheirRoundings) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double output = dtype == DType::bf16 ? bf16_roundoff : fp32_roundoff;
    const Group low(dtype, 600, 2, 32, {80, 9});
    const Group high = low.widened();
    const OwnedTensor dout = normal_tensor(dtype, {600, 2, 32}, 9);
    for (const Parts parts : every_subset()) {
      const Gradients actual = backward(low, parts, dout),
                      expected = backward(high, parts, dout.to(DType::f64));
      // Rows of 32 normal numbers: rms within [1, 3], |g| and |n| below 8. The rounded result, the
      // bias's rounding before the norm (which reaches every term), and FP32 noise.
      const double terms = 16.0 * ((parts.bias && parts.norm ? 2.0 * output : 0.0) + 20.0 * fp32_roundoff);
      for (std::int64_t i = 0; i < actual.draw.numel(); ++i) {
        if (!belongs(low, i)) continue;
        ASSERT_NEAR(actual.draw[i], expected.draw[i], 1.01 * output * std::fabs(expected.draw[i]) + terms);
      }
      // 1200 products g · n of standard normal size, whose rounding errors (n once, and twice through a
      // rounded bias) are independent: six standard deviations of their sum.
      const double sums =
          6.0 * std::sqrt(1200.0) * ((parts.norm ? 3.0 * output : 0.0) + 64.0 * fp32_roundoff);
      if (parts.bias) expect_within(actual.dbias, expected.dbias, [&](std::int64_t) { return sums; });
      if (parts.norm)
        expect_within(actual.dnorm_weight, expected.dnorm_weight, [&](std::int64_t) { return sums; });
    }
  }
}

TEST(HeadTransform, RefusesWhatDoesNotFit) {
  const Group group(DType::f32, 4, 2, 6, {13, 1});
  OwnedTensor out(DType::f32, {4, 2, 6});
  const HeadTransform all = group.transform({true, true, true});
  const auto forward = [&](TensorView to, HeadColumns columns, const HeadTransform& transform) {
    head_transform_forward(no_workspace(), to, group.raw, columns, transform);
  };
  EXPECT_NO_THROW(forward(out, group.columns, all));
  EXPECT_THROW(forward(out, {13, 2}, all), ContractError);  // columns 2 .. 13 of 13
  EXPECT_THROW(forward(out, {13, -1}, all), ContractError);
  EXPECT_THROW(forward(out, {12, 0}, all), ContractError);  // raw has rows of 13
  OwnedTensor odd(DType::f32, {4, 4, 3}), wide(DType::f64, {4, 2, 6});
  EXPECT_THROW(forward(odd, group.columns, group.transform({false, false, true})), ContractError);
  EXPECT_THROW(forward(wide, group.columns, all), ContractError);
  HeadTransform half_a_rope = all;
  half_a_rope.sin = {};
  EXPECT_THROW(forward(out, group.columns, half_a_rope), ContractError);

  OwnedTensor draw(DType::f32, group.raw.shape()), dbias(DType::f32, {12}), dnorm_weight(DType::f32, {6});
  const HeadTransformBackward good{.draw = draw,
                                   .draw_columns = group.columns,
                                   .dout = out,
                                   .raw = group.raw,
                                   .raw_columns = group.columns,
                                   .dbias = dbias,
                                   .dnorm_weight = dnorm_weight};
  const std::size_t bytes = head_transform_backward_workspace(4, 2, 6, DType::f32);
  Scratch enough(bytes), short_of_one(bytes - 1);
  EXPECT_NO_THROW(head_transform_backward(enough, good, all));
  EXPECT_THROW(head_transform_backward(short_of_one, good, all), ContractError);
  HeadTransformBackward bad = good;
  bad.dbias = {};
  EXPECT_THROW(head_transform_backward(enough, bad, all), ContractError);
  bad = good;
  bad.raw = {};
  EXPECT_THROW(head_transform_backward(enough, bad, all), ContractError);
  bad = good;
  bad.dout = wide;
  EXPECT_THROW(head_transform_backward(enough, bad, all), ContractError);
  const HeadTransformForward one{out, group.raw, group.columns, all};
  const std::vector<HeadTransformForward> many(most_head_groups + 1, one);
  EXPECT_THROW(head_transform_forward(no_workspace(), many), ContractError);
  EXPECT_THROW(head_transform_forward(no_workspace(), std::span(many).first(0)), ContractError);
  HeadTransformForward shorter = one;
  shorter.out = out.view().rows(0, 3);
  shorter.raw = group.raw.view().rows(0, 3);
  shorter.transform.positions = all.positions.rows(0, 3);
  EXPECT_NO_THROW(head_transform_forward(no_workspace(), std::vector{shorter}));
  EXPECT_THROW(head_transform_forward(no_workspace(), std::vector{one, shorter}), ContractError);
}

}  // namespace
}  // namespace layerstream::ops

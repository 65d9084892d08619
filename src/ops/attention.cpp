#include "ops/attention.hpp"

#include <cmath>
#include <limits>

#include "ops/detail/attention_cost.hpp"
#include "ops/detail/attention_shape.hpp"
#include "ops/detail/check.hpp"
#include "ops/elementwise.hpp"

namespace layerstream::ops {
namespace {

using detail::AttentionShape;

bool share_queries(const AttentionSegment& a, const AttentionSegment& b) {
  return a.first_query < b.first_query + b.num_queries && b.first_query < a.first_query + a.num_queries;
}

bool share_keys(const AttentionSegment& a, const AttentionSegment& b) {
  return a.first_key < b.first_key + b.num_keys && b.first_key < a.first_key + a.num_keys;
}

/// @throws ContractError unless segment `i` stays within `tokens` queries and `keys` keys, and leaves each of
/// its queries a key.
void check_segment(const char* operation, std::size_t i, const AttentionSegment& segment, std::int64_t tokens,
                   std::int64_t keys) {
  LAYERSTREAM_EXPECT(segment.num_queries >= 0 && segment.first_query >= 0 &&
                         segment.first_query <= tokens - segment.num_queries,
                     "{}: segment {} has queries [{}, +{}) of {}", operation, i, segment.first_query,
                     segment.num_queries, tokens);
  const std::int64_t fewest =
      segment.causal ? segment.num_queries : std::min<std::int64_t>(1, segment.num_queries);
  LAYERSTREAM_EXPECT(
      segment.num_keys >= fewest && segment.first_key >= 0 && segment.first_key <= keys - segment.num_keys,
      "{}: segment {} has keys [{}, +{}) of {} for {} queries", operation, i, segment.first_key,
      segment.num_keys, keys, segment.num_queries);
  LAYERSTREAM_EXPECT(segment.window >= 0 && (segment.causal || segment.window == 0),
                     "{}: segment {} has a window of {}{}", operation, i, segment.window,
                     segment.causal ? "" : " and no diagonal to count it from");
}

/// @throws ContractError unless the runs cover queries [0, tokens) once and stay within `keys` keys, each
/// with ranges that share none.
void check_segments(const char* operation, std::span<const AttentionSegment> segments, std::int64_t tokens,
                    std::int64_t keys) {
  std::int64_t covered = 0, last_end = 0;
  for (std::size_t begin = 0, end = 0; begin < segments.size(); begin = end) {
    end = begin + detail::leading_run(segments.subspan(begin));
    for (std::size_t i = begin; i < end; ++i) {
      check_segment(operation, i, segments[i], tokens, keys);
      for (std::size_t j = begin; j < i; ++j) {
        LAYERSTREAM_EXPECT(!share_keys(segments[j], segments[i]),
                           "{}: segments {} and {} share queries and keys", operation, j, i);
      }
    }
    const AttentionSegment& run = segments[begin];
    if (run.first_query < last_end) {  // out of order: compare with all before
      for (std::size_t j = 0; j < begin; ++j) {
        LAYERSTREAM_EXPECT(!share_queries(segments[j], run),
                           "{}: segments {} and {} share queries, though not all or with others between them",
                           operation, j, begin);
      }
    }
    last_end = std::max(last_end, run.first_query + run.num_queries);
    covered += run.num_queries;
  }
  LAYERSTREAM_EXPECT(covered == tokens, "{}: segments cover {} of {} queries", operation, covered, tokens);
}

/// Checks what both directions have in common.
/// @throws ContractError
AttentionShape checked_shape(const char* operation, const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, std::span<const AttentionSegment> segments,
                             const AttentionSettings& settings) {
  detail::expect_rank(operation, "q", q, 3);
  detail::expect_rank(operation, "k", k, 3);
  const AttentionShape shape{q.dim(1), k.dim(1), q.dim(2), settings.scale, settings.deterministic};
  LAYERSTREAM_EXPECT(
      shape.head_dim > 0 && shape.key_heads > 0 && shape.heads > 0 && shape.heads % shape.key_heads == 0,
      "{}: {} query heads on {} key heads of {}", operation, shape.heads, shape.key_heads, shape.head_dim);
  LAYERSTREAM_EXPECT(shape.query_stride() <= std::numeric_limits<int>::max(),
                     "{}: a row of {} elements does not fit the BLAS's 32-bit integers", operation,
                     shape.query_stride());
  LAYERSTREAM_EXPECT(std::isfinite(shape.scale), "{}: scale {}", operation, shape.scale);
  detail::expect_tensor(operation, "q", q, q.dtype(), {q.dim(0), shape.heads, shape.head_dim});
  detail::expect_tensor(operation, "k", k, q.dtype(), {k.dim(0), shape.key_heads, shape.head_dim});
  detail::expect_tensor(operation, "v", v, q.dtype(), k.shape());
  check_segments(operation, segments, q.dim(0), k.dim(0));
  return shape;
}

void expect_compute(const char* operation, DType dtype) {
  LAYERSTREAM_EXPECT(dtype == DType::f64 || dtype == DType::f32 || dtype == DType::bf16,
                     "{}: {} is no compute dtype; it takes fp64, fp32 or bf16", operation, name_of(dtype));
}

void expect_workspace(const char* operation, const Context& context, const AttentionShape& shape,
                      const ConstTensorView& q, const ConstTensorView& k,
                      std::span<const AttentionSegment> segments) {
  (void)detail::workspace_as<std::byte>(
      operation, context, attention_workspace(shape.limits(q.dtype(), q.dim(0), k.dim(0), segments)));
}

/// x (x + 1) / 2: pairs under a diagonal of `x` queries, none if there are none.
std::int64_t triangle(std::int64_t x) {
  return x > 0 ? x * (x + 1) / 2 : 0;
}

std::int64_t visible_pairs(const AttentionSegment& segment) {
  const std::int64_t all = segment.num_queries * segment.num_keys;
  if (!segment.causal) return all;
  const std::int64_t seen = all - triangle(segment.num_queries - 1);
  if (segment.window == 0 || segment.window >= segment.num_keys) return seen;
  // Query i is hidden all but the last `window` of the keys up to its own.
  const std::int64_t earlier = segment.num_keys - segment.num_queries;
  return seen - triangle(segment.num_keys - segment.window) + triangle(earlier - segment.window);
}

}  // namespace

std::int64_t visible_pairs(std::span<const AttentionSegment> segments) {
  std::int64_t pairs = 0;
  for (const AttentionSegment& segment : segments) pairs += visible_pairs(segment);
  return pairs;
}

void attention_forward(const Context& context, const AttentionForward& args,
                       std::span<const AttentionSegment> segments, const AttentionSettings& settings) {
  constexpr const char* operation = "attention_forward";
  const AttentionShape shape = checked_shape(operation, args.q, args.k, args.v, segments, settings);
  const DType compute = args.q.dtype();
  expect_compute(operation, compute);
  detail::expect_tensor(operation, "o", args.o, compute, args.q.shape());
  detail::expect_tensor(operation, "lse", args.lse, accumulator_of(compute), {args.q.dim(0), shape.heads});
  expect_workspace(operation, context, shape, args.q, args.k, segments);
  if (args.q.numel() > 0) detail::attention_forward(context, args, segments, shape);
}

void attention_backward(const Context& context, const AttentionBackward& args,
                        std::span<const AttentionSegment> segments, const AttentionSettings& settings) {
  constexpr const char* operation = "attention_backward";
  const AttentionShape shape = checked_shape(operation, args.q, args.k, args.v, segments, settings);
  const DType compute = args.q.dtype();
  expect_compute(operation, compute);
  detail::expect_tensor(operation, "dq", args.dq, compute, args.q.shape());
  detail::expect_tensor(operation, "dk", args.dk, accumulator_of(compute), args.k.shape());
  detail::expect_tensor(operation, "dv", args.dv, accumulator_of(compute), args.k.shape());
  detail::expect_tensor(operation, "dout", args.dout, compute, args.q.shape());
  detail::expect_tensor(operation, "o", args.o, compute, args.q.shape());
  detail::expect_tensor(operation, "lse", args.lse, accumulator_of(compute), {args.q.dim(0), shape.heads});
  expect_workspace(operation, context, shape, args.q, args.k, segments);
  if (args.q.numel() > 0) {
    detail::attention_backward(context, args, segments, shape);
  } else if (!args.accumulate) {
    detail::clear_key_gradients(context, args);
  }
}

AttentionLimits detail::AttentionShape::limits(DType compute, std::int64_t queries, std::int64_t keys,
                                               std::span<const AttentionSegment> segments) const {
  AttentionLimits limits{.num_attention_heads = heads,
                         .num_key_value_heads = key_heads,
                         .head_dim = head_dim,
                         .compute = compute,
                         .queries = queries,
                         .keys = keys,
                         .window = 0,
                         .deterministic = deterministic,
                         .longest = 1};
  for (const AttentionSegment& segment : segments) {
    limits.longest = std::max({limits.longest, segment.num_queries, segment.num_keys});
    limits.window = std::max(limits.window, std::min(segment.window, keys));
  }
  for (auto rest = segments; !rest.empty(); rest = rest.subspan(leading_run(rest))) {
    limits.several_ranges = limits.several_ranges || leading_run(rest) > 1;
  }
  return limits;
}

void detail::clear_key_gradients(const Context& context, const AttentionBackward& args) {
  fill_zero(context, args.dk);
  fill_zero(context, args.dv);
}

std::size_t attention_workspace(const AttentionLimits& limits) {
  LAYERSTREAM_EXPECT(limits.num_attention_heads > 0 && limits.num_key_value_heads > 0 && limits.head_dim > 0,
                     "attention of {} / {} heads of {}", limits.num_attention_heads,
                     limits.num_key_value_heads, limits.head_dim);
  return detail::attention_workspace(limits);
}

std::size_t gpu_attention_workspace(const AttentionLimits& limits) {
  if (!detail::cudnn_supports(limits.head_dim, limits.compute)) return attention_workspace(limits);
  return detail::AttentionWorkspaceLayout(limits).bytes;
}

bool attention_rounds_products(std::int64_t head_dim, DType compute) {
  return detail::attention_rounds_products(head_dim, compute);
}

}  // namespace layerstream::ops

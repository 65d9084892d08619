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

/// @throws ContractError unless the segments cover queries [0, tokens) once and stay within `keys` keys.
void check_segments(const char* operation, std::span<const AttentionSegment> segments, std::int64_t tokens,
                    std::int64_t keys) {
  const auto overlap = [](const AttentionSegment& a, const AttentionSegment& b) {
    return a.first_query < b.first_query + b.num_queries && b.first_query < a.first_query + a.num_queries;
  };
  std::int64_t covered = 0, last_end = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const AttentionSegment& segment = segments[i];
    LAYERSTREAM_EXPECT(segment.num_queries >= 0 && segment.first_query >= 0 &&
                           segment.first_query <= tokens - segment.num_queries,
                       "{}: segment {} has queries [{}, +{}) of {}", operation, i, segment.first_query,
                       segment.num_queries, tokens);
    LAYERSTREAM_EXPECT(segment.num_keys >= segment.num_queries && segment.first_key >= 0 &&
                           segment.first_key <= keys - segment.num_keys,
                       "{}: segment {} has keys [{}, +{}) of {} for {} queries", operation, i,
                       segment.first_key, segment.num_keys, keys, segment.num_queries);
    if (segment.first_query < last_end) {  // out of order: compare with all before
      for (std::size_t j = 0; j < i; ++j) {
        LAYERSTREAM_EXPECT(!overlap(segments[j], segment), "{}: segments {} and {} share queries", operation,
                           j, i);
      }
    }
    last_end = std::max(last_end, segment.first_query + segment.num_queries);
    covered += segment.num_queries;
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
  // A window beyond all keys is none; cutting it there keeps sums with it in range.
  const std::int64_t window = std::min(settings.window, k.dim(0));
  const AttentionShape shape{q.dim(1), k.dim(1), q.dim(2), settings.scale, window, settings.deterministic};
  LAYERSTREAM_EXPECT(
      shape.head_dim > 0 && shape.key_heads > 0 && shape.heads > 0 && shape.heads % shape.key_heads == 0,
      "{}: {} query heads on {} key heads of {}", operation, shape.heads, shape.key_heads, shape.head_dim);
  LAYERSTREAM_EXPECT(shape.query_stride() <= std::numeric_limits<int>::max(),
                     "{}: a row of {} elements does not fit the BLAS's 32-bit integers", operation,
                     shape.query_stride());
  LAYERSTREAM_EXPECT(std::isfinite(shape.scale), "{}: scale {}", operation, shape.scale);
  LAYERSTREAM_EXPECT(shape.window >= 0, "{}: window {}", operation, shape.window);
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

}  // namespace

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

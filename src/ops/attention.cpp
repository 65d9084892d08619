#include "ops/attention.hpp"

#include <cblas.h>

#include <cmath>
#include <limits>

#include "ops/detail/attention_tile.hpp"
#include "ops/detail/check.hpp"

namespace layerstream::ops {

std::size_t attention_workspace(std::int64_t num_attention_heads, std::int64_t num_key_value_heads,
                                std::int64_t head_dim, DType compute) {
  LAYERSTREAM_EXPECT(num_attention_heads > 0 && num_key_value_heads > 0 && head_dim > 0,
                     "attention of {} / {} heads of {}", num_attention_heads, num_key_value_heads, head_dim);
  const detail::AttentionScratchLayout layout{head_dim, compute == DType::bf16};
  return static_cast<std::size_t>(detail::attention_slots * layout.elements()) *
         size_of(accumulator_of(compute));
}

namespace detail {
namespace {

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

CBLAS_TRANSPOSE first_of(Product product) {
  return product == Product::t_n ? CblasTrans : CblasNoTrans;
}
CBLAS_TRANSPOSE second_of(Product product) {
  return product == Product::n_t ? CblasTrans : CblasNoTrans;
}

}  // namespace

AttentionShape checked_attention_shape(const char* operation, const ConstTensorView& q,
                                       const ConstTensorView& k, const ConstTensorView& v,
                                       std::span<const AttentionSegment> segments,
                                       const AttentionSettings& settings) {
  expect_rank(operation, "q", q, 3);
  expect_rank(operation, "k", k, 3);
  // A window beyond all keys is none; cutting it there keeps sums with it in range.
  const std::int64_t window = std::min(settings.window, k.dim(0));
  const AttentionShape shape{q.dim(1), k.dim(1), q.dim(2), settings.scale, window};
  LAYERSTREAM_EXPECT(
      shape.head_dim > 0 && shape.key_heads > 0 && shape.heads > 0 && shape.heads % shape.key_heads == 0,
      "{}: {} query heads on {} key heads of {}", operation, shape.heads, shape.key_heads, shape.head_dim);
  LAYERSTREAM_EXPECT(shape.query_stride() <= std::numeric_limits<int>::max(),
                     "{}: a row of {} elements does not fit the BLAS's 32-bit integers", operation,
                     shape.query_stride());
  LAYERSTREAM_EXPECT(std::isfinite(shape.scale), "{}: scale {}", operation, shape.scale);
  LAYERSTREAM_EXPECT(shape.window >= 0, "{}: window {}", operation, shape.window);
  expect_tensor(operation, "q", q, q.dtype(), {q.dim(0), shape.heads, shape.head_dim});
  expect_tensor(operation, "k", k, q.dtype(), {k.dim(0), shape.key_heads, shape.head_dim});
  expect_tensor(operation, "v", v, q.dtype(), k.shape());
  check_segments(operation, segments, q.dim(0), k.dim(0));
  return shape;
}

void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                  Tile<double> a, Tile<double> b, double beta, double* c, std::int64_t c_stride) {
  cblas_dgemm(CblasRowMajor, first_of(product), second_of(product), static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), beta, c, static_cast<int>(c_stride));
}

void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Tile<float> a,
                  Tile<float> b, float beta, float* c, std::int64_t c_stride) {
  cblas_sgemm(CblasRowMajor, first_of(product), second_of(product), static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), beta, c, static_cast<int>(c_stride));
}

}  // namespace detail
}  // namespace layerstream::ops

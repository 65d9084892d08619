#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "ops/detail/attention_shape.hpp"
#include "ops/detail/dispatch.hpp"

/// Pieces shared by the two directions of attention on the host. Work is cut into *units*, each one owner
/// of what it writes; unit u belongs to slot u mod `slots`, and a slot works through its units in order
/// with its own slice of the workspace. A unit reads its own run or segment only, so neither the number of
/// threads nor others of the call can change its result.
namespace layerstream::ops::detail {

inline constexpr std::int64_t attention_slots = 16;
inline constexpr std::int64_t query_tile = 64;
inline constexpr std::int64_t key_tile = 256;
/// Row pitch of a tile of scores, off the power of two that would map a column to few cache sets.
inline constexpr std::int64_t score_pitch = key_tile + 16;

/// body(run, queries, head) for the tiles of queries of `slot`, `queries` being counted from the run's first.
template <class Body>
void for_each_query_tile(std::int64_t slot, std::span<const AttentionSegment> segments, std::int64_t heads,
                         const Body& body) {
  std::int64_t next = slot;  // in units of the run at hand
  while (!segments.empty()) {
    const auto run = segments.first(leading_run(segments));
    const std::int64_t num_queries = run.front().num_queries;
    const std::int64_t units = tiles(num_queries, query_tile) * heads;
    for (; next < units; next += attention_slots) {
      const std::int64_t begin = next / heads * query_tile;
      body(run, Interval{begin, std::min(begin + query_tile, num_queries)}, next % heads);
    }
    next -= units;
    segments = segments.subspan(run.size());
  }
}

/// body(segment, keys, key head) for the tiles of keys of `slot`, `keys` being counted from the segment's
/// first.
template <class Body>
void for_each_key_tile(std::int64_t slot, std::span<const AttentionSegment> segments, std::int64_t key_heads,
                       const Body& body) {
  std::int64_t next = slot;  // in units of the segment at hand
  for (const AttentionSegment& segment : segments) {
    const std::int64_t units = tiles(segment.num_keys, key_tile) * key_heads;
    for (; next < units; next += attention_slots) {
      const std::int64_t begin = next / key_heads * key_tile;
      body(segment, Interval{begin, std::min(begin + key_tile, segment.num_keys)}, next % key_heads);
    }
    next -= units;
  }
}

/// Scratch of one slot, in elements of A.
template <class A>
struct AttentionScratch {
  A* scores;    // (query_tile, score_pitch) scores, then probabilities
  A* products;  // (query_tile, score_pitch) dout · v, then gradients of scores; backward only
  A* sums;      // (query_tile, d) sum over keys so far: o or dq
  A* rows;      // (4, query_tile) per-query numbers
  A* queries;   // (2, query_tile, d) widened q and dout; bf16 only
  A* keys;      // (2, key_tile, d) widened k and v; bf16 only
};

struct AttentionScratchLayout {
  std::int64_t head_dim;
  bool widens;

  std::int64_t scores() const { return query_tile * score_pitch; }
  std::int64_t sums() const { return query_tile * head_dim; }
  std::int64_t rows() const { return 4 * query_tile; }
  std::int64_t queries() const { return widens ? 2 * query_tile * head_dim : 0; }
  std::int64_t keys() const { return widens ? 2 * key_tile * head_dim : 0; }
  // Every part is a multiple of 64 elements, so all of them stay aligned.
  std::int64_t elements() const { return 2 * scores() + sums() + rows() + queries() + keys(); }

  template <class A>
  AttentionScratch<A> of_slot(A* workspace, std::int64_t slot) const {
    AttentionScratch<A> scratch{};
    A* next = workspace + slot * elements();
    const auto take = [&next](std::int64_t count) { return std::exchange(next, next + count); };
    scratch.scores = take(scores());
    scratch.products = take(scores());
    scratch.sums = take(sums());
    scratch.rows = take(rows());
    scratch.queries = take(queries());
    scratch.keys = take(keys());
    return scratch;
  }
};

/// A dense or strided tile of rows in the type of computation.
template <class A>
struct Tile {
  const A* data;
  std::int64_t stride;
};

/// The tile itself, or for bf16 its widened copy in `scratch`.
template <class T>
Tile<MathOf<T>> load_tile(const T* rows, std::int64_t stride, std::int64_t count, std::int64_t head_dim,
                          [[maybe_unused]] MathOf<T>* scratch) {
  if constexpr (std::is_same_v<T, MathOf<T>>) {
    return {rows, stride};
  } else {
    for (std::int64_t row = 0; row < count; ++row) {
      const T* from = rows + row * stride;
      MathOf<T>* to = scratch + row * head_dim;
      for (std::int64_t i = 0; i < head_dim; ++i) to[i] = load(from[i]);
    }
    return {scratch, head_dim};
  }
}

enum class Product { n_n, n_t, t_n };  // a · b, a · bᵀ, aᵀ · b

/// c = alpha · op(a) · op(b) + beta · c for op(a) (m, k), op(b) (k, n), by one BLAS call; inside a parallel
/// region the BLAS does not start threads of its own.
void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                  Tile<double> a, Tile<double> b, double beta, double* c, std::int64_t c_stride);
void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Tile<float> a,
                  Tile<float> b, float beta, float* c, std::int64_t c_stride);

/// The part of a row of scores that a mask leaves, zeroing the rest. Scores are of keys `keys`.
template <class A>
Interval clear_masked(A* row, Interval keys, Interval visible) {
  const std::int64_t begin = std::clamp(visible.begin, keys.begin, keys.end) - keys.begin;
  const std::int64_t end = std::clamp(visible.end, keys.begin, keys.end) - keys.begin;
  std::fill(row, row + begin, A(0));
  std::fill(row + std::max(begin, end), row + keys.size(), A(0));
  return {begin, std::max(begin, end)};
}

}  // namespace layerstream::ops::detail

#include <cmath>
#include <limits>

#include "ops/attention.hpp"
#include "ops/detail/attention_launch.hpp"
#include "ops/detail/attention_tile.hpp"
#include "ops/detail/softmax_rows.hpp"

namespace layerstream::ops {
namespace {

using detail::AttentionScratch;
using detail::AttentionShape;
using detail::Interval;
using detail::key_tile;
using detail::MathOf;
using detail::Product;
using detail::query_tile;
using detail::score_pitch;
using detail::Tile;

/// Online softmax over tiles of keys: Dao, "FlashAttention-2" (2023), algorithm 1.
/// A unit is a tile of queries of one head.
template <class T>
struct ForwardPass {
  using A = MathOf<T>;
  AttentionShape shape;
  T* o;        // (T, NH, d)
  A* lse;      // (T, NH)
  const T* q;  // (T, NH, d)
  const T* k;  // (S, NKV, d)
  const T* v;  // (S, NKV, d)
  std::span<const AttentionSegment> segments;
  A* workspace;
  detail::AttentionScratchLayout layout;

  void operator()(std::int64_t slot) const {
    const AttentionScratch<A> scratch = layout.of_slot(workspace, slot);
    detail::for_each_query_tile(slot, segments, shape.heads,
                                [&](std::span<const AttentionSegment> run, Interval queries,
                                    std::int64_t head) { attend(run, queries, head, scratch); });
  }

  void attend(std::span<const AttentionSegment> run, Interval queries, std::int64_t head,
              const AttentionScratch<A>& scratch) const {
    const std::int64_t d = shape.head_dim, count = queries.size();
    const std::int64_t first_row = run.front().first_query + queries.begin;
    const Tile<A> query = detail::load_tile(q + first_row * shape.query_stride() + head * d,
                                            shape.query_stride(), count, d, scratch.queries);
    A* largest = scratch.rows;
    A* total = scratch.rows + query_tile;
    std::fill(largest, largest + count, -std::numeric_limits<A>::infinity());
    std::fill(total, total + count, A(0));
    std::fill(scratch.sums, scratch.sums + count * d, A(0));
    for (const AttentionSegment& range : run) accumulate(range, queries, query, head, scratch);
    for (std::int64_t row = 0; row < count; ++row) {
      T* out = o + (first_row + row) * shape.query_stride() + head * d;
      const A* sums = scratch.sums + row * d;
      for (std::int64_t i = 0; i < d; ++i) out[i] = detail::store_as<T>(sums[i] / total[row]);
      lse[(first_row + row) * shape.heads + head] = largest[row] + std::log(total[row]);
    }
  }

  /// Adds the segment's keys to the sums and numbers of `queries` in `scratch`.
  void accumulate(const AttentionSegment& segment, Interval queries, Tile<A> query, std::int64_t head,
                  const AttentionScratch<A>& scratch) const {
    const std::int64_t d = shape.head_dim, count = queries.size();
    A* largest = scratch.rows;
    A* total = scratch.rows + query_tile;
    const Interval all_keys = detail::visible_keys(segment, queries);
    for (std::int64_t begin = all_keys.begin; begin < all_keys.end; begin += key_tile) {
      const Interval keys{begin, std::min(begin + key_tile, all_keys.end)};
      const std::int64_t key_offset =
          (segment.first_key + keys.begin) * shape.key_stride() + head / shape.group() * d;
      const Tile<A> key = detail::load_tile(k + key_offset, shape.key_stride(), keys.size(), d, scratch.keys);
      const Tile<A> value =
          detail::load_tile(v + key_offset, shape.key_stride(), keys.size(), d, scratch.keys + key_tile * d);
      detail::tile_product(Product::n_t, count, keys.size(), d, static_cast<A>(shape.scale), query, key, A(0),
                           scratch.scores, score_pitch);
      for (std::int64_t row = 0; row < count; ++row) {
        const Interval visible = detail::visible_keys(segment, queries.begin + row);
        accumulate_row(scratch.scores + row * score_pitch, keys, visible, largest[row], total[row],
                       scratch.sums + row * d);
      }
      detail::tile_product(Product::n_n, count, d, keys.size(), A(1), Tile<A>{scratch.scores, score_pitch},
                           value, A(1), scratch.sums, d);
    }
  }

  /// Scores become exp(score − largest so far); what was summed under an older maximum is rescaled.
  void accumulate_row(A* scores, Interval keys, Interval visible, A& largest, A& total, A* sums) const {
    const Interval seen = detail::clear_masked(scores, keys, visible);
    if (seen.size() == 0) return;
    const A before = largest;
    largest = std::max(before, detail::row_max(scores + seen.begin, seen.size()));
    const A sum = detail::row_exp(scores + seen.begin, seen.size(), largest);
    if (largest == before) {
      total += sum;
      return;
    }
    const A rescale = std::exp(before - largest);
    total = total * rescale + sum;
    for (std::int64_t i = 0; i < shape.head_dim; ++i) sums[i] *= rescale;
  }
};

}  // namespace

void detail::attention_forward(const Context& context, const AttentionForward& args,
                               std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  dispatch_compute(args.q.dtype(), "attention_forward", [&]<class Tag>(Tag) {
    using T = typename Tag::Type;
    using A = MathOf<T>;
    const ForwardPass<T> pass{shape,
                              args.o.as<T>(),
                              args.lse.as<A>(),
                              args.q.as<T>(),
                              args.k.as<T>(),
                              args.v.as<T>(),
                              segments,
                              static_cast<A*>(context.workspace),
                              {shape.head_dim, args.q.dtype() == DType::bf16}};
    for_each_slot("layerstream::attention_forward", pass);
  });
}

}  // namespace layerstream::ops

#include "ops/attention.hpp"
#include "ops/detail/attention_launch.hpp"
#include "ops/detail/attention_tile.hpp"
#include "ops/detail/launch.hpp"
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

/// Dao, "FlashAttention-2" (2023), algorithm 2, in two passes that both rebuild the probabilities P:
/// P = exp(scale · q·kᵀ − lse), dS = P ∘ (dout·vᵀ − D), dq = scale · dS·k, dk = scale · dSᵀ·q, dv = Pᵀ·dout.
template <class T>
struct Backward {
  using A = MathOf<T>;
  AttentionShape shape;
  T* dq;          // (T, NH, d)
  A* dk;          // (S, NKV, d)
  A* dv;          // (S, NKV, d)
  const T* dout;  // (T, NH, d)
  const T* q;     // (T, NH, d)
  const T* k;     // (S, NKV, d)
  const T* v;     // (S, NKV, d)
  const T* o;     // (T, NH, d)
  const A* lse;   // (T, NH)
  A* workspace;
  detail::AttentionScratchLayout layout;

  struct Queries {
    Interval range;
    std::int64_t first_row;  // of range.begin in q
    std::int64_t head;
    Tile<A> q, dout;
    const A* lse;    // (range.size())
    const A* delta;  // (range.size()) D = rowsum(dout · o)
  };

  struct Keys {
    Interval range;
    Tile<A> k, v;
  };

  std::int64_t query_offset(std::int64_t row, std::int64_t head) const {
    return row * shape.query_stride() + head * shape.head_dim;
  }

  /// @param segment of the queries' run
  Queries load_queries(const AttentionSegment& segment, Interval range, std::int64_t head,
                       const AttentionScratch<A>& scratch) const {
    const std::int64_t d = shape.head_dim, stride = shape.query_stride(), count = range.size();
    const std::int64_t first_row = segment.first_query + range.begin, offset = query_offset(first_row, head);
    A* shifts = scratch.rows;
    A* deltas = scratch.rows + query_tile;
    for (std::int64_t row = 0; row < count; ++row) {
      const T* a = dout + offset + row * stride;
      const T* b = o + offset + row * stride;
      shifts[row] = lse[(first_row + row) * shape.heads + head];
      deltas[row] = detail::SerialGroup{}.template sum<A>(
          d, [=](std::int64_t i) { return detail::load(a[i]) * detail::load(b[i]); });
    }
    return {range,
            first_row,
            head,
            detail::load_tile(q + offset, stride, count, d, scratch.queries),
            detail::load_tile(dout + offset, stride, count, d, scratch.queries + query_tile * d),
            shifts,
            deltas};
  }

  std::int64_t key_offset(const AttentionSegment& segment, Interval range, std::int64_t key_head) const {
    return (segment.first_key + range.begin) * shape.key_stride() + key_head * shape.head_dim;
  }

  Keys load_keys(const AttentionSegment& segment, Interval range, std::int64_t key_head,
                 const AttentionScratch<A>& scratch) const {
    const std::int64_t d = shape.head_dim, offset = key_offset(segment, range, key_head);
    return {range, detail::load_tile(k + offset, shape.key_stride(), range.size(), d, scratch.keys),
            detail::load_tile(v + offset, shape.key_stride(), range.size(), d, scratch.keys + key_tile * d)};
  }

  /// P into scratch.scores and dS into scratch.products, zero where masked. Only the first `num_keys` keys.
  void rebuild(const AttentionSegment& segment, const Queries& queries, const Keys& keys,
               std::int64_t num_keys, const AttentionScratch<A>& scratch) const {
    const std::int64_t d = shape.head_dim, count = queries.range.size();
    const Interval range{keys.range.begin, keys.range.begin + num_keys};
    detail::tile_product(Product::n_t, count, num_keys, d, static_cast<A>(shape.scale), queries.q, keys.k,
                         A(0), scratch.scores, score_pitch);
    detail::tile_product(Product::n_t, count, num_keys, d, A(1), queries.dout, keys.v, A(0), scratch.products,
                         score_pitch);
    for (std::int64_t row = 0; row < count; ++row) {
      A* p = scratch.scores + row * score_pitch;
      A* ds = scratch.products + row * score_pitch;
      const Interval visible = detail::visible_keys(segment, queries.range.begin + row);
      const Interval seen = detail::clear_masked(p, range, visible);
      detail::clear_masked(ds, range, visible);
      detail::row_exp(p + seen.begin, seen.size(), queries.lse[row]);
      const A delta = queries.delta[row];
      for (std::int64_t i = seen.begin; i < seen.end; ++i) ds[i] = p[i] * (ds[i] - delta);
    }
  }
};

/// A unit is a tile of queries of one head; sums into dq run over keys in order.
template <class T>
struct QueryPass {
  using A = MathOf<T>;
  Backward<T> backward;
  std::span<const AttentionSegment> segments;

  void operator()(std::int64_t slot) const {
    const AttentionShape& shape = backward.shape;
    const AttentionScratch<A> scratch = backward.layout.of_slot(backward.workspace, slot);
    detail::for_each_query_tile(slot, segments, shape.heads,
                                [&](std::span<const AttentionSegment> run, Interval range,
                                    std::int64_t head) { differentiate(run, range, head, scratch); });
  }

  void differentiate(std::span<const AttentionSegment> run, Interval range, std::int64_t head,
                     const AttentionScratch<A>& scratch) const {
    const AttentionShape& shape = backward.shape;
    const std::int64_t d = shape.head_dim, count = range.size();
    const auto queries = backward.load_queries(run.front(), range, head, scratch);
    std::fill(scratch.sums, scratch.sums + count * d, A(0));
    for (const AttentionSegment& segment : run) {
      const Interval all_keys = detail::visible_keys(segment, range);
      for (std::int64_t begin = all_keys.begin; begin < all_keys.end; begin += key_tile) {
        const Interval key_range{begin, std::min(begin + key_tile, all_keys.end)};
        const auto keys = backward.load_keys(segment, key_range, head / shape.group(), scratch);
        backward.rebuild(segment, queries, keys, key_range.size(), scratch);
        detail::tile_product(Product::n_n, count, d, key_range.size(), static_cast<A>(shape.scale),
                             Tile<A>{scratch.products, score_pitch}, keys.k, A(1), scratch.sums, d);
      }
    }
    for (std::int64_t row = 0; row < count; ++row) {
      T* out = backward.dq + backward.query_offset(queries.first_row + row, head);
      const A* sums = scratch.sums + row * d;
      for (std::int64_t i = 0; i < d; ++i) out[i] = detail::store_as<T>(sums[i]);
    }
  }
};

/// A unit is a tile of keys of one key head; sums into dk and dv run over tiles of queries, then over the
/// heads of the group. @pre the segments share no keys
template <class T>
struct KeyPass {
  using A = MathOf<T>;
  Backward<T> backward;
  std::span<const AttentionSegment> segments;

  void operator()(std::int64_t slot) const {
    const AttentionShape& shape = backward.shape;
    const AttentionScratch<A> scratch = backward.layout.of_slot(backward.workspace, slot);
    detail::for_each_key_tile(slot, segments, shape.key_heads,
                              [&](const AttentionSegment& segment, Interval range, std::int64_t key_head) {
                                differentiate(segment, range, key_head, scratch);
                              });
  }

  void differentiate(const AttentionSegment& segment, Interval range, std::int64_t key_head,
                     const AttentionScratch<A>& scratch) const {
    const AttentionShape& shape = backward.shape;
    const std::int64_t d = shape.head_dim, stride = shape.key_stride();
    const Interval all_queries = detail::seeing_queries(segment, range);
    if (all_queries.size() <= 0) return;
    const auto keys = backward.load_keys(segment, range, key_head, scratch);
    const std::int64_t offset = backward.key_offset(segment, range, key_head);
    for (std::int64_t begin = all_queries.begin; begin < all_queries.end; begin += query_tile) {
      const Interval query_range{begin, std::min(begin + query_tile, all_queries.end)};
      const std::int64_t count = query_range.size();
      const std::int64_t num_keys =
          std::min(range.end, detail::visible_keys(segment, query_range.end - 1).end) - range.begin;
      for (std::int64_t member = 0; member < shape.group(); ++member) {
        const auto queries =
            backward.load_queries(segment, query_range, key_head * shape.group() + member, scratch);
        backward.rebuild(segment, queries, keys, num_keys, scratch);
        detail::tile_product(Product::t_n, num_keys, d, count, A(1), Tile<A>{scratch.scores, score_pitch},
                             queries.dout, A(1), backward.dv + offset, stride);
        detail::tile_product(Product::t_n, num_keys, d, count, static_cast<A>(shape.scale),
                             Tile<A>{scratch.products, score_pitch}, queries.q, A(1), backward.dk + offset,
                             stride);
      }
    }
  }
};

}  // namespace

void detail::attention_backward(const Context& context, const AttentionBackward& args,
                                std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  if (!args.accumulate) clear_key_gradients(context, args);
  dispatch_compute(args.q.dtype(), "attention_backward", [&]<class Tag>(Tag) {
    using T = typename Tag::Type;
    using A = MathOf<T>;
    const Backward<T> backward{shape,
                               args.dq.as<T>(),
                               args.dk.as<A>(),
                               args.dv.as<A>(),
                               args.dout.as<T>(),
                               args.q.as<T>(),
                               args.k.as<T>(),
                               args.v.as<T>(),
                               args.o.as<T>(),
                               args.lse.as<A>(),
                               static_cast<A*>(context.workspace),
                               {shape.head_dim, args.q.dtype() == DType::bf16}};
    for_each_slot("layerstream::attention_backward_q", QueryPass<T>{backward, segments});
    for (auto rest = segments; !rest.empty();) {
      const std::size_t count = leading_disjoint(rest);
      for_each_slot("layerstream::attention_backward_kv", KeyPass<T>{backward, rest.first(count)});
      rest = rest.subspan(count);
    }
  });
}

}  // namespace layerstream::ops

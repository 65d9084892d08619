#include "ops/cuda/attention_blocks.hpp"
#include "ops/cuda/attention_blockwise.hpp"

namespace layerstream::ops::cuda {
namespace {

using detail::AttentionShape;
using detail::Interval;
using detail::MathOf;

/// D = rowsum(dout · o), one per row of a head.
template <class T>
struct Deltas {
  using A = MathOf<T>;
  A* delta;       // (T, NH)
  const T* dout;  // (T, NH, d)
  const T* o;     // (T, NH, d)
  std::int64_t head_dim;

  KOKKOS_FUNCTION void operator()(std::int64_t row) const {
    const T* a = dout + row * head_dim;
    const T* b = o + row * head_dim;
    A sum = 0;
    for (std::int64_t i = 0; i < head_dim; ++i)
      sum = Kokkos::fma(detail::load(a[i]), detail::load(b[i]), sum);
    delta[row] = sum;
  }
};

/// Dao, "FlashAttention-2" (2023), algorithm 2, in two kernels that both rebuild the probabilities P:
/// P = exp(scale · q·kᵀ − lse), dS = P ∘ (dout·vᵀ − D), dq = scale · dS·k, dk = scale · dSᵀ·q, dv = Pᵀ·dout.
template <class T>
struct BackwardTensors {
  using A = MathOf<T>;
  AttentionShape shape;
  T* dq;           // (T, NH, d)
  A* dk;           // (S, NKV, d)
  A* dv;           // (S, NKV, d)
  const T* dout;   // (T, NH, d)
  const T* q;      // (T, NH, d)
  const T* k;      // (S, NKV, d)
  const T* v;      // (S, NKV, d)
  const A* lse;    // (T, NH)
  const A* delta;  // (T, NH)
};

template <class A, int Columns>
constexpr int backward_rows = (sizeof(A) == 4 ? 16 : 8) > Columns ? (sizeof(A) == 4 ? 16 : 8) / Columns : 1;

/// A block is a tile of queries of one head; sums into dq run over keys in order.
template <class T, int Columns>
struct QueryBlock {
  using A = MathOf<T>;
  using Extents = BlockExtents<A, Columns, backward_rows<A, Columns>>;
  static constexpr int scratch_elements =
      2 * Extents::resident_elements + Extents::chunk_elements + Extents::score_elements;

  BackwardTensors<T> tensors;
  BlockList blocks;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    constexpr int rows = Extents::rows;
    const AttentionShape& shape = tensors.shape;
    const BlockList::Place place = blocks.at(member.league_rank());
    const AttentionSegment& run = blocks.segments[place.first];
    const std::int64_t head = place.block % shape.heads;
    const std::int64_t begin = place.block / shape.heads * Extents::block_rows;
    const std::int64_t left = run.num_queries - begin;
    const int count = left < Extents::block_rows ? static_cast<int>(left) : Extents::block_rows;
    const int head_dim = static_cast<int>(shape.head_dim);
    const std::int64_t first_row = run.first_query + begin;
    const std::int64_t query_offset = first_row * shape.query_stride() + head * head_dim;
    const A scale = static_cast<A>(shape.scale);
    const BlockThread<Extents> thread(member.team_rank());

    A* queries = static_cast<A*>(member.team_scratch(0).get_shmem(scratch_elements * sizeof(A)));
    A* douts = queries + Extents::resident_elements;
    A* chunk = douts + Extents::resident_elements;
    A* gradients = chunk + Extents::chunk_elements;  // dS
    load_resident<Extents>(thread.index, queries, tensors.q + query_offset, shape.query_stride(), count,
                           head_dim);
    load_resident<Extents>(thread.index, douts, tensors.dout + query_offset, shape.query_stride(), count,
                           head_dim);
    A lse[rows] = {}, delta[rows] = {};
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = thread.first_row + r;
      if (row >= count) continue;
      lse[r] = tensors.lse[(first_row + row) * shape.heads + head];
      delta[r] = tensors.delta[(first_row + row) * shape.heads + head];
    }
    A sums[rows][Columns] = {};

    const std::int64_t key_column = head / shape.group() * head_dim;
    for (int range = place.first; range < place.end; ++range) {
      const AttentionSegment segment = blocks.segments[range];
      const Interval keys = detail::visible_keys(segment, Interval{begin, begin + count});
      for (std::int64_t key = keys.begin; key < keys.end; key += step_rows) {
        const int num_keys = keys.end - key < step_rows ? static_cast<int>(keys.end - key) : step_rows;
        const std::int64_t offset = (segment.first_key + key) * shape.key_stride() + key_column;
        A score[rows], gradient[rows];
        multiply_rows<Extents>(member, thread, score, queries, chunk, tensors.k + offset, shape.key_stride(),
                               num_keys, head_dim);
        multiply_rows<Extents>(member, thread, gradient, douts, chunk, tensors.v + offset, shape.key_stride(),
                               num_keys, head_dim);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const int row = thread.first_row + r;
          const Interval visible = detail::visible_keys(segment, begin + row);
          const std::int64_t mine = key + thread.lane;
          const bool seen = row < count && visible.begin <= mine && mine < visible.end;
          gradients[row * score_pitch + thread.lane] =
              seen ? Kokkos::exp(scale * score[r] - lse[r]) * (gradient[r] - delta[r]) : A(0);
        }
        add_rows<Extents>(member, thread, sums, gradients, chunk, tensors.k + offset, shape.key_stride(),
                          num_keys, head_dim);
      }
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = thread.first_row + r;
      if (row >= count) continue;
      T* out = tensors.dq + query_offset + row * shape.query_stride();
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const int column = thread.lane + c * block_lanes;
        if (column < head_dim) out[column] = detail::store_as<T>(scale * sums[r][c]);
      }
    }
  }
};

/// A block is a tile of keys of one key head; sums into dk and dv run over the heads of the group, within
/// them over queries. @pre the segments of a launch share no keys
template <class T, int Columns>
struct KeyBlock {
  using A = MathOf<T>;
  using Extents = BlockExtents<A, Columns, backward_rows<A, Columns>>;
  static constexpr int scratch_elements =
      2 * Extents::resident_elements + Extents::chunk_elements + 2 * Extents::score_elements;

  BackwardTensors<T> tensors;
  BlockList blocks;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    constexpr int rows = Extents::rows;
    const AttentionShape& shape = tensors.shape;
    const BlockList::Place place = blocks.at(member.league_rank());
    const AttentionSegment& segment = blocks.segments[place.first];
    const std::int64_t key_head = place.block % shape.key_heads;
    const std::int64_t begin = place.block / shape.key_heads * Extents::block_rows;
    const std::int64_t left = segment.num_keys - begin;
    const int count = left < Extents::block_rows ? static_cast<int>(left) : Extents::block_rows;
    const int head_dim = static_cast<int>(shape.head_dim);
    const std::int64_t key_offset = (segment.first_key + begin) * shape.key_stride() + key_head * head_dim;
    const A scale = static_cast<A>(shape.scale);
    const BlockThread<Extents> thread(member.team_rank());
    const Interval queries = detail::seeing_queries(segment, Interval{begin, begin + count});
    if (queries.size() <= 0) return;

    A* keys = static_cast<A*>(member.team_scratch(0).get_shmem(scratch_elements * sizeof(A)));
    A* values = keys + Extents::resident_elements;
    A* chunk = values + Extents::resident_elements;
    A* probabilities = chunk + Extents::chunk_elements;
    A* gradients = probabilities + Extents::score_elements;
    load_resident<Extents>(thread.index, keys, tensors.k + key_offset, shape.key_stride(), count, head_dim);
    load_resident<Extents>(thread.index, values, tensors.v + key_offset, shape.key_stride(), count, head_dim);
    A dk_sums[rows][Columns] = {}, dv_sums[rows][Columns] = {};

    for (std::int64_t member_head = 0; member_head < shape.group(); ++member_head) {
      const std::int64_t head = key_head * shape.group() + member_head;
      for (std::int64_t query = queries.begin; query < queries.end; query += step_rows) {
        const int num_queries =
            queries.end - query < step_rows ? static_cast<int>(queries.end - query) : step_rows;
        const std::int64_t first_row = segment.first_query + query;
        const std::int64_t offset = first_row * shape.query_stride() + head * head_dim;
        A score[rows], gradient[rows];
        multiply_rows<Extents>(member, thread, score, keys, chunk, tensors.q + offset, shape.query_stride(),
                               num_queries, head_dim);
        multiply_rows<Extents>(member, thread, gradient, values, chunk, tensors.dout + offset,
                               shape.query_stride(), num_queries, head_dim);
        const bool exists = thread.lane < num_queries;
        const std::int64_t at = (first_row + thread.lane) * shape.heads + head;
        const A lse = exists ? tensors.lse[at] : A(0), delta = exists ? tensors.delta[at] : A(0);
        const Interval visible = detail::visible_keys(segment, query + thread.lane);
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const int row = thread.first_row + r;
          const std::int64_t mine = begin + row;
          const bool seen = exists && row < count && visible.begin <= mine && mine < visible.end;
          const A p = seen ? Kokkos::exp(scale * score[r] - lse) : A(0);
          probabilities[row * score_pitch + thread.lane] = p;
          gradients[row * score_pitch + thread.lane] = seen ? p * (gradient[r] - delta) : A(0);
        }
        add_rows<Extents>(member, thread, dv_sums, probabilities, chunk, tensors.dout + offset,
                          shape.query_stride(), num_queries, head_dim);
        add_rows<Extents>(member, thread, dk_sums, gradients, chunk, tensors.q + offset, shape.query_stride(),
                          num_queries, head_dim);
      }
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = thread.first_row + r;
      if (row >= count) continue;
      const std::int64_t out = key_offset + row * shape.key_stride();
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const int column = thread.lane + c * block_lanes;
        if (column >= head_dim) continue;
        tensors.dk[out + column] += scale * dk_sums[r][c];
        tensors.dv[out + column] += dv_sums[r][c];
      }
    }
  }
};

template <class T, int Columns>
void launch(const Context& context, const BackwardTensors<T>& tensors,
            std::span<const AttentionSegment> segments) {
  const AttentionShape& shape = tensors.shape;
  using Queries = QueryBlock<T, Columns>;
  using Keys = KeyBlock<T, Columns>;
  for_each_block(
      context, "layerstream::attention_backward_q", BlockOwner::run, segments,
      [&](const AttentionSegment& segment) {
        return detail::tiles(segment.num_queries, Queries::Extents::block_rows) * shape.heads;
      },
      Queries{tensors, {}});
  while (!segments.empty()) {
    const std::size_t count = detail::leading_disjoint(segments);
    for_each_block(
        context, "layerstream::attention_backward_kv", BlockOwner::segment, segments.first(count),
        [&](const AttentionSegment& segment) {
          return detail::tiles(segment.num_keys, Keys::Extents::block_rows) * shape.key_heads;
        },
        Keys{tensors, {}});
    segments = segments.subspan(count);
  }
}

}  // namespace

void blockwise_attention_backward(const Context& context, const AttentionBackward& args,
                                  std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  constexpr const char* operation = "attention_backward";
  if (!args.accumulate) detail::clear_key_gradients(context, args);
  detail::dispatch_compute(args.q.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    using A = MathOf<T>;
    A* const delta = static_cast<A*>(context.workspace);
    const BackwardTensors<T> tensors{
        shape,          args.dq.as<T>(), args.dk.as<A>(), args.dv.as<A>(),  args.dout.as<T>(),
        args.q.as<T>(), args.k.as<T>(),  args.v.as<T>(),  args.lse.as<A>(), delta};
    dispatch_columns(operation, shape.head_dim, [&]<int Columns>() {
      using Rows = Kokkos::RangePolicy<detail::ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
      Kokkos::parallel_for("layerstream::attention_delta",
                           Rows(detail::execution_space(context), 0, args.q.dim(0) * shape.heads),
                           Deltas<T>{delta, args.dout.as<T>(), args.o.as<T>(), shape.head_dim});
      launch<T, Columns>(context, tensors, segments);
    });
  });
}

std::size_t blockwise_attention_workspace(const AttentionLimits& limits) {
  return static_cast<std::size_t>(limits.queries * limits.num_attention_heads) *
         size_of(accumulator_of(limits.compute));
}

}  // namespace layerstream::ops::cuda

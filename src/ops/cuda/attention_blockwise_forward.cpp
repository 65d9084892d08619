#include "ops/cuda/attention_blocks.hpp"
#include "ops/cuda/attention_blockwise.hpp"

namespace layerstream::ops::cuda {
namespace {

using detail::AttentionShape;
using detail::Interval;
using detail::MathOf;

/// Online softmax over steps of keys: Dao, "FlashAttention-2" (2023), algorithm 1. A block is a tile of
/// queries of one head.
template <class T, int Columns>
struct ForwardBlock {
  using A = MathOf<T>;
  using Extents = BlockExtents<A, Columns, (sizeof(A) == 4 ? 32 : 16) / Columns>;
  static constexpr int scratch_elements = Extents::resident_elements + Extents::chunk_elements +
                                          Extents::score_elements + 3 * Extents::block_rows;

  AttentionShape shape;
  T* o;        // (T, NH, d)
  A* lse;      // (T, NH)
  const T* q;  // (T, NH, d)
  const T* k;  // (S, NKV, d)
  const T* v;  // (S, NKV, d)
  BlockList blocks;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    constexpr int rows = Extents::rows;
    const BlockList::Place place = blocks.at(member.league_rank());
    const AttentionSegment& run = blocks.segments[place.first];
    const std::int64_t head = place.block % shape.heads;
    const std::int64_t begin = place.block / shape.heads * Extents::block_rows;
    const std::int64_t left = run.num_queries - begin;
    const int count = left < Extents::block_rows ? static_cast<int>(left) : Extents::block_rows;
    const int head_dim = static_cast<int>(shape.head_dim);
    const std::int64_t first_row = run.first_query + begin;
    const BlockThread<Extents> thread(member.team_rank());

    A* queries = static_cast<A*>(member.team_scratch(0).get_shmem(scratch_elements * sizeof(A)));
    A* chunk = queries + Extents::resident_elements;
    A* scores = chunk + Extents::chunk_elements;
    A* largest = scores + Extents::score_elements;
    A* total = largest + Extents::block_rows;
    A* rescale = total + Extents::block_rows;
    load_resident<Extents>(thread.index, queries, q + first_row * shape.query_stride() + head * head_dim,
                           shape.query_stride(), count, head_dim);
    if (thread.index < Extents::block_rows) {
      largest[thread.index] = -std::numeric_limits<A>::infinity();
      total[thread.index] = 0;
    }
    A sums[rows][Columns] = {};

    const std::int64_t key_column = head / shape.group() * head_dim;
    for (int range = place.first; range < place.end; ++range) {
      const AttentionSegment segment = blocks.segments[range];
      const Interval keys = detail::visible_keys(segment, Interval{begin, begin + count});
      for (std::int64_t key = keys.begin; key < keys.end; key += step_rows) {
        const int num_keys = keys.end - key < step_rows ? static_cast<int>(keys.end - key) : step_rows;
        const std::int64_t offset = (segment.first_key + key) * shape.key_stride() + key_column;
        A score[rows];
        multiply_rows<Extents>(member, thread, score, queries, chunk, k + offset, shape.key_stride(),
                               num_keys, head_dim);
        bool seen[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const int row = thread.first_row + r;
          const Interval visible = detail::visible_keys(segment, begin + row);
          const std::int64_t mine = key + thread.lane;
          seen[r] = row < count && visible.begin <= mine && mine < visible.end;
          score[r] = seen[r] ? static_cast<A>(shape.scale) * score[r] : -std::numeric_limits<A>::infinity();
          scores[row * score_pitch + thread.lane] = score[r];
        }
        member.team_barrier();
        if (thread.index < Extents::block_rows) raise_largest(thread.index, scores, largest, rescale);
        member.team_barrier();
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const int row = thread.first_row + r;
          scores[row * score_pitch + thread.lane] = seen[r] ? Kokkos::exp(score[r] - largest[row]) : A(0);
#pragma unroll
          for (int c = 0; c < Columns; ++c) sums[r][c] *= rescale[row];
        }
        member.team_barrier();
        if (thread.index < Extents::block_rows) add_total(thread.index, scores, total, rescale);
        add_rows<Extents>(member, thread, sums, scores, chunk, v + offset, shape.key_stride(), num_keys,
                          head_dim);
      }
    }
    member.team_barrier();

#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const int row = thread.first_row + r;
      if (row >= count) continue;
      T* out = o + (first_row + row) * shape.query_stride() + head * head_dim;
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        const int column = thread.lane + c * block_lanes;
        if (column < head_dim) out[column] = detail::store_as<T>(sums[r][c] / total[row]);
      }
      if (thread.lane == 0) {
        lse[(first_row + row) * shape.heads + head] = largest[row] + Kokkos::log(total[row]);
      }
    }
  }

  /// The row's largest score so far, and by what sums under the older one shrink. Passes over NaN, which
  /// reaches the sums by itself.
  KOKKOS_FUNCTION static void raise_largest(int row, const A* scores, A* largest, A* rescale) {
    const A before = largest[row];
    A most = before;
    for (int j = 0; j < step_rows; ++j) {
      const A score = scores[row * score_pitch + j];
      most = score > most ? score : most;
    }
    largest[row] = most;
    rescale[row] = most == before ? A(1) : Kokkos::exp(before - most);
  }

  KOKKOS_FUNCTION static void add_total(int row, const A* scores, A* total, const A* rescale) {
    A sum = 0;
    for (int j = 0; j < step_rows; ++j) sum += scores[row * score_pitch + j];
    total[row] = Kokkos::fma(total[row], rescale[row], sum);
  }
};

}  // namespace

void blockwise_attention_forward(const Context& context, const AttentionForward& args,
                                 std::span<const AttentionSegment> segments, const AttentionShape& shape) {
  constexpr const char* operation = "attention_forward";
  detail::dispatch_compute(args.q.dtype(), operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    dispatch_columns(operation, shape.head_dim, [&]<int Columns>() {
      using Block = ForwardBlock<T, Columns>;
      for_each_block(
          context, "layerstream::attention_forward", BlockOwner::run, segments,
          [&](const AttentionSegment& segment) {
            return detail::tiles(segment.num_queries, Block::Extents::block_rows) * shape.heads;
          },
          Block{shape,
                args.o.as<T>(),
                args.lse.as<MathOf<T>>(),
                args.q.as<T>(),
                args.k.as<T>(),
                args.v.as<T>(),
                {}});
    });
  });
}

}  // namespace layerstream::ops::cuda

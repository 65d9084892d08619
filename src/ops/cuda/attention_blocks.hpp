#pragma once

#include <Kokkos_Core.hpp>
#include <limits>

#include "ops/detail/attention_shape.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/execution.hpp"

/// Pieces of the blockwise attention kernels. A team of 128 threads owns a block of rows: queries with their
/// o or dq, or keys with their dk and dv. It meets the other side in steps of 32 rows. The threads form four
/// groups of 32 lanes; a group owns `Rows` rows of the block. Where scores are computed a lane stands for a
/// row of the other side, where rows are summed for every 32nd column.
namespace layerstream::ops::cuda {

inline constexpr int block_lanes = 32;
inline constexpr int block_groups = 4;
inline constexpr int block_team = block_lanes * block_groups;
/// Rows of the other side in a step.
inline constexpr int step_rows = block_lanes;
inline constexpr int score_pitch = step_rows + 1;
inline constexpr std::int64_t most_head_dim = 512;

/// Extents of a block for head sizes up to 32 · Columns. Rows of the other side pass through shared memory in
/// chunks of columns, so that only the block's own rows grow with the head.
template <class A, int Columns, int RowsPerGroup>
struct BlockExtents {
  static constexpr int columns = Columns;    ///< per lane
  static constexpr int rows = RowsPerGroup;  ///< per group
  static constexpr int block_rows = block_groups * rows;
  static constexpr int pitch = Columns * block_lanes + 1;       ///< of a resident row
  static constexpr int chunk_columns = sizeof(A) == 4 ? 2 : 1;  ///< per lane
  static constexpr int chunk = chunk_columns * block_lanes;
  static constexpr int chunk_pitch = chunk + 1;
  static constexpr int chunks = Columns / chunk_columns;
  static constexpr int resident_elements = block_rows * pitch;
  static constexpr int chunk_elements = step_rows * chunk_pitch;
  static constexpr int score_elements = block_rows * score_pitch;
};

/// Blocks of a launch; few enough segments for the arguments of a kernel.
struct BlockList {
  static constexpr int capacity = 32;
  AttentionSegment segments[capacity];
  std::int64_t ends[capacity];  // blocks of this segment, or of its run, and all before it; ascending
  int count = 0;

  struct Place {
    int first, end;      // segments: one, or those of a run
    std::int64_t block;  // within them
  };
  KOKKOS_FUNCTION Place at(std::int64_t block) const {
    int i = 0;
    while (block >= ends[i]) ++i;
    const std::int64_t before = i == 0 ? 0 : ends[i - 1];
    int end = i + 1;
    while (end < count && ends[end] == ends[i]) ++end;  // the blocks of a run are its first segment's
    return {i, end, block - before};
  }
};

/// What the blocks of a launch are blocks of: the queries of a run, or the keys of a segment.
enum class BlockOwner { run, segment };

/// A thread's place in its team.
template <class Extents>
struct BlockThread {
  int index, lane, first_row;

  KOKKOS_FUNCTION explicit BlockThread(int team_rank)
      : index(team_rank), lane(team_rank % block_lanes), first_row(team_rank / block_lanes * Extents::rows) {}
};

/// Rows [0, count) of `source`, columns [0, head_dim), and zeros beyond them.
template <class Extents, class T>
KOKKOS_FUNCTION void load_resident(int thread, detail::MathOf<T>* rows, const T* source, std::int64_t stride,
                                   int count, int head_dim) {
  constexpr int width = Extents::columns * block_lanes;
  for (int i = thread; i < Extents::block_rows * width; i += block_team) {
    const int row = i / width, column = i % width;
    rows[row * Extents::pitch + column] =
        row < count && column < head_dim ? detail::load(source[row * stride + column]) : detail::MathOf<T>(0);
  }
}

/// The same for a chunk of columns of up to 32 rows of the other side. Waits before and after.
template <class Extents, class Member, class T>
KOKKOS_FUNCTION void load_chunk(const Member& member, int thread, detail::MathOf<T>* chunk, const T* source,
                                std::int64_t stride, int count, int first_column, int head_dim) {
  member.team_barrier();
  for (int i = thread; i < step_rows * Extents::chunk; i += block_team) {
    const int row = i / Extents::chunk, column = i % Extents::chunk;
    chunk[row * Extents::chunk_pitch + column] =
        row < count && first_column + column < head_dim
            ? detail::load(source[row * stride + first_column + column])
            : detail::MathOf<T>(0);
  }
  member.team_barrier();
}

/// products[r] = resident row first_row + r times row `lane` of the other side.
template <class Extents, class Member, class T>
KOKKOS_FUNCTION void multiply_rows(const Member& member, const BlockThread<Extents>& thread,
                                   detail::MathOf<T> (&products)[Extents::rows],
                                   const detail::MathOf<T>* resident, detail::MathOf<T>* chunk,
                                   const T* source, std::int64_t stride, int count, int head_dim) {
  for (int r = 0; r < Extents::rows; ++r) products[r] = 0;
  for (int first = 0; first < head_dim; first += Extents::chunk) {
    load_chunk<Extents>(member, thread.index, chunk, source, stride, count, first, head_dim);
    const int width = head_dim - first < Extents::chunk ? head_dim - first : Extents::chunk;
    const detail::MathOf<T>* mine = resident + thread.first_row * Extents::pitch + first;
    const detail::MathOf<T>* other = chunk + thread.lane * Extents::chunk_pitch;
    for (int i = 0; i < width; ++i) {
      const detail::MathOf<T> value = other[i];
#pragma unroll
      for (int r = 0; r < Extents::rows; ++r) {
        products[r] = Kokkos::fma(mine[r * Extents::pitch + i], value, products[r]);
      }
    }
  }
}

/// sums[r][c] += sum over rows j of the other side of weights[first_row + r, j] · source[j, lane + 32 c].
template <class Extents, class Member, class T>
KOKKOS_FUNCTION void add_rows(const Member& member, const BlockThread<Extents>& thread,
                              detail::MathOf<T> (&sums)[Extents::rows][Extents::columns],
                              const detail::MathOf<T>* weights, detail::MathOf<T>* chunk, const T* source,
                              std::int64_t stride, int count, int head_dim) {
#pragma unroll
  for (int c = 0; c < Extents::chunks; ++c) {
    if (c * Extents::chunk >= head_dim) continue;
    load_chunk<Extents>(member, thread.index, chunk, source, stride, count, c * Extents::chunk, head_dim);
    for (int j = 0; j < step_rows; ++j) {
#pragma unroll
      for (int i = 0; i < Extents::chunk_columns; ++i) {
        const detail::MathOf<T> value = chunk[j * Extents::chunk_pitch + thread.lane + i * block_lanes];
#pragma unroll
        for (int r = 0; r < Extents::rows; ++r) {
          detail::MathOf<T>& sum = sums[r][c * Extents::chunk_columns + i];
          sum = Kokkos::fma(weights[(thread.first_row + r) * score_pitch + j], value, sum);
        }
      }
    }
  }
}

/// Launches `body` for every block: count(segment) of them for each segment, or for the first of each run.
template <class Body, class Count>
void for_each_block(const Context& context, const char* label, BlockOwner owner,
                    std::span<const AttentionSegment> segments, const Count& count, Body body) {
  while (!segments.empty()) {
    BlockList& list = body.blocks;
    list.count = 0;
    std::int64_t blocks = 0;
    while (!segments.empty()) {
      const std::size_t together = owner == BlockOwner::run ? detail::leading_run(segments) : 1;
      LAYERSTREAM_EXPECT(together <= std::size_t{BlockList::capacity}, "{}: {} ranges of keys for one run",
                         label, together);
      if (static_cast<std::size_t>(list.count) + together > BlockList::capacity) break;
      const auto owned = segments.first(together);
      segments = segments.subspan(together);
      const std::int64_t added = count(owned.front());
      if (added == 0) continue;
      blocks += added;
      for (const AttentionSegment& segment : owned) {
        list.segments[list.count] = segment;
        list.ends[list.count] = blocks;
        ++list.count;
      }
    }
    if (blocks == 0) continue;
    LAYERSTREAM_EXPECT(blocks <= std::numeric_limits<int>::max(), "{}: {} blocks in one launch", label,
                       blocks);
    // LightWeight: the functor goes as an argument of the kernel rather than through Kokkos's one buffer of
    // constant memory, where a launch waits for its predecessor.
    const auto policy = Kokkos::Experimental::require(
        Kokkos::TeamPolicy<detail::ExecutionSpace>(detail::execution_space(context), static_cast<int>(blocks),
                                                   block_team),
        Kokkos::Experimental::WorkItemProperty::HintLightWeight);
    auto sized = policy;
    sized.set_scratch_size(
        0, Kokkos::PerTeam(static_cast<int>(Body::scratch_elements * sizeof(typename Body::A))));
    static_assert(sizeof(Body) < 3500);
    Kokkos::parallel_for(label, sized, body);
  }
}

/// Calls function.template operator()<Columns>() with the columns per lane that a head needs.
/// @throws ContractError for a head that is too large.
template <class Function>
void dispatch_columns(const char* operation, std::int64_t head_dim, const Function& function) {
  LAYERSTREAM_EXPECT(head_dim <= most_head_dim, "{}: heads of {}; without cuDNN the largest is {}", operation,
                     head_dim, most_head_dim);
  if (head_dim <= 4 * block_lanes) {
    function.template operator()<4>();
  } else if (head_dim <= 8 * block_lanes) {
    function.template operator()<8>();
  } else {
    function.template operator()<16>();
  }
}

}  // namespace layerstream::ops::cuda

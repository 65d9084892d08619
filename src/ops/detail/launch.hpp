#pragma once

#include <limits>

#include "core/error.hpp"
#include "ops/detail/execution.hpp"

/// Kernel shapes of ops/. A body is a functor whose operator() takes a *group*: one CPU thread in a CPU
/// build, a team of lanes on a device. Sums inside a group run in an order fixed by the extent (and, on a
/// device, by the team size, which is a constant), never by the number of threads.
namespace layerstream::ops::detail {

/// One thread that does all of a group's work.
struct SerialGroup {
  /// f(i) for i in [0, n), iterations independent of each other.
  template <class F>
  KOKKOS_INLINE_FUNCTION void for_each(std::int64_t n, const F& f) const {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }

  /// Sum of f(i) in A: element i goes to partial sum i mod 16, and the partial sums are added as a tree.
  template <class A, class F>
  KOKKOS_INLINE_FUNCTION A sum(std::int64_t n, const F& f) const {
    A partial[lanes] = {};
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
#pragma omp simd
      for (int lane = 0; lane < lanes; ++lane) partial[lane] += static_cast<A>(f(i + lane));
    }
    for (int lane = 0; i + lane < n; ++lane) partial[lane] += static_cast<A>(f(i + lane));
    for (int width = lanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) partial[lane] += partial[lane + width];
    }
    return partial[0];
  }

  /// Largest f(i); NaN is passed over. @pre n > 0
  template <class A, class F>
  KOKKOS_INLINE_FUNCTION A max(std::int64_t n, const F& f) const {
    A largest[lanes];
    for (int lane = 0; lane < lanes; ++lane) largest[lane] = Kokkos::Experimental::finite_min_v<A>;
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
#pragma omp simd
      for (int lane = 0; lane < lanes; ++lane) {
        const A value = f(i + lane);
        largest[lane] = value > largest[lane] ? value : largest[lane];
      }
    }
    for (; i < n; ++i) {
      const A value = f(i);
      largest[0] = value > largest[0] ? value : largest[0];
    }
    for (int lane = 1; lane < lanes; ++lane) {
      largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
    }
    return largest[0];
  }

  /// True on the one lane that does what is done once per group.
  KOKKOS_INLINE_FUNCTION bool is_leader() const {
    return true;
  }

 private:
  static constexpr int lanes = 16;
};

/// A Kokkos team; element i is always visited by the same lane, so a lane may reread what it wrote.
template <class Member>
struct TeamGroup {
  const Member& member;

  template <class F>
  KOKKOS_INLINE_FUNCTION void for_each(std::int64_t n, const F& f) const {
    Kokkos::parallel_for(Kokkos::TeamVectorRange(member, n), f);
  }

  template <class A, class F>
  KOKKOS_INLINE_FUNCTION A sum(std::int64_t n, const F& f) const {
    A total{};
    Kokkos::parallel_reduce(
        Kokkos::TeamVectorRange(member, n),
        [&](std::int64_t i, A& partial) { partial += static_cast<A>(f(i)); }, total);
    return total;
  }

  template <class A, class F>
  KOKKOS_INLINE_FUNCTION A max(std::int64_t n, const F& f) const {
    A largest = Kokkos::Experimental::finite_min_v<A>;
    Kokkos::parallel_reduce(
        Kokkos::TeamVectorRange(member, n),
        [&](std::int64_t i, A& partial) {
          const A value = f(i);
          partial = value > partial ? value : partial;
        },
        Kokkos::Max<A>(largest));
    return largest;
  }

  KOKKOS_INLINE_FUNCTION bool is_leader() const { return member.team_rank() == 0; }
};

/// Lanes of a team on a device; part of the order of sums there.
inline constexpr int team_lanes = 128;

template <class Body>
struct SerialRows {
  Body body;
  void operator()(std::int64_t row) const { body(SerialGroup{}, row); }
};

template <class Body>
struct TeamRows {
  Body body;
  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    body(TeamGroup<Member>{member}, static_cast<std::int64_t>(member.league_rank()));
  }
};

/// body(group, row) for every row in [0, rows), rows independent of each other.
template <class Body>
void for_each_row(const ExecutionSpace& space, const char* label, std::int64_t rows, const Body& body) {
  if (rows == 0) return;
  if constexpr (runs_on_host) {
    Kokkos::parallel_for(label,
                         Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(space, 0, rows),
                         SerialRows<Body>{body});
  } else {
    LAYERSTREAM_EXPECT(rows <= std::numeric_limits<int>::max(), "{}: {} rows in one launch", label, rows);
    Kokkos::parallel_for(label, Kokkos::TeamPolicy<ExecutionSpace>(space, static_cast<int>(rows), team_lanes),
                         TeamRows<Body>{body});
  }
}

template <class Body>
struct ElementTile {
  static constexpr std::int64_t size = 4096;
  Body body;
  std::int64_t elements;
  void operator()(std::int64_t tile) const {
    const std::int64_t begin = tile * size;
    const std::int64_t end = begin + size < elements ? begin + size : elements;
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) body(i);
  }
};

/// body(i) for every i in [0, elements), iterations independent of each other.
template <class Body>
void for_each_element(const ExecutionSpace& space, const char* label, std::int64_t elements,
                      const Body& body) {
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  if (elements == 0) return;
  if constexpr (runs_on_host) {
    constexpr std::int64_t size = ElementTile<Body>::size;
    Kokkos::parallel_for(label, Policy(space, 0, (elements + size - 1) / size),
                         ElementTile<Body>{body, elements});
  } else {
    Kokkos::parallel_for(label, Policy(space, 0, elements), body);
  }
}

/// Columns that one work item of for_each_column_tile owns, at most: four cache lines of FP32 for a CPU
/// thread, one column for a device lane (neighbouring lanes read neighbouring columns).
inline constexpr int column_tile = runs_on_host ? 64 : 1;

template <class Body>
struct ColumnTiles {
  Body body;
  std::int64_t columns;
  KOKKOS_FUNCTION void operator()(std::int64_t tile) const {
    const std::int64_t begin = tile * column_tile;
    const std::int64_t count = columns - begin < column_tile ? columns - begin : column_tile;
    body(begin, static_cast<int>(count));
  }
};

/// body(first_column, count), count <= column_tile, for ranges that cover [0, columns). For sums down the
/// rows of a matrix: a body visits rows in order, so the result is the same however work is spread.
template <class Body>
void for_each_column_tile(const ExecutionSpace& space, const char* label, std::int64_t columns,
                          const Body& body) {
  if (columns == 0) return;
  Kokkos::parallel_for(label,
                       Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(
                           space, 0, (columns + column_tile - 1) / column_tile),
                       ColumnTiles<Body>{body, columns});
}

}  // namespace layerstream::ops::detail

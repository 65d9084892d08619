#pragma once

#include <limits>

#include "core/error.hpp"
#include "ops/detail/execution.hpp"
#include "ops/detail/vector.hpp"
#if defined(KOKKOS_ENABLE_CUDA)
#include "ops/cuda/team.hpp"
#endif

/// Kernel shapes of ops/. A body is a functor whose operator() takes a *group*: one CPU thread in a CPU
/// build, a team of lanes on a device. Sums inside a group run in an order fixed by the extent (and, on a
/// device, by the team size, which the extent decides as well), never by the number of threads.
namespace layerstream::ops::detail {

/// One thread that does all of a group's work.
struct SerialGroup {
  static constexpr bool is_team = false;

  /// f(i) for i in [0, n), iterations independent of each other.
  template <class F>
  KOKKOS_INLINE_FUNCTION void for_each(std::int64_t n, const F& f) const {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }

  /// f(piece) for pieces that cover [0, n), independent of each other. The width is a device's.
  template <int, class F>
  KOKKOS_INLINE_FUNCTION void for_each_piece(std::int64_t n, const F& f) const {
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) f(Piece<1, true>{i});
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

  /// The same of f(piece), which is the piece's own sum.
  template <class A, int, class F>
  KOKKOS_INLINE_FUNCTION A sum_pieces(std::int64_t n, const F& f) const {
    return sum<A>(n, [&](std::int64_t i) { return f(Piece<1, true>{i}); });
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

/// How a device runs the rows of for_each_row; without meaning for a CPU.
struct RowLaunch {
  bool whole = false;  ///< see whole_pieces
  int lanes = 128;     ///< of a row's team: a multiple of 32
};

template <class Body>
struct SerialRows {
  Body body;
  void operator()(std::int64_t row) const { body(SerialGroup{}, row); }
};

#if defined(KOKKOS_ENABLE_CUDA)
template <class Body, bool Whole>
struct TeamRows {
  Body body;
  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    body(cuda::Team<Whole>{member.team_rank(), member.team_size()},
         static_cast<std::int64_t>(member.league_rank()));
  }
};

/// Most lanes that a body is launched with: Body::most_lanes, or the lanes of RowLaunch.
template <class Body>
constexpr int most_lanes() {
  if constexpr (requires { Body::most_lanes; }) {
    return Body::most_lanes;
  } else {
    return RowLaunch{}.lanes;
  }
}

/// How many lanes a multiprocessor is to hold at least, which bounds the registers of each:
/// Body::resident_lanes, or half of what it can.
template <class Body>
constexpr int resident_lanes() {
  if constexpr (requires { Body::resident_lanes; }) {
    return Body::resident_lanes;
  } else {
    return 1024;
  }
}

template <class Body, bool Whole>
void launch_teams(const ExecutionSpace& space, const char* label, int rows, int lanes, const Body& body) {
  constexpr int most = most_lanes<Body>();
  using Bounds = Kokkos::LaunchBounds<most, resident_lanes<Body>() / most>;
  Kokkos::parallel_for(label, Kokkos::TeamPolicy<ExecutionSpace, Bounds>(space, rows, lanes),
                       TeamRows<Body, Whole>{body});
}
#endif

/// body(group, row) for every row in [0, rows), rows independent of each other. most_lanes<Body>() bounds
/// launch.lanes.
template <class Body>
void for_each_row(const ExecutionSpace& space, const char* label, std::int64_t rows, const Body& body,
                  [[maybe_unused]] RowLaunch launch = {}) {
  if (rows == 0) return;
#if defined(KOKKOS_ENABLE_CUDA)
  LAYERSTREAM_EXPECT(rows <= std::numeric_limits<int>::max(), "{}: {} rows in one launch", label, rows);
  if (launch.whole) {
    launch_teams<Body, true>(space, label, static_cast<int>(rows), launch.lanes, body);
  } else {
    launch_teams<Body, false>(space, label, static_cast<int>(rows), launch.lanes, body);
  }
#else
  Kokkos::parallel_for(label,
                       Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>(space, 0, rows),
                       SerialRows<Body>{body});
#endif
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
    for (std::int64_t i = begin; i < end; ++i) body(Piece<1, true>{i});
  }
};

template <class Body, bool Aligned>
struct LanePieces {
  Body body;
  std::int64_t elements;
  KOKKOS_FUNCTION void operator()(std::int64_t index) const {
    const std::int64_t first = index * Body::width, available = elements - first;
    if (Aligned && available >= Body::width) {
      body(Piece<Body::width, Aligned>{first, available});
    } else {
      body(Piece<Body::width, false>{first, available});
    }
  }
};

/// body(piece) for pieces that cover [0, elements), independent of each other; of Body::width elements on a
/// device.
/// @param aligned whether all pointers are aligned to 16 bytes; without meaning for a CPU
template <class Body>
void for_each_piece(const ExecutionSpace& space, const char* label, std::int64_t elements, bool aligned,
                    const Body& body) {
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  if (elements == 0) return;
  if constexpr (runs_on_host) {
    constexpr std::int64_t size = ElementTile<Body>::size;
    Kokkos::parallel_for(label, Policy(space, 0, (elements + size - 1) / size),
                         ElementTile<Body>{body, elements});
  } else {
    const Policy pieces(space, 0, (elements + Body::width - 1) / Body::width);
    if (aligned) {
      Kokkos::parallel_for(label, pieces, LanePieces<Body, true>{body, elements});
    } else {
      Kokkos::parallel_for(label, pieces, LanePieces<Body, false>{body, elements});
    }
  }
}

}  // namespace layerstream::ops::detail

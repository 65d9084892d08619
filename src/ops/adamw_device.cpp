#include "core/error.hpp"
#include "ops/adamw.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops {

#if defined(KOKKOS_ENABLE_CUDA)

namespace {

using detail::load_stored;
using detail::store_stored;
using detail::Values;

/// The order of operations is that of ops/adamw.hpp; divisions and square roots are IEEE's.
struct AdamWStep {
  static constexpr int width = 8;
  AdamWSlice slice;
  std::int64_t num_leading;
  AdamWScalars leading, trailing;

  template <class Piece>
  KOKKOS_INLINE_FUNCTION void operator()(const Piece& piece) const {
    constexpr int n = Piece::width;
    Values<bf16, n> hi = load_stored(piece, slice.hi);
    Values<std::int16_t, n> lo = load_stored(piece, slice.lo);
    Values<float, n> exp_avg = load_stored(piece, slice.exp_avg);
    Values<float, n> exp_avg_sq = load_stored(piece, slice.exp_avg_sq);
    const Values<float, n> gradients = load_stored(piece, slice.gradient);
    for (int k = 0; k < n; ++k) {
      const bool is_leading = piece.first + k < num_leading;
      const auto scalar = [&](float AdamWScalars::*member) {
        return is_leading ? leading.*member : trailing.*member;
      };
      const float gradient = scalar(&AdamWScalars::gradient_scale) * gradients.at[k];
      const float m = Kokkos::fma(scalar(&AdamWScalars::beta1), exp_avg.at[k],
                                  scalar(&AdamWScalars::one_minus_beta1) * gradient);
      const float v = Kokkos::fma(scalar(&AdamWScalars::beta2), exp_avg_sq.at[k],
                                  scalar(&AdamWScalars::one_minus_beta2) * (gradient * gradient));
      const float denominator =
          Kokkos::sqrt(v) / scalar(&AdamWScalars::sqrt_bias_correction2) + scalar(&AdamWScalars::eps);
      const float old = merge(hi.at[k], lo.at[k]);
      const float step = scalar(&AdamWScalars::minus_step_size) * (m / denominator);
      const SplitFloat halves = split(old + Kokkos::fma(scalar(&AdamWScalars::minus_decay), old, step));
      hi.at[k] = halves.hi;
      lo.at[k] = halves.lo;
      exp_avg.at[k] = m;
      exp_avg_sq.at[k] = v;
    }
    store_stored(piece, slice.hi, hi);
    store_stored(piece, slice.lo, lo);
    store_stored(piece, slice.exp_avg, exp_avg);
    store_stored(piece, slice.exp_avg_sq, exp_avg_sq);
  }
};

/// A thread block of few goes through every so manieth run of pieces.
template <bool Aligned>
struct AdamWBlocks {
  static constexpr int lanes = 1024;
  AdamWStep step;
  std::int64_t elements;

  template <class Member>
  KOKKOS_FUNCTION void operator()(const Member& member) const {
    constexpr std::int64_t width = AdamWStep::width;
    const std::int64_t all = static_cast<std::int64_t>(member.league_size()) * lanes * width;
    std::int64_t first =
        (static_cast<std::int64_t>(member.league_rank()) * lanes + member.team_rank()) * width;
    for (; first < elements; first += all) {
      const std::int64_t available = elements - first;
      if (Aligned && available >= width) {
        step(detail::Piece<width, Aligned>{first, available});
      } else {
        step(detail::Piece<width, false>{first, available});
      }
    }
  }

  static void launch(const detail::ExecutionSpace& space, const AdamWStep& step, std::int64_t elements,
                     int thread_blocks) {
    using Policy = Kokkos::TeamPolicy<detail::ExecutionSpace, Kokkos::LaunchBounds<lanes, 1>>;
    Kokkos::parallel_for("layerstream::adamw", Policy(space, thread_blocks, lanes),
                         AdamWBlocks{step, elements});
  }
};

void run(const Context& context, const AdamWSlice& slice, std::int64_t num_leading,
         const AdamWScalars& leading, const AdamWScalars& trailing, int thread_blocks) {
  const detail::ExecutionSpace& space = detail::execution_space(context);
  const AdamWStep step{slice, num_leading, leading, trailing};
  const bool aligned = detail::whole_pieces(
      AdamWStep::width, {}, {slice.hi, slice.lo, slice.exp_avg, slice.exp_avg_sq, slice.gradient});
  if (thread_blocks == 0) {
    detail::for_each_piece(space, "layerstream::adamw", slice.n, aligned, step);
  } else if (slice.n > 0 && aligned) {
    AdamWBlocks<true>::launch(space, step, slice.n, thread_blocks);
  } else if (slice.n > 0) {
    AdamWBlocks<false>::launch(space, step, slice.n, thread_blocks);
  }
}

}  // namespace

#else

namespace {

/// On the calling thread: the engine's update lane runs beside the compute lane, and Kokkos' host regions
/// must not be entered by two threads at once.
void run(const Context&, const AdamWSlice& slice, std::int64_t num_leading, const AdamWScalars& leading,
         const AdamWScalars& trailing, int) {
  if (num_leading > 0) adamw_host(elements(slice, 0, num_leading), leading);
  if (num_leading < slice.n) adamw_host(elements(slice, num_leading, slice.n), trailing);
}

}  // namespace

#endif

void adamw_device(const Context& context, const AdamWSlice& slice, std::int64_t num_leading,
                  const AdamWScalars& leading, const AdamWScalars& trailing, int thread_blocks) {
  LAYERSTREAM_EXPECT(thread_blocks >= 0, "AdamW by {} thread blocks", thread_blocks);
  LAYERSTREAM_EXPECT(slice.n >= 0, "an AdamW slice of {} parameters", slice.n);
  LAYERSTREAM_EXPECT(num_leading >= 0 && num_leading <= slice.n,
                     "an AdamW slice of {} parameters of which {} lead", slice.n, num_leading);
  run(context, slice, num_leading, leading, trailing, thread_blocks);
}

}  // namespace layerstream::ops

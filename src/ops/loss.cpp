#include "ops/loss.hpp"

#include <type_traits>

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops {
namespace {

using detail::lane_width;
using detail::load_piece;
using detail::load_stored;
using detail::MathOf;
using detail::store_as;
using detail::store_piece;
using detail::Values;
using detail::whole_pieces;

/// Exponentials in the accumulator dtype A, their sum and the loss in fp64.
template <class T>
struct CrossEntropyRow {
  using A = MathOf<T>;
  static constexpr int most_lanes = 1024;
  static constexpr int width = lane_width<A>;
  static constexpr int pieces_at_once = 4;
  T* dlogits;                   // (T, V) or nullptr
  double* nll;                  // (T)
  const A* logits;              // (T, V)
  const std::int32_t* targets;  // (T)
  std::int64_t vocab_size;
  double scale;

  template <class Group>
  KOKKOS_FUNCTION void operator()(const Group& group, std::int64_t row) const {
    const A* values = logits + row * vocab_size;
    T* gradient = dlogits == nullptr ? nullptr : dlogits + row * vocab_size;
    const std::int64_t target = targets[row];
    if (target == ignored_target) {
      if (group.is_leader()) nll[row] = 0.0;
      if (gradient != nullptr) {
        group.template for_each_piece<width>(vocab_size, [=](auto piece) {
          store_piece(piece, gradient, Values<A, std::decay_t<decltype(piece)>::width>{});
        });
      }
      return;
    }
    // Every lane reads the target's logit before the reductions, so before any lane can overwrite it.
    const A target_logit = values[target];
    const Normalizer normalizer = normalizer_of(group, values);
    const A largest = normalizer.largest;
    if (group.is_leader()) {
      nll[row] =
          Kokkos::log(normalizer.sum) + (static_cast<double>(largest) - static_cast<double>(target_logit));
    }
    if (gradient == nullptr) return;
    const A inverse = static_cast<A>(1.0 / normalizer.sum);
    const A factor = static_cast<A>(scale);
    const auto write_gradient = [=](const auto& piece, auto terms) {
      for (int k = 0; k < piece.width; ++k) {
        const A one_hot = piece.first + k == target ? A(1) : A(0);
        terms.at[k] = factor * (Kokkos::exp(terms.at[k] - largest) * inverse - one_hot);
      }
      store_piece(piece, gradient, terms);
    };
    if constexpr (Group::is_team) {
      // Backwards: what was read last is still in the cache.
      for (int batch = batches(group) - 1; batch >= 0; --batch) {
        const Batch terms = load_batch(group, values, batch);
        LAYERSTREAM_UNROLL
        for (int p = 0; p < pieces_at_once; ++p) {
          const auto piece = group.template piece<width>(batch * pieces_at_once + p, vocab_size);
          if (piece.first < vocab_size) write_gradient(piece, terms.piece[p]);
        }
      }
    } else {
      group.template for_each_piece<width>(
          vocab_size, [=](auto piece) { write_gradient(piece, load_piece(piece, values)); });
    }
  }

 private:
  struct Normalizer {
    A largest;
    double sum;  ///< of exp(logit − largest)
  };

  /// Neighbouring pieces of a lane, read together.
  struct Batch {
    Values<A, width> piece[pieces_at_once];
  };
  template <class Team>
  KOKKOS_INLINE_FUNCTION int batches(const Team& team) const {
    const std::int64_t size = std::int64_t{pieces_at_once} * width * team.lanes;
    return static_cast<int>((vocab_size + size - 1) / size);
  }
  /// Elements beyond the row are −inf, whose exponential is 0.
  template <class Team>
  KOKKOS_INLINE_FUNCTION Batch load_batch(const Team& team, const A* values, int batch) const {
    Batch terms;
    LAYERSTREAM_UNROLL
    for (int p = 0; p < pieces_at_once; ++p) {
      const auto piece = team.template piece<width>(batch * pieces_at_once + p, vocab_size);
      const A missing = -Kokkos::Experimental::infinity_v<A>;
      if (piece.first < vocab_size) {
        terms.piece[p] = load_stored(piece, values, missing);
      } else {
        for (int k = 0; k < width; ++k) terms.piece[p].at[k] = missing;
      }
    }
    return terms;
  }

  /// On a device in one pass (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018): each
  /// lane rescales its sum when it meets a larger logit.
  template <class Group>
  KOKKOS_INLINE_FUNCTION Normalizer normalizer_of(const Group& group, const A* values) const {
    if constexpr (Group::is_team) {
      Normalizer own{Kokkos::Experimental::finite_min_v<A>, 0.0};
      const int end = batches(group);
      for (int batch = 0; batch < end; ++batch) {
        const Batch terms = load_batch(group, values, batch);
        A largest = own.largest;
        LAYERSTREAM_UNROLL
        for (int p = 0; p < pieces_at_once; ++p) {
          for (const A term : terms.piece[p].at) largest = term > largest ? term : largest;
        }
        own.sum *= static_cast<double>(Kokkos::exp(own.largest - largest));
        own.largest = largest;
        LAYERSTREAM_UNROLL
        for (int p = 0; p < pieces_at_once; ++p) {
          for (const A term : terms.piece[p].at) own.sum += static_cast<double>(Kokkos::exp(term - largest));
        }
      }
      const A largest = group.max_of_lanes(own.largest);
      return {largest, group.sum_of_lanes(own.sum * static_cast<double>(Kokkos::exp(own.largest - largest)))};
    } else {
      const A largest = group.template max<A>(vocab_size, [=](std::int64_t i) { return values[i]; });
      const double sum = group.template sum<double>(
          vocab_size, [=](std::int64_t i) { return Kokkos::exp(values[i] - largest); });
      return {largest, sum};
    }
  }
};

/// One thread adds; on a device the others of its team bring it the numbers.
struct AddInOrder {
  static constexpr int most_lanes = 1024;
  double* result;
  const double* values;
  std::int64_t count;

  template <class Group>
  KOKKOS_FUNCTION void operator()([[maybe_unused]] const Group& group, std::int64_t) const {
    if constexpr (Group::is_team) {
#if defined(__CUDA_ARCH__)
      __shared__ double staged[most_lanes];
      double sum = *result;
      double next = group.lane < count ? values[group.lane] : 0.0;
      for (std::int64_t begin = 0; begin < count; begin += most_lanes) {
        staged[group.lane] = next;
        __syncthreads();
        const std::int64_t ahead = begin + most_lanes + group.lane;
        next = ahead < count ? values[ahead] : 0.0;
        if (group.is_leader()) {
          const int n = static_cast<int>(count - begin < most_lanes ? count - begin : most_lanes);
#pragma unroll 16
          for (int i = 0; i < n; ++i) sum += staged[i];
        }
        __syncthreads();
      }
      if (group.is_leader()) *result = sum;
#endif
    } else {
      double sum = *result;
      for (std::int64_t i = 0; i < count; ++i) sum += values[i];
      *result = sum;
    }
  }
};

}  // namespace

void cross_entropy(const Context& context, const CrossEntropy& args) {
  constexpr const char* operation = "cross_entropy";
  const ConstTensorView logits = args.logits;
  detail::expect_rank(operation, "logits", logits, 2);
  const std::int64_t tokens = logits.dim(0), vocab_size = logits.dim(1);
  const DType compute = args.dlogits ? args.dlogits.dtype() : logits.dtype();
  detail::expect_tensor(operation, "logits", logits, accumulator_of(compute), logits.shape());
  if (args.dlogits) detail::expect_tensor(operation, "dlogits", args.dlogits, compute, logits.shape());
  detail::expect_tensor(operation, "nll", args.nll, DType::f64, {tokens});
  detail::expect_tensor(operation, "targets", args.targets, DType::i32, {tokens});
  LAYERSTREAM_EXPECT(vocab_size > 0, "{}: no classes", operation);
  LAYERSTREAM_EXPECT(!args.dlogits || args.dlogits.data() != logits.data() || compute == logits.dtype(),
                     "{}: {} gradients cannot overwrite {} logits", operation, name_of(compute),
                     name_of(logits.dtype()));
  detail::dispatch_compute(compute, operation, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    detail::for_each_row(
        detail::execution_space(context), "layerstream::cross_entropy", tokens,
        CrossEntropyRow<T>{args.dlogits ? args.dlogits.as<T>() : nullptr, args.nll.as<double>(),
                           logits.as<MathOf<T>>(), args.targets.as<std::int32_t>(), vocab_size, args.scale},
        {.whole = whole_pieces(lane_width<MathOf<T>>, {vocab_size}, {logits.data(), args.dlogits.data()}),
         .lanes = CrossEntropyRow<T>::most_lanes});
  });
}

void add_sum(const Context& context, double* result, ConstTensorView values) {
  constexpr const char* operation = "add_sum";
  detail::expect_rank(operation, "values", values, 1);
  detail::expect_tensor(operation, "values", values, DType::f64, values.shape());
  LAYERSTREAM_EXPECT(result != nullptr, "{}: nowhere to put the result", operation);
  detail::for_each_row(detail::execution_space(context), "layerstream::add_sum", 1,
                       AddInOrder{result, values.as<double>(), values.dim(0)},
                       {.lanes = AddInOrder::most_lanes});
}

}  // namespace layerstream::ops

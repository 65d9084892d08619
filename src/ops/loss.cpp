#include "ops/loss.hpp"

#include "ops/detail/check.hpp"
#include "ops/detail/dispatch.hpp"
#include "ops/detail/launch.hpp"

namespace layerstream::ops {
namespace {

using detail::MathOf;
using detail::store_as;

/// Exponentials in the accumulator dtype A, their sum and the loss in fp64.
template <class T>
struct CrossEntropyRow {
  using A = MathOf<T>;
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
      if (gradient != nullptr)
        group.for_each(vocab_size, [=](std::int64_t i) { gradient[i] = store_as<T>(A(0)); });
      return;
    }
    // Every lane reads the target's logit before the reductions, so before any lane can overwrite it.
    const A target_logit = values[target];
    const A largest = group.template max<A>(vocab_size, [=](std::int64_t i) { return values[i]; });
    const double sum = group.template sum<double>(
        vocab_size, [=](std::int64_t i) { return Kokkos::exp(values[i] - largest); });
    if (group.is_leader()) {
      nll[row] = Kokkos::log(sum) + (static_cast<double>(largest) - static_cast<double>(target_logit));
    }
    if (gradient == nullptr) return;
    const A inverse = static_cast<A>(1.0 / sum);
    const A factor = static_cast<A>(scale);
    group.for_each(vocab_size, [=](std::int64_t i) {
      const A one_hot = i == target ? A(1) : A(0);
      gradient[i] = store_as<T>(factor * (Kokkos::exp(values[i] - largest) * inverse - one_hot));
    });
  }
};

struct AddInOrder {
  double* result;
  const double* values;
  std::int64_t count;

  KOKKOS_FUNCTION void operator()(std::int64_t) const {
    double sum = *result;
    for (std::int64_t i = 0; i < count; ++i) sum += values[i];
    *result = sum;
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
        detail::execution_space(context.stream), "layerstream::cross_entropy", tokens,
        CrossEntropyRow<T>{args.dlogits ? args.dlogits.as<T>() : nullptr, args.nll.as<double>(),
                           logits.as<MathOf<T>>(), args.targets.as<std::int32_t>(), vocab_size, args.scale});
  });
}

void add_sum(const Context& context, double* result, ConstTensorView values) {
  constexpr const char* operation = "add_sum";
  detail::expect_rank(operation, "values", values, 1);
  detail::expect_tensor(operation, "values", values, DType::f64, values.shape());
  LAYERSTREAM_EXPECT(result != nullptr, "{}: nowhere to put the result", operation);
  Kokkos::parallel_for(
      "layerstream::add_sum",
      Kokkos::RangePolicy<detail::ExecutionSpace>(detail::execution_space(context.stream), 0, 1),
      AddInOrder{result, values.as<double>(), values.dim(0)});
}

}  // namespace layerstream::ops

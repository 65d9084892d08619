#include "tests/longctx/sampled_attention.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/detail/dispatch.hpp"
#include "ops/detail/execution.hpp"

namespace layerstream::test {
namespace {

using ops::detail::dispatch_compute;
using ops::detail::load;
using ops::detail::MathOf;

/// Parts of a sum over rows, which the host adds.
constexpr std::int64_t max_slabs = 64;

template <class Body>
void for_each_index(const ops::Context& context, const char* label, std::int64_t count, const Body& body) {
  using Policy = Kokkos::RangePolicy<ops::detail::ExecutionSpace, Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for(label, Policy(ops::detail::execution_space(context), 0, count), body);
}

/// Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014): the index-th number of a
/// stream.
KOKKOS_INLINE_FUNCTION std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = (seed << 40) + (index + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class T>
struct FillUniform {
  T* out;
  std::uint64_t seed;
  double half_width;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const double unit = static_cast<double>(random_bits(seed, static_cast<std::uint64_t>(i)) >> 11) * 0x1p-53;
    out[i] = ops::detail::store_as<T>(static_cast<MathOf<T>>(half_width * (2.0 * unit - 1.0)));
  }
};

template <class T>
struct Widen {
  double* out;
  const T* in;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const { out[i] = static_cast<double>(load(in[i])); }
};

struct Dot {
  double sum, magnitude;
};

template <class T>
KOKKOS_INLINE_FUNCTION Dot dot(const T* a, const T* b, std::int64_t n) {
  Dot result{0.0, 0.0};
  for (std::int64_t i = 0; i < n; ++i) {
    const double product = static_cast<double>(load(a[i])) * static_cast<double>(load(b[i]));
    result.sum += product;
    result.magnitude += Kokkos::fabs(product);
  }
  return result;
}

/// Work item i is query and head i.
template <class T>
struct Deltas {
  double* delta;
  const T *dout, *o;
  std::int64_t head_dim;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const Dot d = dot(dout + i * head_dim, o + i * head_dim, head_dim);
    delta[2 * i] = d.sum;
    delta[2 * i + 1] = d.magnitude;
  }
};

/// Work item i is the sample with row i / heads of the other side, in query head i % heads.
template <class T>
struct WeighPairs {
  const T *q, *k, *v, *dout;
  const MathOf<T>* lse;
  const double* delta;
  double *probability, *gradient, *size;
  std::int64_t heads, key_heads, head_dim, row;
  bool is_query;
  double scale;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t other = i / heads, head = i % heads;
    const std::int64_t query = is_query ? row : row + other;
    const std::int64_t key = is_query ? other : row;
    const std::int64_t query_head = query * heads + head;
    const std::int64_t key_head = key * key_heads + head / (heads / key_heads);
    const double score = scale * dot(q + query_head * head_dim, k + key_head * head_dim, head_dim).sum;
    const Dot dp = dot(dout + query_head * head_dim, v + key_head * head_dim, head_dim);
    const double p = Kokkos::exp(score - static_cast<double>(lse[query_head]));
    probability[i] = p;
    gradient[i] = scale * p * (dp.sum - delta[2 * query_head]);
    size[i] = scale * p * (dp.magnitude + delta[2 * query_head + 1]);
  }
};

/// Work item i is a slab of the other side's rows, a head of the result and an element of it.
template <class T>
struct SumRows {
  double* partial;              // (slabs, result heads, d, 3)
  const double *weight, *size;  // (rows, query heads)
  const T* rows;                // (rows, row heads, d)
  std::int64_t count, slab_rows, heads, result_heads, row_heads, head_dim;

  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t element = i % head_dim, head = i / head_dim % result_heads;
    const std::int64_t begin = i / (head_dim * result_heads) * slab_rows;
    const std::int64_t end = begin + slab_rows < count ? begin + slab_rows : count;
    const std::int64_t inner = heads / result_heads;  // query heads that add to the result's head
    double value = 0.0, spread = 0.0, bound = 0.0;
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t h = head * inner; h < (head + 1) * inner; ++h) {
        const std::int64_t row_head = row * row_heads + h / (heads / row_heads);
        const double x = static_cast<double>(load(rows[row_head * head_dim + element]));
        const double summand = weight[row * heads + h] * x;
        const double largest = size[row * heads + h] * x;
        value += summand;
        spread += summand * summand;
        bound += largest * largest;
      }
    }
    partial[3 * i] = value;
    partial[3 * i + 1] = spread;
    partial[3 * i + 2] = bound;
  }
};

/// Work item i is a slab of rows and a head.
struct SumWeights {
  double* partial;       // (slabs, heads)
  const double* weight;  // (rows, heads)
  std::int64_t count, slab_rows, heads;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    const std::int64_t head = i % heads, begin = i / heads * slab_rows;
    const std::int64_t end = begin + slab_rows < count ? begin + slab_rows : count;
    double sum = 0.0;
    for (std::int64_t row = begin; row < end; ++row) sum += weight[row * heads + head];
    partial[i] = sum;
  }
};

std::int64_t rows_of_a_slab(std::int64_t rows) {
  return (rows + max_slabs - 1) / max_slabs;
}

/// Slabs that are not empty.
std::int64_t slabs_of(std::int64_t rows) {
  return (rows + rows_of_a_slab(rows) - 1) / rows_of_a_slab(rows);
}

}  // namespace

void fill_uniform(const ops::Context& context, const TensorView& tensor, std::uint64_t seed,
                  double deviation) {
  dispatch_compute(tensor.dtype(), "fill_uniform", [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for_each_index(context, "layerstream::test::fill_uniform", tensor.numel(),
                   FillUniform<T>{tensor.as<T>(), seed, std::sqrt(3.0) * deviation});
  });
}

OwnedTensor widened(const ops::Context& context, const ConstTensorView& tensor) {
  OwnedTensor result(DType::f64, tensor.shape());
  dispatch_compute(tensor.dtype(), "widened", [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for_each_index(context, "layerstream::test::widened", tensor.numel(),
                   Widen<T>{result.view().as<double>(), tensor.as<T>()});
  });
  return OwnedTensor(std::as_const(result));  // a copy need not wait for the device at each element
}

AttentionSampler::AttentionSampler(const LongAttention& attention, Arena& arena) : attention_(attention) {
  const Shape pairs{attention.tokens(), attention.heads()};
  delta_ = arena.tensor(DType::f64, {pairs[0], pairs[1], 2}, "reference");
  probability_ = arena.tensor(DType::f64, pairs, "reference");
  gradient_ = arena.tensor(DType::f64, pairs, "reference");
  size_ = arena.tensor(DType::f64, pairs, "reference");
}

void AttentionSampler::prepare(const ops::Context& context) const {
  dispatch_compute(attention_.q.dtype(), "AttentionSampler", [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for_each_index(
        context, "layerstream::test::deltas", attention_.tokens() * attention_.heads(),
        Deltas<T>{delta_.as<double>(), attention_.dout.as<T>(), attention_.o.as<T>(), attention_.head_dim()});
  });
}

std::int64_t AttentionSampler::others(const Sample& sample) const {
  return sample.is_query ? sample.row + 1 : attention_.tokens() - sample.row;
}

void AttentionSampler::weigh(const ops::Context& context, const Sample& sample) const {
  const LongAttention& a = attention_;
  dispatch_compute(a.q.dtype(), "AttentionSampler", [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for_each_index(context, "layerstream::test::weigh_pairs", others(sample) * a.heads(),
                   WeighPairs<T>{.q = a.q.as<T>(),
                                 .k = a.k.as<T>(),
                                 .v = a.v.as<T>(),
                                 .dout = a.dout.as<T>(),
                                 .lse = a.lse.as<MathOf<T>>(),
                                 .delta = delta_.as<double>(),
                                 .probability = probability_.as<double>(),
                                 .gradient = gradient_.as<double>(),
                                 .size = size_.as<double>(),
                                 .heads = a.heads(),
                                 .key_heads = a.key_heads(),
                                 .head_dim = a.head_dim(),
                                 .row = sample.row,
                                 .is_query = sample.is_query,
                                 .scale = a.scale});
  });
}

SampledSums AttentionSampler::sum(const ops::Context& context, const Sample& sample, const TensorView& weight,
                                  const TensorView& size, const ConstTensorView& rows) const {
  const std::int64_t count = others(sample), slabs = slabs_of(count);
  const std::int64_t heads = sample.is_query ? attention_.heads() : attention_.key_heads();
  const std::int64_t elements = heads * attention_.head_dim();
  OwnedTensor partial(DType::f64, {slabs, elements, 3});
  dispatch_compute(rows.dtype(), "AttentionSampler", [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for_each_index(context, "layerstream::test::sum_rows", slabs * elements,
                   SumRows<T>{.partial = partial.view().as<double>(),
                              .weight = weight.as<double>(),
                              .size = size.as<double>(),
                              .rows = rows.rows(sample.is_query ? 0 : sample.row, count).template as<T>(),
                              .count = count,
                              .slab_rows = rows_of_a_slab(count),
                              .heads = attention_.heads(),
                              .result_heads = heads,
                              .row_heads = rows.dim(1),
                              .head_dim = attention_.head_dim()});
  });
  const Shape shape{heads, attention_.head_dim()};
  SampledSums sums{OwnedTensor(DType::f64, shape), OwnedTensor(DType::f64, shape),
                   OwnedTensor(DType::f64, shape)};
  const double* const parts = partial.as<double>();
  const auto total = [&](std::int64_t i, std::int64_t which) {
    double result = 0.0;
    for (std::int64_t slab = 0; slab < slabs; ++slab) result += parts[3 * (slab * elements + i) + which];
    return result;
  };
  sums.value.fill([&](std::int64_t i) { return total(i, 0); });
  sums.spread.fill([&](std::int64_t i) { return std::sqrt(total(i, 1)); });
  sums.size.fill([&](std::int64_t i) { return std::sqrt(total(i, 2)); });
  return sums;
}

SampledQuery AttentionSampler::query(const ops::Context& context, std::int64_t row) const {
  const Sample sample{row, true};
  weigh(context, sample);
  const std::int64_t count = others(sample), slabs = slabs_of(count), heads = attention_.heads();
  OwnedTensor partial(DType::f64, {slabs, heads});
  for_each_index(context, "layerstream::test::sum_weights", slabs * heads,
                 SumWeights{partial.view().as<double>(), probability_.as<double>(), count,
                            rows_of_a_slab(count), heads});
  OwnedTensor total = constant_tensor(DType::f64, {heads}, 0.0);
  const double* const parts = partial.as<double>();
  for (std::int64_t i = 0; i < slabs * heads; ++i) total.as<double>()[i % heads] += parts[i];
  return {std::move(total), sum(context, sample, probability_, probability_, attention_.v),
          sum(context, sample, gradient_, size_, attention_.k)};
}

SampledKey AttentionSampler::key(const ops::Context& context, std::int64_t row) const {
  const Sample sample{row, false};
  weigh(context, sample);
  return {sum(context, sample, gradient_, size_, attention_.q),
          sum(context, sample, probability_, probability_, attention_.dout)};
}

}  // namespace layerstream::test

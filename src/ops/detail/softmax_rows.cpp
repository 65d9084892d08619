#include "ops/detail/softmax_rows.hpp"

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <limits>

HWY_BEFORE_NAMESPACE();
namespace layerstream::ops::detail {
namespace {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
T row_max(const T* row, std::int64_t count) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto lowest = hn::Set(d, -std::numeric_limits<T>::infinity());
  auto largest = lowest;
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) largest = hn::Max(largest, hn::LoadU(d, row + i));
  if (i < count) {
    const auto mask = hn::FirstN(d, static_cast<std::size_t>(count - i));
    largest = hn::Max(largest, hn::IfThenElse(mask, hn::MaskedLoad(mask, d, row + i), lowest));
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

template <class D, class V>
V exp_keeping_nan(D d, V x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
}

template <class T>
T row_exp(T* row, std::int64_t count, T shift) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto shifts = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto value = exp_keeping_nan(d, hn::Sub(hn::LoadU(d, row + i), shifts));
    hn::StoreU(value, d, row + i);
    sum = hn::Add(sum, value);
  }
  if (i < count) {
    const auto mask = hn::FirstN(d, static_cast<std::size_t>(count - i));
    const auto value = exp_keeping_nan(d, hn::Sub(hn::MaskedLoad(mask, d, row + i), shifts));
    hn::BlendedStore(value, mask, d, row + i);
    sum = hn::Add(sum, hn::IfThenElseZero(mask, value));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace HWY_NAMESPACE
}  // namespace
}  // namespace layerstream::ops::detail
HWY_AFTER_NAMESPACE();

namespace layerstream::ops::detail {

template <class T>
T row_max(const T* row, std::int64_t count) {
  return HWY_STATIC_DISPATCH(row_max)(row, count);
}

template <class T>
T row_exp(T* row, std::int64_t count, T shift) {
  return HWY_STATIC_DISPATCH(row_exp)(row, count, shift);
}

template float row_max(const float*, std::int64_t);
template double row_max(const double*, std::int64_t);
template float row_exp(float*, std::int64_t, float);
template double row_exp(double*, std::int64_t, double);

}  // namespace layerstream::ops::detail

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "core/half.hpp"
#include "core/random.hpp"
#include "core/tensor.hpp"

namespace layerstream::test {

/// A tensor with memory of its own, of exactly its size and 256-byte aligned. It starts out poisoned: NaN
/// in floating types, −1 in integers.
class OwnedTensor {
 public:
  OwnedTensor(DType dtype, Shape shape)
      : bytes_(static_cast<std::size_t>(shape.numel()) * size_of(dtype)),
        memory_(static_cast<std::byte*>(::operator new(bytes_, alignment))),
        view_(static_cast<void*>(memory_.get()), dtype, shape) {
    std::memset(memory_.get(), 0xff, bytes_);
  }
  OwnedTensor(const OwnedTensor& other) : OwnedTensor(other.dtype(), other.shape()) {
    std::memcpy(memory_.get(), other.memory_.get(), bytes_);
  }
  OwnedTensor(OwnedTensor&&) = default;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  OwnedTensor& operator=(OwnedTensor&&) = default;

  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }
  operator TensorView() { return view_; }             // NOLINT(google-explicit-constructor)
  operator ConstTensorView() const { return view_; }  // NOLINT(google-explicit-constructor)

  DType dtype() const { return view_.dtype(); }
  const Shape& shape() const { return view_.shape(); }
  std::int64_t numel() const { return view_.numel(); }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() {
    return view_.as<T>();
  }
  template <class T>
  const T* as() const {
    return view_.as<T>();
  }

  /// Element i of the flattened tensor, exactly.
  double operator[](std::int64_t i) const {
    switch (dtype()) {
      case DType::f64:
        return as<double>()[i];
      case DType::f32:
        return as<float>()[i];
      case DType::bf16:
        return to_float(as<bf16>()[i]);
      case DType::i32:
        return as<std::int32_t>()[i];
      case DType::i16:
        return as<std::int16_t>()[i];
      default:
        throw ContractError("OwnedTensor: dtype without element access");
    }
  }

  /// Stores `value` rounded to the dtype.
  void set(std::int64_t i, double value) {
    switch (dtype()) {
      case DType::f64:
        as<double>()[i] = value;
        return;
      case DType::f32:
        as<float>()[i] = static_cast<float>(value);
        return;
      case DType::bf16:
        as<bf16>()[i] = to_bf16(static_cast<float>(value));
        return;
      case DType::i32:
        as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
        return;
      case DType::i16:
        as<std::int16_t>()[i] = static_cast<std::int16_t>(value);
        return;
      default:
        throw ContractError("OwnedTensor: dtype without element access");
    }
  }

  /// The same numbers in another dtype, rounded where it is narrower.
  OwnedTensor to(DType dtype) const {
    return mapped(dtype, [](double value) { return value; });
  }

  /// function(element) for every element.
  template <class Function>
  OwnedTensor mapped(DType dtype, Function&& function) const {
    OwnedTensor result(dtype, shape());
    for (std::int64_t i = 0; i < numel(); ++i) result.set(i, function((*this)[i]));
    return result;
  }
  OwnedTensor absolute() const {
    return mapped(dtype(), [](double value) { return std::fabs(value); });
  }

  bool same_bits(const OwnedTensor& other) const {
    return dtype() == other.dtype() && shape() == other.shape() &&
           std::memcmp(memory_.get(), other.memory_.get(), bytes_) == 0;
  }

 private:
  static constexpr std::align_val_t alignment{256};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  TensorView view_;
};

/// Every element `value`.
inline OwnedTensor constant_tensor(DType dtype, Shape shape, double value) {
  OwnedTensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value);
  return tensor;
}

/// mean + scale · standard normal numbers; a function of `seed` and the shape alone.
inline OwnedTensor normal_tensor(DType dtype, Shape shape, std::uint64_t seed, double scale = 1.0,
                                 double mean = 0.0) {
  OwnedTensor tensor(dtype, shape);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, mean + scale * normal_at(seed, 0, static_cast<std::uint64_t>(i)));
  }
  return tensor;
}

/// int32 numbers in [0, bound).
inline OwnedTensor integer_tensor(Shape shape, std::int64_t bound, std::uint64_t seed) {
  OwnedTensor tensor(DType::i32, shape);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i,
               std::floor(static_cast<double>(bound) * uniform_at(seed, 1, static_cast<std::uint64_t>(i))));
  }
  return tensor;
}

/// Sum of a[i] · b[i].
inline double dot(const OwnedTensor& a, const OwnedTensor& b) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < a.numel(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace layerstream::test

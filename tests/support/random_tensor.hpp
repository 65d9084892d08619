#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "core/half.hpp"
#include "core/random.hpp"
#include "core/tensor.hpp"
#include "tests/support/device_memory.hpp"

namespace layerstream::test {

/// A tensor with memory of its own, of exactly its size and 256-byte aligned. It starts out poisoned: NaN
/// in floating types, −1 in integers. Kernels may work on it; whatever reads or writes it here first waits
/// for the device, once its memory has been handed out as a view.
class OwnedTensor {
 public:
  OwnedTensor(DType dtype, Shape shape)
      : bytes_(static_cast<std::size_t>(shape.numel()) * size_of(dtype)),
        memory_(static_cast<std::byte*>(allocate_for_device(bytes_)), Free{bytes_}),
        view_(static_cast<void*>(memory_.get()), dtype, shape) {
    std::memset(memory_.get(), 0xff, bytes_);
  }
  OwnedTensor(const OwnedTensor& other) : OwnedTensor(other.dtype(), other.shape()) {
    other.wait();
    std::memcpy(memory_.get(), other.memory_.get(), bytes_);
  }
  OwnedTensor(OwnedTensor&&) = default;
  OwnedTensor& operator=(const OwnedTensor&) = delete;
  OwnedTensor& operator=(OwnedTensor&&) = default;

  TensorView view() { return shared(); }
  ConstTensorView view() const { return shared(); }
  operator TensorView() { return shared(); }             // NOLINT(google-explicit-constructor)
  operator ConstTensorView() const { return shared(); }  // NOLINT(google-explicit-constructor)

  DType dtype() const { return view_.dtype(); }
  const Shape& shape() const { return view_.shape(); }
  std::int64_t numel() const { return view_.numel(); }
  std::size_t bytes() const { return bytes_; }
  /// The elements, for the host alone. The device may be given work again only when the pointer is no longer
  /// used.
  template <class T>
  T* as() {
    wait();
    return view_.as<T>();
  }
  template <class T>
  const T* as() const {
    wait();
    return view_.as<T>();
  }

  /// Element i of the flattened tensor, exactly.
  double operator[](std::int64_t i) const {
    wait();
    return at(i);
  }

  /// Stores `value` rounded to the dtype.
  void set(std::int64_t i, double value) {
    wait();
    put(i, value);
  }

  /// Stores function(i) in every element i.
  template <class Function>
  void fill(Function&& function) {
    wait();
    for (std::int64_t i = 0; i < numel(); ++i) put(i, function(i));
  }

  /// The same numbers in another dtype, rounded where it is narrower.
  OwnedTensor to(DType dtype) const {
    return mapped(dtype, [](double value) { return value; });
  }

  /// function(element) for every element.
  template <class Function>
  OwnedTensor mapped(DType dtype, Function&& function) const {
    wait();
    OwnedTensor result(dtype, shape());
    result.fill([&](std::int64_t i) { return function(at(i)); });
    return result;
  }
  OwnedTensor absolute() const {
    return mapped(dtype(), [](double value) { return std::fabs(value); });
  }

  /// Sum of the products of the elements of two tensors, in order.
  friend double dot(const OwnedTensor& a, const OwnedTensor& b) {
    a.wait();
    b.wait();
    double sum = 0.0;
    for (std::int64_t i = 0; i < a.numel(); ++i) sum += a.at(i) * b.at(i);
    return sum;
  }

  bool same_bits(const OwnedTensor& other) const {
    wait();
    return dtype() == other.dtype() && shape() == other.shape() &&
           std::memcmp(memory_.get(), other.memory_.get(), bytes_) == 0;
  }

 private:
  struct Free {
    std::size_t bytes;
    void operator()(std::byte* memory) const { free_for_device(memory, bytes); }
  };

  const TensorView& shared() const {
    shared_ = true;
    return view_;
  }
  void wait() const {
    if (shared_) wait_for_device();
  }

  double at(std::int64_t i) const {
    switch (dtype()) {
      case DType::f64:
        return view_.as<double>()[i];
      case DType::f32:
        return view_.as<float>()[i];
      case DType::bf16:
        return to_float(view_.as<bf16>()[i]);
      case DType::i32:
        return view_.as<std::int32_t>()[i];
      case DType::i16:
        return view_.as<std::int16_t>()[i];
      default:
        throw ContractError("OwnedTensor: dtype without element access");
    }
  }
  void put(std::int64_t i, double value) {
    switch (dtype()) {
      case DType::f64:
        view_.as<double>()[i] = value;
        return;
      case DType::f32:
        view_.as<float>()[i] = static_cast<float>(value);
        return;
      case DType::bf16:
        view_.as<bf16>()[i] = to_bf16(static_cast<float>(value));
        return;
      case DType::i32:
        view_.as<std::int32_t>()[i] = static_cast<std::int32_t>(value);
        return;
      case DType::i16:
        view_.as<std::int16_t>()[i] = static_cast<std::int16_t>(value);
        return;
      default:
        throw ContractError("OwnedTensor: dtype without element access");
    }
  }

  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  TensorView view_;
  mutable bool shared_ = false;
};

/// Every element `value`.
inline OwnedTensor constant_tensor(DType dtype, Shape shape, double value) {
  OwnedTensor tensor(dtype, shape);
  tensor.fill([&](std::int64_t) { return value; });
  return tensor;
}

/// mean + scale · standard normal numbers; a function of `seed` and the shape alone.
inline OwnedTensor normal_tensor(DType dtype, Shape shape, std::uint64_t seed, double scale = 1.0,
                                 double mean = 0.0) {
  OwnedTensor tensor(dtype, shape);
  tensor.fill(
      [&](std::int64_t i) { return mean + scale * normal_at(seed, 0, static_cast<std::uint64_t>(i)); });
  return tensor;
}

/// int32 numbers in [0, bound).
inline OwnedTensor integer_tensor(Shape shape, std::int64_t bound, std::uint64_t seed) {
  OwnedTensor tensor(DType::i32, shape);
  tensor.fill([&](std::int64_t i) {
    return std::floor(static_cast<double>(bound) * uniform_at(seed, 1, static_cast<std::uint64_t>(i)));
  });
  return tensor;
}

}  // namespace layerstream::test

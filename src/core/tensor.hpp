#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"

namespace layerstream {

/// Up to four extents, outermost first.
class Shape {
 public:
  static constexpr int max_rank = 4;

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<std::int64_t> extents) {
    if (extents.size() > max_rank) throw ContractError("Shape: more than 4 extents");
    for (const std::int64_t extent : extents) extents_[rank_++] = extent;
  }

  constexpr int rank() const { return rank_; }
  constexpr std::int64_t operator[](int i) const { return extents_[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t& operator[](int i) { return extents_[static_cast<std::size_t>(i)]; }
  constexpr std::int64_t numel() const {
    std::int64_t product = 1;
    for (int i = 0; i < rank_; ++i) {
      if (__builtin_mul_overflow(product, (*this)[i], &product)) {
        throw ResourceError("a tensor of more than 2^63 elements");
      }
    }
    return product;
  }
  /// The extents, as file formats list them.
  std::vector<std::int64_t> to_vector() const { return {extents_.begin(), extents_.begin() + rank_}; }
  friend constexpr bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::int64_t, max_rank> extents_{};
  int rank_ = 0;
};

/// A non-owning, contiguous, row-major view of typed memory; `Byte` is std::byte or const std::byte.
/// It never allocates, and never outlives the arena it points into.
template <class Byte>
class BasicTensorView {
 public:
  template <class T>
  using Pointer = std::conditional_t<std::is_const_v<Byte>, const T*, T*>;
  using VoidPointer = std::conditional_t<std::is_const_v<Byte>, const void*, void*>;

  constexpr BasicTensorView() = default;
  BasicTensorView(VoidPointer data, DType dtype, Shape shape)
      : data_(static_cast<Byte*>(data)), dtype_(dtype), shape_(shape) {}
  template <class T>
  requires(!std::is_void_v<T> && (std::is_const_v<Byte> || !std::is_const_v<T>))
      BasicTensorView(T* data, Shape shape)
      : BasicTensorView(data, dtype_of<std::remove_const_t<T>>, shape) {}
  // A mutable view converts to a const one.
  template <class Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : BasicTensorView(other.data(), other.dtype(), other.shape()) {}

  /// A default-constructed view is empty: "this optional tensor is absent".
  explicit operator bool() const { return data_ != nullptr; }

  VoidPointer data() const { return data_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  std::int64_t dim(int i) const { return shape_[i]; }
  std::int64_t numel() const { return shape_.numel(); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype_); }

  /// Typed pointer; throws ContractError if T is not the stored type.
  template <class T>
  Pointer<T> as() const {
    LAYERSTREAM_EXPECT(dtype_ == dtype_of<T>, "tensor holds {}, not {}", name_of(dtype_),
                       name_of(dtype_of<T>));
    return reinterpret_cast<Pointer<T>>(data_);
  }

  /// Rows [begin, begin + count) of the outermost extent.
  BasicTensorView rows(std::int64_t begin, std::int64_t count) const {
    LAYERSTREAM_EXPECT(begin >= 0 && count >= 0 && begin + count <= dim(0), "rows [{}, {}) of {}", begin,
                       begin + count, dim(0));
    Shape shape = shape_;
    const std::int64_t stride = dim(0) == 0 ? 0 : numel() / dim(0);
    shape[0] = count;
    return {static_cast<VoidPointer>(data_ + static_cast<std::size_t>(begin * stride) * size_of(dtype_)),
            dtype_, shape};
  }

  /// The same elements under another shape.
  BasicTensorView reshape(Shape shape) const {
    LAYERSTREAM_EXPECT(shape.numel() == numel(), "reshape {} elements to {}", numel(), shape.numel());
    return {static_cast<VoidPointer>(data_), dtype_, shape};
  }

 private:
  Byte* data_ = nullptr;
  DType dtype_ = DType::f32;
  Shape shape_;
};

using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

}  // namespace layerstream

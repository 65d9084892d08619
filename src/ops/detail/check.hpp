#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops::detail {

inline std::string describe(const Shape& shape) {
  std::string text = "(";
  for (int i = 0; i < shape.rank(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + ")";
}

/// @throws ContractError unless `view` has exactly this shape and dtype and, if it has elements, memory.
inline void expect_tensor(const char* operation, const char* name, const ConstTensorView& view, DType dtype,
                          const Shape& shape) {
  if (view.shape() == shape && view.dtype() == dtype && (view || shape.numel() == 0)) return;
  throw ContractError(fmt::format("{}: {} is {} {}{}, expected {} {}", operation, name, name_of(view.dtype()),
                                  describe(view.shape()), view ? "" : " without memory", name_of(dtype),
                                  describe(shape)));
}

/// @throws ContractError unless `view` has this many extents.
inline void expect_rank(const char* operation, const char* name, const ConstTensorView& view, int rank) {
  if (view.rank() == rank) return;
  throw ContractError(
      fmt::format("{}: {} has shape {}, expected {} extents", operation, name, describe(view.shape()), rank));
}

/// The context's scratch memory, as elements of A.
/// @throws ContractError if it is smaller than `bytes`.
template <class A>
A* workspace_as(const char* operation, const Context& context, std::size_t bytes) {
  if (context.workspace_bytes < bytes || (bytes > 0 && context.workspace == nullptr)) {
    throw ContractError(fmt::format("{}: needs {} bytes of workspace, the context has {}", operation, bytes,
                                    context.workspace == nullptr ? 0 : context.workspace_bytes));
  }
  return static_cast<A*>(context.workspace);
}

}  // namespace layerstream::ops::detail

#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor.hpp"
#include "ops/context.hpp"

namespace layerstream::ops::detail {

/// out = op(a) · op(b) + addend, all contiguous and row-major. The extents must be positive and fit each
/// other, a and b have one compute dtype, out that dtype or its accumulator's.
struct GemmArguments {
  TensorView out;     // (m, n)
  ConstTensorView a;  // (m, k), or (k, m) if transposed
  ConstTensorView b;  // (k, n), or (n, k) if transposed
  bool a_transposed = false;
  bool b_transposed = false;
  ConstTensorView addend = {};  // (m, n) of out's dtype, may be out; absent: nothing is added

  std::int64_t m() const { return out.dim(0); }
  std::int64_t n() const { return out.dim(1); }
  std::int64_t k() const { return a.dim(a_transposed ? 0 : 1); }
  bool accumulates_in_place() const { return addend && addend.data() == out.data(); }
};

/// The one GEMM of ops/: OpenBLAS in a CPU build (detail/gemm.cpp), cuBLASLt in a CUDA build (cuda/gemm.cpp).
/// Sums are fp64 for fp64 operands and fp32 otherwise, over the whole inner extent, in an order that depends
/// on extents and dtypes only (in a CUDA build also on whether pointers are 16-byte aligned).
///
/// The addend is one more term of the sum, which is rounded once, in a CUDA build and wherever fp64 or fp32
/// accumulates in place; otherwise a CPU build rounds the product to out's dtype first, then the sum.
///
/// Needs workspace: gemm_workspace(dtype of a). Ordered on the context's stream.
/// @throws ContractError naming `operation` if the workspace is too small or an extent is beyond the library;
/// CudaError if cuBLASLt refuses.
void gemm(const char* operation, const Context& context, const GemmArguments& arguments);

std::size_t gemm_workspace(DType compute);

}  // namespace layerstream::ops::detail

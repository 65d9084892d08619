#pragma once

#include <cstddef>
#include <cstdint>

#include "core/half.hpp"
#include "ops/detail/execution.hpp"
#include "ops/detail/host_gemm.hpp"

namespace layerstream::ops::detail {

/// c = a · b + addend in host memory, rows of c and addend n elements apart.
template <class Out>
struct PanelledGemm {
  Out* c;  // (m, n)
  std::int64_t m, n, k;
  GemmOperand<bf16> a;  // (m, k)
  GemmOperand<bf16> b;  // (k, n)
  const Out* addend;    // (m, n), may be c; null for none
};

/// bf16 operands through a BLAS that has none: panels of them are widened to FP32 in the workspace, so that
/// sums are FP32 over the whole inner extent. Out is bf16 or float.
///
/// bf16: the product is rounded once, from a tile that stays in the workspace until its last panel is added;
/// an addend is added to the rounded product, and the sum is rounded. float: the addend must be c or null,
/// and sums start from it.
/// @param workspace panelled_gemm_workspace bytes.
template <class Out>
void panelled_gemm(const ExecutionSpace& space, float* workspace, const PanelledGemm<Out>& arguments);

std::size_t panelled_gemm_workspace();

}  // namespace layerstream::ops::detail

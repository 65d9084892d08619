#pragma once

#include <cstdint>

namespace layerstream::ops::detail {

/// A matrix in host memory as a GEMM reads it; `transposed` says that memory holds the transpose.
template <class F>
struct GemmOperand {
  const F* data;
  std::int64_t leading_dimension;
  bool transposed;
};

/// c = a · b + beta · c in row-major host memory, a (m, k), b (k, n), c (m, n) with rows `c_stride`
/// elements apart. F is double or float.
///
/// c is cut into tiles of a fixed size and every tile is one BLAS call on one thread: BLAS libraries cut
/// work, and with it the order of sums, differently for every number of threads.
/// @throws ContractError if an extent does not fit the BLAS's 32-bit integers.
template <class F>
void host_gemm(F* c, std::int64_t c_stride, std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<F> a,
               GemmOperand<F> b, F beta);

}  // namespace layerstream::ops::detail

#include "ops/detail/host_gemm.hpp"

#include <cblas.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <limits>

#include "core/error.hpp"

namespace layerstream::ops::detail {
namespace {

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const double* a, int lda,
          const double* b, int ldb, double beta, double* c, int ldc) {
  cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1.0, a, lda, b, ldb, beta, c, ldc);
}

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float* a, int lda,
          const float* b, int ldb, float beta, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1.0F, a, lda, b, ldb, beta, c, ldc);
}

constexpr std::int64_t tile_rows = 256;
constexpr std::int64_t tile_columns = 256;

template <class F>
struct GemmTile {
  F* c;
  std::int64_t c_stride, m, n, k;
  GemmOperand<F> a, b;
  F beta;
  std::int64_t tiles_across;

  void operator()(std::int64_t tile) const {
    const std::int64_t row = tile / tiles_across * tile_rows, column = tile % tiles_across * tile_columns;
    const F* a_tile = a.data + (a.transposed ? row : row * a.leading_dimension);
    const F* b_tile = b.data + (b.transposed ? column * b.leading_dimension : column);
    gemm(a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
         static_cast<int>(std::min(tile_rows, m - row)), static_cast<int>(std::min(tile_columns, n - column)),
         static_cast<int>(k), a_tile, static_cast<int>(a.leading_dimension), b_tile,
         static_cast<int>(b.leading_dimension), beta, c + row * c_stride + column,
         static_cast<int>(c_stride));
  }
};

}  // namespace

template <class F>
void host_gemm(F* c, std::int64_t c_stride, std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand<F> a,
               GemmOperand<F> b, F beta) {
  for (const std::int64_t extent : {k, a.leading_dimension, b.leading_dimension, c_stride}) {
    LAYERSTREAM_EXPECT(extent <= std::numeric_limits<int>::max(),
                       "GEMM of ({}, {}, {}): {} does not fit the BLAS's 32-bit integers", m, n, k, extent);
  }
  if (m == 0 || n == 0) return;
  const std::int64_t down = (m + tile_rows - 1) / tile_rows, across = (n + tile_columns - 1) / tile_columns;
  using Space = Kokkos::DefaultHostExecutionSpace;
  using Policy =
      Kokkos::RangePolicy<Space, Kokkos::IndexType<std::int64_t>, Kokkos::Schedule<Kokkos::Dynamic>>;
  Kokkos::parallel_for("layerstream::host_gemm", Policy(Space(), 0, down * across, Kokkos::ChunkSize(1)),
                       GemmTile<F>{c, c_stride, m, n, k, a, b, beta, across});
}

template void host_gemm(double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, GemmOperand<double>,
                        GemmOperand<double>, double);
template void host_gemm(float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t, GemmOperand<float>,
                        GemmOperand<float>, float);

}  // namespace layerstream::ops::detail

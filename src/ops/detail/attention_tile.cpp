#include "ops/detail/attention_tile.hpp"

#include <cblas.h>

namespace layerstream::ops::detail {
namespace {

CBLAS_TRANSPOSE first_of(Product product) {
  return product == Product::t_n ? CblasTrans : CblasNoTrans;
}
CBLAS_TRANSPOSE second_of(Product product) {
  return product == Product::n_t ? CblasTrans : CblasNoTrans;
}

}  // namespace

void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                  Tile<double> a, Tile<double> b, double beta, double* c, std::int64_t c_stride) {
  cblas_dgemm(CblasRowMajor, first_of(product), second_of(product), static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), beta, c, static_cast<int>(c_stride));
}

void tile_product(Product product, std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Tile<float> a,
                  Tile<float> b, float beta, float* c, std::int64_t c_stride) {
  cblas_sgemm(CblasRowMajor, first_of(product), second_of(product), static_cast<int>(m), static_cast<int>(n),
              static_cast<int>(k), alpha, a.data, static_cast<int>(a.stride), b.data,
              static_cast<int>(b.stride), beta, c, static_cast<int>(c_stride));
}

std::size_t attention_workspace(const AttentionLimits& limits) {
  const AttentionScratchLayout layout{limits.head_dim, limits.compute == DType::bf16};
  return static_cast<std::size_t>(attention_slots * layout.elements()) *
         size_of(accumulator_of(limits.compute));
}

bool attention_rounds_products(std::int64_t, DType) {
  return false;
}

}  // namespace layerstream::ops::detail

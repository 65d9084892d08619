#include "engine/host_optimizer.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace layerstream {

namespace {

ops::AdamWSlice elements(const ops::AdamWSlice& slab, std::int64_t begin, std::int64_t end) {
  return {slab.hi + begin,         slab.lo + begin,       slab.exp_avg + begin,
          slab.exp_avg_sq + begin, slab.gradient + begin, end - begin};
}

}  // namespace

HostOptimizer::HostOptimizer(WorkerPool& pool, std::int64_t piece_elements)
    : pool_(&pool), piece_elements_(piece_elements) {
  LAYERSTREAM_EXPECT(piece_elements >= 1, "pieces of {} elements", piece_elements);
}

void HostOptimizer::update(const ops::AdamWSlice& slab, std::int64_t num_matrix,
                           const ops::AdamWSettings& settings) {
  LAYERSTREAM_EXPECT(num_matrix >= 0 && num_matrix <= slab.n, "{} matrix elements in a slab of {}",
                     num_matrix, slab.n);
  const ops::AdamWScalars matrix_scalars = ops::adamw_scalars(settings);
  const ops::AdamWScalars other_scalars = ops::adamw_scalars(ops::without_decay(settings));
  const std::int64_t pieces = (slab.n + piece_elements_ - 1) / piece_elements_;
  pool_->parallel_for(pieces, [&](std::int64_t piece) {
    const std::int64_t begin = piece * piece_elements_;
    const std::int64_t end = std::min(slab.n, begin + piece_elements_);
    const std::int64_t matrix_end = std::clamp(num_matrix, begin, end);
    if (begin < matrix_end) ops::adamw_host(elements(slab, begin, matrix_end), matrix_scalars);
    if (matrix_end < end) ops::adamw_host(elements(slab, matrix_end, end), other_scalars);
  });
}

}  // namespace layerstream

#include "engine/host_optimizer.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace layerstream {

HostOptimizer::HostOptimizer(WorkerPool& pool, std::int64_t piece_elements)
    : pool_(&pool), piece_elements_(piece_elements) {
  LAYERSTREAM_EXPECT(piece_elements >= 1, "pieces of {} elements", piece_elements);
}

void HostOptimizer::update(const ops::AdamWSlice& slab, std::span<const UpdateRange> ranges,
                           const ops::AdamWSettings& settings) {
  LAYERSTREAM_EXPECT(std::ranges::is_sorted(ranges, {}, &UpdateRange::end) &&
                         (ranges.empty() ? 0 : ranges.back().end) == slab.n,
                     "{} ranges for a slab of {}", ranges.size(), slab.n);
  std::vector<ops::AdamWScalars> scalars;
  for (const UpdateRange& range : ranges) {
    scalars.push_back(ops::adamw_scalars(ops::with_decay(settings, range.weight_decay.value_or(0.0))));
  }
  const std::int64_t pieces = (slab.n + piece_elements_ - 1) / piece_elements_;
  pool_->parallel_for(pieces, [&](std::int64_t piece) {
    const std::int64_t begin = piece * piece_elements_;
    const std::int64_t end = std::min(slab.n, begin + piece_elements_);
    std::int64_t done = begin;
    for (std::size_t i = 0; i < ranges.size() && done < end; ++i) {
      const std::int64_t range_end = std::min(ranges[i].end, end);
      if (range_end <= done) continue;
      if (ranges[i].weight_decay) ops::adamw_host(ops::elements(slab, done, range_end), scalars[i]);
      done = range_end;
    }
  });
}

void HostOptimizer::update(const ops::AdamWSlice& slab, const ops::AdamWSettings& settings) {
  update(slab, std::vector<UpdateRange>{{.end = slab.n, .weight_decay = settings.weight_decay}}, settings);
}

}  // namespace layerstream

#include "engine/parameter_store.hpp"

#include <algorithm>
#include <array>

#include "core/random.hpp"

namespace layerstream {

ParameterStore::ParameterStore(const ModelLayout& layout, Arena& host, bool with_moments) : layout_(layout) {
  for (const BlockLayout& block : layout.blocks) {
    const std::int64_t n = block.num_elements;
    const auto moments = [&]() -> float* {
      if (!with_moments) return nullptr;
      return static_cast<float*>(
          host.allocate(static_cast<std::size_t>(n) * sizeof(float), "Adam moments (fp32)"));
    };
    slabs_.push_back({.hi = static_cast<bf16*>(host.allocate(static_cast<std::size_t>(n) * sizeof(bf16),
                                                             "weights, upper halves (bf16)")),
                      .lo = static_cast<std::int16_t*>(host.allocate(
                          static_cast<std::size_t>(n) * sizeof(std::int16_t), "weights, lower halves")),
                      .exp_avg = moments(),
                      .exp_avg_sq = moments(),
                      .num_elements = n,
                      .num_matrix_elements = block.num_matrix_elements});
  }
  versions_ = std::make_unique<std::atomic<std::int64_t>[]>(layout.blocks.size());
}

BlockSource ParameterStore::source(int block, bool low_halves) const {
  const auto slab_source = [&](int index, bool gathered) {
    const Slab& slab = this->slab(index);
    return SlabSource{.hi = slab.hi,
                      .lo = slab.lo,
                      .num_matrix_elements = slab.num_matrix_elements,
                      .num_elements = slab.num_elements,
                      .gathered = gathered};
  };
  BlockSource source{.slabs = {slab_source(block, block == layout_.embedding())}, .low_halves = low_halves};
  if (block == layout_.head() && layout_.head_uses_embedding) {
    source.slabs.push_back(slab_source(layout_.embedding(), false));
  }
  return source;
}

void ParameterStore::write(int block, const Parameter& parameter, std::int64_t first,
                           std::span<const float> values) {
  const Slab& slab = this->slab(block);
  const auto count = static_cast<std::int64_t>(values.size());
  LAYERSTREAM_EXPECT(first >= 0 && first + count <= parameter.numel(),
                     "elements [{}, {}) of {} ({} elements)", first, first + count, parameter.name,
                     parameter.numel());
  for (std::int64_t i = 0; i < count; ++i) {
    const SplitFloat halves = split(values[static_cast<std::size_t>(i)]);
    slab.hi[parameter.offset + first + i] = halves.hi;
    slab.lo[parameter.offset + first + i] = halves.lo;
  }
}

void ParameterStore::read(int block, const Parameter& parameter, std::int64_t first,
                          std::span<float> values) const {
  const Slab& slab = this->slab(block);
  const auto count = static_cast<std::int64_t>(values.size());
  LAYERSTREAM_EXPECT(first >= 0 && first + count <= parameter.numel(),
                     "elements [{}, {}) of {} ({} elements)", first, first + count, parameter.name,
                     parameter.numel());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = parameter.offset + first + i;
    values[static_cast<std::size_t>(i)] = merge(slab.hi[at], slab.lo[at]);
  }
}

void ParameterStore::initialize(std::uint64_t seed, double standard_deviation, WorkerPool& pool,
                                const BlockCallback& between_blocks) {
  constexpr std::int64_t piece = 4096;
  std::uint64_t stream = 0;  // one per parameter, in layout order
  for (int block = 0; block < layout_.num_blocks(); ++block) {
    if (between_blocks) between_blocks(block, layout_.num_blocks());
    for (const Parameter& parameter : layout_.blocks[static_cast<std::size_t>(block)].parameters) {
      const bool is_bias = parameter.name.ends_with(".bias");
      pool.parallel_for((parameter.numel() + piece - 1) / piece, [&](std::int64_t index) {
        std::array<float, piece> values;
        const std::int64_t first = index * piece;
        const std::int64_t count = std::min(piece, parameter.numel() - first);
        for (std::int64_t i = 0; i < count; ++i) {
          const double value =
              parameter.is_matrix
                  ? standard_deviation * normal_at(seed, stream, static_cast<std::uint64_t>(first + i))
                  : (is_bias ? 0.0 : 1.0);
          values[static_cast<std::size_t>(i)] = static_cast<float>(value);
        }
        write(block, parameter, first, std::span(values).first(static_cast<std::size_t>(count)));
      });
      ++stream;
    }
    const Slab& slab = this->slab(block);
    if (slab.exp_avg != nullptr) {
      std::fill_n(slab.exp_avg, slab.num_elements, 0.0F);
      std::fill_n(slab.exp_avg_sq, slab.num_elements, 0.0F);
    }
    bump_version(block);
  }
}

}  // namespace layerstream

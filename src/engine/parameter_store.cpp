#include "engine/parameter_store.hpp"

#include <algorithm>
#include <array>

#include "core/random.hpp"

namespace layerstream {

Slab make_slab(const BlockLayout& block, Arena& arena, std::string_view upper, std::string_view lower,
               std::string_view moments) {
  const auto n = static_cast<std::size_t>(block.num_elements);
  Slab slab{.hi = static_cast<bf16*>(arena.allocate(n * sizeof(bf16), upper)),
            .lo = static_cast<std::int16_t*>(arena.allocate(n * sizeof(std::int16_t), lower)),
            .exp_avg = nullptr,
            .exp_avg_sq = nullptr,
            .num_elements = block.num_elements,
            .num_matrix_elements = block.num_matrix_elements};
  if (!moments.empty()) {
    slab.exp_avg = static_cast<float*>(arena.allocate(n * sizeof(float), moments));
    slab.exp_avg_sq = static_cast<float*>(arena.allocate(n * sizeof(float), moments));
  }
  return slab;
}

ParameterStore::ParameterStore(const ModelLayout& layout, Arena& host, bool with_moments) : layout_(layout) {
  for (int block = 0; block < layout.num_blocks(); ++block) {
    slabs_.push_back(make_slab(layout.blocks[static_cast<std::size_t>(block)], host,
                               "weights, upper halves (bf16)", "weights, lower halves",
                               with_moments && !layout.is_frozen(block) ? "Adam moments (fp32)" : ""));
  }
  versions_ = std::make_unique<std::atomic<std::int64_t>[]>(layout.blocks.size());
}

std::size_t ParameterStore::bytes(const ModelLayout& layout, bool with_moments) {
  Ledger ledger;
  Arena arena = Arena::dry(Space::host, ledger);
  const ParameterStore store(layout, arena, with_moments);
  return arena.used();
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
  constexpr std::int64_t piece = 4096;  // even: a pair of normal numbers is drawn at once
  std::uint64_t stream = 0;             // one per parameter, in layout order
  for (int block = 0; block < layout_.num_blocks(); ++block) {
    if (between_blocks) between_blocks(block, layout_.num_blocks());
    for (const Parameter& parameter : layout_.blocks[static_cast<std::size_t>(block)].parameters) {
      const bool is_bias = parameter.name.ends_with(".bias");
      pool.parallel_for((parameter.numel() + piece - 1) / piece, [&](std::int64_t index) {
        std::array<float, piece> values;
        const std::int64_t first = index * piece;
        const std::int64_t count = std::min(piece, parameter.numel() - first);
        if (parameter.is_matrix) {
          for (std::int64_t i = 0; i < count; i += 2) {
            const auto pair = normal_pair_at(seed, stream, static_cast<std::uint64_t>(first + i) / 2);
            values[static_cast<std::size_t>(i)] = static_cast<float>(standard_deviation * pair[0]);
            values[static_cast<std::size_t>(i + 1)] = static_cast<float>(standard_deviation * pair[1]);
          }
        } else {
          values.fill(is_bias ? 0.0F : 1.0F);
        }
        write(block, parameter, first, std::span(values).first(static_cast<std::size_t>(count)));
      });
      ++stream;
    }
    const Slab& slab = this->slab(block);
    if (slab.exp_avg != nullptr) {
      constexpr std::int64_t zeroed = std::int64_t{1} << 20;
      pool.parallel_for((slab.num_elements + zeroed - 1) / zeroed, [&](std::int64_t index) {
        const std::int64_t first = index * zeroed;
        const std::int64_t count = std::min(zeroed, slab.num_elements - first);
        std::fill_n(slab.exp_avg + first, count, 0.0F);
        std::fill_n(slab.exp_avg_sq + first, count, 0.0F);
      });
    }
    bump_version(block);
  }
}

}  // namespace layerstream

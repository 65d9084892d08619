#include "backends/coherent/coherent_backend.hpp"

#include "backends/slot_image.hpp"

namespace layerstream {

std::size_t CoherentBackend::slot_bytes(const BlockSource& source) const {
  SlotImage image(nullptr);
  for (const SlabSource& slab : source.slabs) {
    if (slab.gathered) continue;
    image.place<bf16>(slab.num_matrix_elements);
    if (source.low_halves) image.place<std::int16_t>(slab.num_matrix_elements);
  }
  return image.bytes();
}

void CoherentBackend::fetch(int slot, int block, std::int64_t version, const BlockSource& source,
                            StreamView stream) {
  SlotImage image(table_.begin_fetch(slot, block, version, slot_bytes(source)));
  WeightBinding binding;
  for (const SlabSource& slab : source.slabs) {
    BoundSlab bound{.matrix_hi = slab.hi,
                    .matrix_lo = source.low_halves ? slab.lo : nullptr,
                    .vector_hi = slab.hi + slab.num_matrix_elements,
                    .vector_lo = slab.lo + slab.num_matrix_elements};
    if (!slab.gathered) {
      const auto elements = static_cast<std::size_t>(slab.num_matrix_elements);
      bf16* const hi = image.place<bf16>(slab.num_matrix_elements);
      promotion_.copy(hi, slab.hi, elements * sizeof(bf16), stream);
      bound.matrix_hi = hi;
      if (source.low_halves) {
        std::int16_t* const lo = image.place<std::int16_t>(slab.num_matrix_elements);
        promotion_.copy(lo, slab.lo, elements * sizeof(std::int16_t), stream);
        bound.matrix_lo = lo;
      }
    }
    binding.push_back(bound);
  }
  table_.bind(slot, std::move(binding));
}

}  // namespace layerstream

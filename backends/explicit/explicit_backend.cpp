#include "backends/explicit/explicit_backend.hpp"

#include "backends/slot_image.hpp"

namespace layerstream {
namespace {

/// Where a slab's halves go in the slot.
struct SlabImage {
  SlabImage(SlotImage& image, const SlabSource& slab, bool low_halves)
      : low_halves_stream(low_halves),
        first_low(low_halves ? 0 : slab.num_matrix_elements),
        hi(image.place<bf16>(slab.num_elements)),
        lo(image.place<std::int16_t>(slab.num_elements - first_low)) {}

  BoundSlab bound(const SlabSource& slab) const {
    return {.matrix_hi = hi,
            .matrix_lo = low_halves_stream ? lo : nullptr,
            .vector_hi = hi + slab.num_matrix_elements,
            .vector_lo = lo + (slab.num_matrix_elements - first_low)};
  }

  bool low_halves_stream;
  std::int64_t first_low;  ///< first element whose lower half streams
  bf16* hi;
  std::int16_t* lo;
};

}  // namespace

std::size_t ExplicitBackend::slot_bytes(const BlockSource& source) const {
  SlotImage image(nullptr);
  for (const SlabSource& slab : source.slabs) {
    image.place<bf16>(slab.num_elements);
    image.place<std::int16_t>(slab.num_elements - (source.low_halves ? 0 : slab.num_matrix_elements));
  }
  return image.bytes();
}

void ExplicitBackend::fetch(int slot, int block, std::int64_t version, const BlockSource& source,
                            StreamView stream) {
  SlotImage image(table_.begin_fetch(slot, block, version, slot_bytes(source)));
  WeightBinding binding;
  for (const SlabSource& slab : source.slabs) {
    const SlabImage placed(image, slab, source.low_halves);
    link_.copy(placed.hi, slab.hi, static_cast<std::size_t>(slab.num_elements) * sizeof(bf16), stream);
    link_.copy(placed.lo, slab.lo + placed.first_low,
               static_cast<std::size_t>(slab.num_elements - placed.first_low) * sizeof(std::int16_t), stream);
    binding.push_back(placed.bound(slab));
  }
  table_.bind(slot, std::move(binding));
}

}  // namespace layerstream

#include "io/content_hash.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <new>

namespace layerstream::io {

ContentHash::ContentHash() : state_(XXH3_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(state_.get());
}

void ContentHash::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

void ContentHash::update(std::span<const std::byte> bytes) {
  if (!bytes.empty()) XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

std::uint64_t ContentHash::digest() const {
  return XXH3_64bits_digest(state_.get());
}

std::string ContentHash::hex() const {
  return fmt::format("{:016x}", digest());
}

}  // namespace layerstream::io

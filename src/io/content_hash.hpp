#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

struct XXH3_state_s;

namespace layerstream::io {

/// Streaming XXH3 64-bit hash (seed 0) of a file's content: the digest does not depend on the pieces.
class ContentHash {
 public:
  ContentHash();

  void update(std::span<const std::byte> bytes);
  std::uint64_t digest() const;
  /// The digest as 16 lower-case hexadecimal digits, as `xxh3sum` prints it.
  std::string hex() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace layerstream::io

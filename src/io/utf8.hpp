#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace layerstream::io {

/// The first ill-formed sequence of a text.
struct Utf8Fault {
  std::size_t offset;  ///< of its first byte
  std::size_t length;  ///< bytes of its maximal subpart: what one replacement character stands for
  std::string cause;
};

/// Well-formedness as in the Unicode Standard 15.0, table 3-7: overlong forms, surrogates and code points
/// beyond U+10FFFF are ill-formed.
std::optional<Utf8Fault> find_utf8_fault(std::string_view text);

}  // namespace layerstream::io

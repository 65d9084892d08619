#include "cli/option_bytes.hpp"

#include <fmt/format.h>

#include "core/config_value.hpp"
#include "core/error.hpp"

namespace layerstream::cli {

std::size_t bytes_or(std::string_view option, const std::string& text, std::size_t otherwise,
                     std::string_view least, std::string_view example) {
  if (text.empty()) return otherwise;
  const auto bytes = parse_bytes(text);
  if (!bytes || *bytes < parse_bytes(least).value()) {
    throw ConfigError(
        fmt::format("{} {}: expected bytes, at least {}, such as {}", option, text, least, example));
  }
  return *bytes;
}

}  // namespace layerstream::cli

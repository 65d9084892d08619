#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace layerstream::io {

/// Parses a JSON text in which no object has a key twice. Throws FileError naming `file` and the byte.
nlohmann::json parse_json(std::string_view text, const std::string& file);

}  // namespace layerstream::io

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace layerstream::cli {

/// What an option that takes bytes says, or `otherwise` if it is empty. Throws ConfigError, which names the
/// option, for anything else and for less than `least`.
/// @param least, example as a user would write them: "8MiB"
std::size_t bytes_or(std::string_view option, const std::string& text, std::size_t otherwise,
                     std::string_view least, std::string_view example);

}  // namespace layerstream::cli

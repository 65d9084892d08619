#include "io/json_text.hpp"

#include <set>
#include <vector>

#include "core/error.hpp"
#include "io/safetensors_header.hpp"

namespace layerstream::io {

nlohmann::json parse_json(std::string_view text, const std::string& file) {
  using Event = nlohmann::json::parse_event_t;
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw FileError(fmt::format("{}: is not JSON: a zero byte at byte {}", file, nul));
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int, Event event, nlohmann::json& value) {
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(value.get<std::string>()).second) {
      throw FileError(fmt::format("{}: key {} occurs twice in an object", file, value.dump()));
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), watch);
  } catch (const nlohmann::json::exception& error) {
    throw FileError(fmt::format("{}: is not JSON: {}", file, in_quotes(error.what())));
  }
}

}  // namespace layerstream::io

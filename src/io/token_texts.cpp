#include "io/token_texts.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>

#include "core/error.hpp"
#include "io/json_text.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

std::string TokenTexts::quoted(const fs::path& shard, std::int32_t id) {
  const std::vector<std::string>& texts = texts_of(shard.parent_path());
  const auto index = static_cast<std::size_t>(id);
  if (id < 0 || index >= texts.size() || texts[index].empty()) return {};
  return "'" + texts[index] + "'";
}

const std::vector<std::string>& TokenTexts::texts_of(const fs::path& directory) {
  const auto [entry, is_new] = by_directory_.try_emplace(directory);
  if (!is_new) return entry->second;
  const fs::path path = directory / ".tokens.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) return entry->second;
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const nlohmann::json list = parse_json(text, path.string());
  const auto is_text = [](const nlohmann::json& item) { return item.is_string(); };
  if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_text)) {
    throw FileError(fmt::format("{}: not a list of texts of tokens; remove it, or prepare the data again",
                                path.string()));
  }
  entry->second = list.get<std::vector<std::string>>();
  return entry->second;
}

}  // namespace layerstream::io

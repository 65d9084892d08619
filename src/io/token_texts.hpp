#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace layerstream::io {

/// What tokens of shards stand for, as tools/prepare_data leaves it beside them: `.tokens.json`, a list of
/// texts by id.
class TokenTexts {
 public:
  /// Between quotes; empty where there is no such file or no such id. Throws FileError for a malformed file.
  std::string quoted(const std::filesystem::path& shard, std::int32_t id);

 private:
  const std::vector<std::string>& texts_of(const std::filesystem::path& directory);

  std::map<std::filesystem::path, std::vector<std::string>> by_directory_;
};

}  // namespace layerstream::io

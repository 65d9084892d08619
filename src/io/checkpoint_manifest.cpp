#include "io/checkpoint_manifest.hpp"

#include <set>
#include <span>

#include "core/error.hpp"
#include "io/content_hash.hpp"
#include "io/file_source.hpp"
#include "io/json_text.hpp"
#include "io/safetensors_header.hpp"

namespace layerstream::io {

namespace {

constexpr std::string_view format_name = "layerstream checkpoint";

std::string hash_of(const nlohmann::json& json) {
  const std::string text = json.dump();  // keys sorted, no white space: one text per content
  ContentHash hash;
  hash.update(std::as_bytes(std::span(text)));
  return hash.hex();
}

}  // namespace

std::uint64_t CheckpointManifest::bytes() const {
  std::uint64_t sum = 0;
  for (const CheckpointFile& file : files) sum += file.bytes;
  return sum;
}

std::string CheckpointManifest::to_json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const CheckpointFile& file : files) {
    list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3_64", file.xxh3}});
  }
  nlohmann::json json{{"format", format_name}, {"version", current_version}, {"step", step}, {"files", list}};
  json["xxh3_64"] = hash_of(json);
  return json.dump(2) + "\n";
}

CheckpointManifest CheckpointManifest::from_json(std::string_view text, const std::filesystem::path& file) {
  const auto fail = [&](const std::string& fault) {
    throw FileError(fmt::format("{}: {}", file.string(), fault));
  };
  nlohmann::json json = parse_json(text, file.string());
  CheckpointManifest manifest;
  try {
    if (json.at("format").get<std::string>() != format_name)
      fail("is not the manifest of a layerstream checkpoint");
    // Before the rest: a newer version may look different.
    if (const auto version = json.at("version").get<std::int64_t>(); version != current_version) {
      fail(fmt::format(
          "has format version {}, this program reads version {}; use the layerstream that wrote it", version,
          current_version));
    }
    const std::string hash = json.at("xxh3_64").get<std::string>();
    json.erase("xxh3_64");
    if (hash != hash_of(json))
      fail("was changed after it was written (its hash differs); use another checkpoint");
    manifest.step = json.at("step").get<std::int64_t>();
    std::set<std::string> names;
    for (const nlohmann::json& item : json.at("files")) {
      CheckpointFile& entry = manifest.files.emplace_back(
          CheckpointFile{item.at("name").get<std::string>(), item.at("bytes").get<std::uint64_t>(),
                         item.at("xxh3_64").get<std::string>()});
      if (!is_plain_file_name(entry.name))
        fail(fmt::format("file {} is not a name in this directory", in_quotes(entry.name)));
      if (!names.insert(entry.name).second)
        fail(fmt::format("file {} is listed twice", in_quotes(entry.name)));
    }
  } catch (const nlohmann::json::exception& error) {
    fail(fmt::format("is not the manifest of a layerstream checkpoint: {}", in_quotes(error.what())));
  }
  return manifest;
}

}  // namespace layerstream::io

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "io/checkpoint.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

CheckpointReader::CheckpointReader(fs::path directory, Verify verify) : directory_(std::move(directory)) {
  std::error_code ignored;
  if (!fs::is_directory(directory_, ignored)) {
    throw FileError(fmt::format("{}: no such checkpoint directory", directory_.string()));
  }
  const fs::path manifest = directory_ / CheckpointManifest::file_name;
  if (!fs::exists(manifest, ignored)) {
    throw FileError(
        fmt::format("{}: is absent: the checkpoint is incomplete or not of layerstream; use another one",
                    manifest.string()));
  }
  manifest_ = CheckpointManifest::from_json(read_text(manifest), manifest);
  for (const CheckpointFile& file : manifest_.files) {
    const fs::path path = directory_ / file.name;
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) {
      throw FileError(fmt::format(
          "{}: is absent or unreadable ({}), though the checkpoint's manifest lists it; use another "
          "checkpoint",
          path.string(), error.message()));
    }
    if (bytes != file.bytes) {
      throw FileError(
          fmt::format("{}: has {} bytes, the checkpoint's manifest says {}; use another checkpoint",
                      path.string(), bytes, file.bytes));
    }
  }
  if (verify == Verify::hashes) verify_hashes();
}

void CheckpointReader::verify_hashes(
    const std::function<void(std::uint64_t done, std::uint64_t total)>& before_file) const {
  std::uint64_t total = 0;
  for (const CheckpointFile& file : manifest_.files) total += file.bytes;
  std::uint64_t done = 0;
  for (const CheckpointFile& file : manifest_.files) {
    if (before_file) before_file(done, total);
    done += file.bytes;
    const fs::path path = directory_ / file.name;
    if (const std::string hash = hash_file(path); hash != file.xxh3) {
      throw FileError(fmt::format(
          "{}: its content changed after it was written: XXH3 {}, the checkpoint's manifest says {}; "
          "use another checkpoint",
          path.string(), hash, file.xxh3));
    }
  }
}

bool CheckpointReader::has(std::string_view name) const {
  return std::ranges::any_of(manifest_.files, [&](const CheckpointFile& file) { return file.name == name; });
}

fs::path CheckpointReader::path(std::string_view name) const {
  if (!has(name)) {
    throw FileError(fmt::format("{}: the checkpoint has no file {}", directory_.string(), in_quotes(name)));
  }
  return directory_ / name;
}

std::string CheckpointReader::text(std::string_view name) const {
  return read_text(path(name));
}

SafetensorsFile CheckpointReader::safetensors(std::string_view name, PageCache cache) const {
  return SafetensorsFile(path(name), cache);
}

}  // namespace layerstream::io

#include "io/model_files.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <system_error>

#include "core/error.hpp"
#include "io/json_text.hpp"

namespace layerstream::io {

namespace fs = std::filesystem;

namespace {

/// name -> shard, both as in the index file's weight_map.
std::map<std::string, std::string> read_weight_map(const fs::path& index) {
  const nlohmann::json json = parse_json(read_text(index), index.string());
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) {
    throw FileError(fmt::format("{}: has no object \"weight_map\"", index.string()));
  }
  std::map<std::string, std::string> shards;
  for (const auto& [name, shard] : map->items()) {
    if (!shard.is_string()) {
      throw FileError(
          fmt::format("{}: weight_map of tensor {} is not a string", index.string(), in_quotes(name)));
    }
    const std::string& file = shard.get_ref<const std::string&>();
    if (!is_plain_file_name(file)) {
      throw FileError(
          fmt::format("{}: weight_map of tensor {} is {}, which is not a file name in this directory",
                      index.string(), in_quotes(name), in_quotes(file)));
    }
    shards.emplace(name, file);
  }
  return shards;
}

template <class Half>
void widen(std::span<float> out) {
  // The 16-bit values lie in the upper half of `out`. Writing floats from the front never passes
  // the values that are still to be read, if a block is set aside first.
  const std::byte* const halves = reinterpret_cast<const std::byte*>(out.data()) + out.size() * sizeof(Half);
  std::array<Half, 2048> block;
  for (std::size_t begin = 0; begin < out.size(); begin += block.size()) {
    const std::size_t count = std::min(block.size(), out.size() - begin);
    std::memcpy(block.data(), halves + begin * sizeof(Half), count * sizeof(Half));
    for (std::size_t i = 0; i < count; ++i) out[begin + i] = to_float(block[i]);
  }
}

}  // namespace

ModelFiles::ModelFiles(const fs::path& directory, PageCache cache) : directory_(directory) {
  const fs::path single = directory / "model.safetensors";
  const fs::path index = directory / "model.safetensors.index.json";
  std::error_code ignored;
  if (fs::exists(single, ignored)) {
    add_file(single, cache);
  } else if (fs::exists(index, ignored)) {
    open_sharded(index, cache);
  } else {
    throw FileError(fmt::format(
        "{}: holds neither model.safetensors nor model.safetensors.index.json; other formats must "
        "be converted to safetensors first",
        directory.string()));
  }
}

void ModelFiles::open_sharded(const fs::path& index, PageCache cache) {
  const std::map<std::string, std::string> shards = read_weight_map(index);
  std::map<std::string, std::string> first_tensor;  // shard -> a tensor for the message
  for (const auto& [name, shard] : shards) first_tensor.emplace(shard, name);
  for (const auto& [shard, name] : first_tensor) {
    std::error_code ignored;
    if (!fs::exists(directory_ / shard, ignored)) {
      throw FileError(
          fmt::format("{}: shard is absent, though {} says that tensor {} is in it; fetch the model again",
                      (directory_ / shard).string(), index.filename().string(), in_quotes(name)));
    }
    add_file(directory_ / shard, cache);
  }
  for (const auto& [name, shard] : shards) {
    const TensorEntry* const entry = find(name);
    const std::string where = (directory_ / shard).string();
    if (entry == nullptr || entry->file != where) {
      throw FileError(fmt::format("{}: lacks tensor {}, which {} says is in it{}", where, in_quotes(name),
                                  index.filename().string(), entry ? " (it is in " + entry->file + ")" : ""));
    }
  }
}

void ModelFiles::add_file(const fs::path& path, PageCache cache) {
  const SafetensorsFile& file = files_.emplace_back(path, cache);
  for (std::size_t i = 0; i < file.entries().size(); ++i) {
    const std::string& name = file.entries()[i].name;
    const auto [other, added] = by_name_.emplace(name, Location{files_.size() - 1, i});
    if (!added) {
      throw FileError(fmt::format("{}: tensor {} is also in {}; which one is meant?", path.string(),
                                  in_quotes(name), files_[other->second.file].path().string()));
    }
  }
}

std::vector<std::string> ModelFiles::names() const {
  std::vector<std::string> names;
  names.reserve(by_name_.size());
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& entry : file.entries()) names.push_back(entry.name);
  }
  return names;
}

const TensorEntry* ModelFiles::find(std::string_view name) const {
  const auto found = by_name_.find(std::string(name));
  if (found == by_name_.end()) return nullptr;
  return &files_[found->second.file].entries()[found->second.entry];
}

void ModelFiles::read(const TensorEntry& entry, std::uint64_t byte_offset, std::span<std::byte> out) const {
  const auto found = by_name_.find(entry.name);
  LAYERSTREAM_EXPECT(found != by_name_.end(), "tensor {} is not of {}", in_quotes(entry.name),
                     directory_.string());
  files_[found->second.file].read(entry, byte_offset, out);
}

void ModelFiles::read_as_float(const TensorEntry& entry, std::int64_t element_offset,
                               std::span<float> out) const {
  if (entry.dtype != DType::f32 && entry.dtype != DType::bf16 && entry.dtype != DType::f16) {
    throw FileError(fmt::format("{}: tensor {} is {}; weights must be F32, BF16 or F16", entry.file,
                                in_quotes(entry.name), safetensors_name(entry.dtype)));
  }
  LAYERSTREAM_EXPECT(element_offset >= 0, "element {} of tensor {}", element_offset, in_quotes(entry.name));
  const std::size_t bytes = out.size() * size_of(entry.dtype);
  // Narrow values go to the end of `out` and are widened in place.
  read(entry, static_cast<std::uint64_t>(element_offset) * size_of(entry.dtype),
       std::as_writable_bytes(out).last(bytes));
  if (entry.dtype == DType::bf16) widen<bf16>(out);
  if (entry.dtype == DType::f16) widen<fp16>(out);
}

}  // namespace layerstream::io

#include "engine/model_io.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "io/file_sink.hpp"
#include "io/safetensors.hpp"
#include "model/hf_config.hpp"

namespace layerstream {
namespace {

/// Elements that are converted at once; each takes at most a float and a 16-bit value.
constexpr std::int64_t piece_elements = transit_bytes / 6;

/// Tensors that files carry and no model of ours learns.
bool is_ignorable(const std::string& name, const ModelLayout& layout) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  // A tied head may be stored once more under its own name.
  return layout.head_uses_embedding && name == "lm_head.weight";
}

bool same_shape(const std::vector<std::int64_t>& in_file, const Shape& wanted) {
  if (static_cast<int>(in_file.size()) != wanted.rank()) return false;
  for (int i = 0; i < wanted.rank(); ++i) {
    if (in_file[static_cast<std::size_t>(i)] != wanted[i]) return false;
  }
  return true;
}

void list(std::string& text, std::string_view title, const std::vector<std::string>& names) {
  if (names.empty()) return;
  constexpr std::size_t shown = 20;
  text += fmt::format("\n  {} ({}):", title, names.size());
  for (std::size_t i = 0; i < std::min(shown, names.size()); ++i) text += "\n    " + names[i];
  if (names.size() > shown) text += fmt::format("\n    and {} more", names.size() - shown);
}

template <class Half, class Convert>
void append_converted(io::SafetensorsWriter& writer, const Parameter& parameter, std::int64_t first,
                      std::span<const float> values, const Convert& convert) {
  std::vector<Half> converted(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    converted[i] = convert(values[i]);
    if (std::isfinite(values[i]) && !std::isfinite(to_float(converted[i]))) {
      throw FileError(
          fmt::format("element {} of {} is {}, beyond the range of the dtype asked for; export in fp32{}",
                      first + static_cast<std::int64_t>(i), parameter.name, values[i],
                      std::is_same_v<Half, fp16> ? " or bf16" : ""));
    }
  }
  writer.append(std::as_bytes(std::span<const Half>(converted)));
}

void append_parameter(io::SafetensorsWriter& writer, const ParameterStore& store, int block,
                      const Parameter& parameter, DType dtype) {
  std::vector<float> values;
  for (std::int64_t first = 0; first < parameter.numel(); first += piece_elements) {
    values.resize(static_cast<std::size_t>(std::min(piece_elements, parameter.numel() - first)));
    store.read(block, parameter, first, values);
    switch (dtype) {
      case DType::bf16:
        append_converted<bf16>(writer, parameter, first, values, [](float value) { return to_bf16(value); });
        break;
      case DType::f16:
        append_converted<fp16>(writer, parameter, first, values, [](float value) { return to_fp16(value); });
        break;
      default:
        writer.append(std::as_bytes(std::span<const float>(values)));
    }
  }
}

/// Which tensors go into one file.
struct Shard {
  std::vector<std::pair<int, const Parameter*>> parameters;
  std::uint64_t bytes = 0;
};

std::vector<Shard> make_shards(const ModelLayout& layout, DType dtype, std::uint64_t max_bytes) {
  std::vector<Shard> shards(1);
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      const std::uint64_t bytes = static_cast<std::uint64_t>(parameter.numel()) * size_of(dtype);
      if (shards.back().bytes > 0 && shards.back().bytes + bytes > max_bytes) shards.emplace_back();
      shards.back().parameters.emplace_back(block, &parameter);
      shards.back().bytes += bytes;
    }
  }
  return shards;
}

void write_text(const std::shared_ptr<io::FileSystem>& files, const std::filesystem::path& path,
                std::string_view text) {
  io::FileSink sink(files, path);
  sink.append(text);
  sink.finish();
}

void write_shards(const ParameterStore& store, const ExportRequest& request,
                  const std::filesystem::path& directory, const std::shared_ptr<io::FileSystem>& files) {
  const std::vector<Shard> shards = make_shards(store.layout(), request.dtype, request.max_shard_bytes);
  std::map<std::string, std::string> file_of_tensor;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shards.size() == 1
                                 ? "model.safetensors"
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    std::vector<io::TensorSpec> specs;
    for (const auto& [block, parameter] : shards[i].parameters) {
      specs.push_back({parameter->name, request.dtype, parameter->shape.to_vector()});
      file_of_tensor[parameter->name] = name;
    }
    io::SafetensorsWriter writer(files, directory / name, specs, {{"format", "pt"}});
    for (const auto& [block, parameter] : shards[i].parameters) {
      append_parameter(writer, store, block, *parameter, request.dtype);
    }
    writer.finish();
    total += shards[i].bytes;
  }
  if (shards.size() == 1) return;
  std::string index = fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total);
  const char* separator = "\n";
  for (const auto& [tensor, file] : file_of_tensor) {
    index += fmt::format("{}    {}: {}", separator, io::in_quotes(tensor), io::in_quotes(file));
    separator = ",\n";
  }
  index += "\n  }\n}\n";
  write_text(files, directory / "model.safetensors.index.json", index);
}

}  // namespace

void check_weights(const io::ModelFiles& files, const ModelLayout& layout) {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> misshapen;
  std::set<std::string> wanted;
  for (const BlockLayout& block : layout.blocks) {
    for (const Parameter& parameter : block.parameters) {
      wanted.insert(parameter.name);
      const io::TensorEntry* const entry = files.find(parameter.name);
      if (entry == nullptr) {
        missing.push_back(parameter.name);
      } else if (!same_shape(entry->shape, parameter.shape)) {
        misshapen.push_back(fmt::format("{}: {} in {}, the configuration wants {}", parameter.name,
                                        io::to_string(entry->shape), entry->file,
                                        io::to_string(parameter.shape.to_vector())));
      } else if (entry->dtype != DType::f32 && entry->dtype != DType::bf16 && entry->dtype != DType::f16) {
        misshapen.push_back(fmt::format("{}: {} in {}; F32, BF16 and F16 can be loaded", parameter.name,
                                        name_of(entry->dtype), entry->file));
      }
    }
  }
  for (const std::string& name : files.names()) {
    if (!wanted.contains(name) && !is_ignorable(name, layout)) unexpected.push_back(name);
  }
  std::string problems;
  list(problems, "missing", missing);
  list(problems, "unexpected", unexpected);
  list(problems, "of another shape or type", misshapen);
  if (problems.empty()) return;
  throw FileError(
      fmt::format("{}: the weights are not those of its config.json:{}\n  check that the download is "
                  "complete and that config.json belongs to these files",
                  files.directory().string(), problems));
}

void load_weights(const io::ModelFiles& files, ParameterStore& store, const BlockCallback& between_blocks) {
  const ModelLayout& layout = store.layout();
  check_weights(files, layout);
  std::vector<float> values;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (between_blocks) between_blocks(block, layout.num_blocks());
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      const io::TensorEntry& entry = *files.find(parameter.name);
      for (std::int64_t first = 0; first < parameter.numel(); first += piece_elements) {
        values.resize(static_cast<std::size_t>(std::min(piece_elements, parameter.numel() - first)));
        files.read_as_float(entry, first, values);
        store.write(block, parameter, first, values);
      }
    }
    store.bump_version(block);
  }
}

void export_model(const ParameterStore& store, const ExportRequest& request) {
  namespace fs = std::filesystem;
  fs::path target = fs::absolute(request.directory).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();  // "model/" is "model"
  if (fs::exists(target) && !(fs::is_directory(target) && fs::is_empty(target))) {
    throw FileError(
        fmt::format("{}: exists and is not an empty directory; choose another place", target.string()));
  }
  fs::path temporary = target;
  temporary += ".layerstream-export";  // no name of the user's: it is removed if an export was killed
  const auto files = std::make_shared<io::FileSystem>();
  io::remove_tree(*files, temporary);
  io::create_directories(*files, temporary);
  try {
    write_shards(store, request, temporary, files);
    write_text(files, temporary / "config.json", export_hf_config(request.config_json, request.dtype));
    if (!request.companions_from.empty()) {
      for (const fs::path& file : companion_files(request.companions_from)) {
        write_text(files, temporary / file.filename(), io::read_text(file));
      }
    }
    io::sync_directory(*files, temporary);
    io::remove_tree(*files, target);  // an empty directory, or nothing
    io::rename(*files, temporary, target);
  } catch (const fs::filesystem_error& failure) {
    io::remove_tree_no_throw(*files, temporary);
    throw FileError(fmt::format("export to {}: {}", target.string(), failure.what()));
  } catch (...) {
    io::remove_tree_no_throw(*files, temporary);
    throw;
  }
}

bool has_tokenizer(const std::filesystem::path& directory) {
  static constexpr std::array names{"tokenizer.json", "tokenizer.model", "vocab.json"};
  return std::any_of(names.begin(), names.end(),
                     [&](const char* name) { return std::filesystem::exists(directory / name); });
}

std::vector<std::filesystem::path> companion_files(const std::filesystem::path& directory) {
  static constexpr std::array names{
      "tokenizer.json",     "tokenizer.model",         "tokenizer_config.json", "vocab.json",
      "merges.txt",         "special_tokens_map.json", "added_tokens.json",     "chat_template.jinja",
      "chat_template.json", "generation_config.json"};
  std::vector<std::filesystem::path> found;
  for (const char* const name : names) {
    if (std::filesystem::is_regular_file(directory / name)) found.push_back(directory / name);
  }
  return found;
}

std::optional<DType> dtype_from_hf_name(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  return std::nullopt;
}

}  // namespace layerstream

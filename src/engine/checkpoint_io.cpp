#include "engine/checkpoint_io.hpp"

#include <array>

namespace layerstream {
namespace {

constexpr const char* state_file = "trainer_state.json";

std::string block_file(int block) {
  return fmt::format("block-{:05}.safetensors", block);
}

/// One of the four arrays of a slab, as it is stored.
struct SlabPart {
  const char* suffix;
  DType dtype;
  bool is_moment;
  std::byte* (*data)(const Slab&);
};

template <auto member>
std::byte* bytes_of(const Slab& slab) {
  return reinterpret_cast<std::byte*>(slab.*member);
}

/// Larger elements first, so that every tensor begins on a multiple of its element size.
constexpr std::array<SlabPart, 4> slab_parts{{
    {"/exp_avg", DType::f32, true, &bytes_of<&Slab::exp_avg>},
    {"/exp_avg_sq", DType::f32, true, &bytes_of<&Slab::exp_avg_sq>},
    {"/hi", DType::bf16, false, &bytes_of<&Slab::hi>},
    {"/lo", DType::i16, false, &bytes_of<&Slab::lo>},
}};

/// The bytes of a parameter within one part of its slab.
std::span<std::byte> piece_of(const Slab& slab, const SlabPart& part, const Parameter& parameter) {
  const std::size_t size = size_of(part.dtype);
  return {part.data(slab) + static_cast<std::size_t>(parameter.offset) * size,
          static_cast<std::size_t>(parameter.numel()) * size};
}

}  // namespace

std::filesystem::path save_checkpoint(const std::filesystem::path& output_dir, const ParameterStore& store,
                                      const TrainerState& state, const CheckpointExtras& extras,
                                      const std::shared_ptr<io::FileSystem>& files,
                                      const BlockCallback& between_blocks) {
  const ModelLayout& layout = store.layout();
  io::CheckpointWriter writer(output_dir, state.global_step, files);
  writer.text("config.json", extras.config_json);
  writer.text("run.yaml", extras.run_yaml);
  for (const std::filesystem::path& companion : extras.companions) {
    writer.text(companion.filename().string(), io::read_text(companion));
  }
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (between_blocks) between_blocks(block, layout.num_blocks());
    const std::vector<Parameter>& parameters = layout.blocks[static_cast<std::size_t>(block)].parameters;
    std::vector<io::TensorSpec> specs;
    const Slab& slab = store.slab(block);
    const auto has = [&](const SlabPart& part) { return !part.is_moment || slab.exp_avg != nullptr; };
    for (const SlabPart& part : slab_parts) {
      if (!has(part)) continue;
      for (const Parameter& parameter : parameters) {
        specs.push_back({parameter.name + part.suffix, part.dtype, parameter.shape.to_vector()});
      }
    }
    io::SafetensorsWriter& file = writer.safetensors(block_file(block), specs);
    for (const SlabPart& part : slab_parts) {
      if (!has(part)) continue;
      for (const Parameter& parameter : parameters) {
        file.append(parameter.name + part.suffix, piece_of(slab, part, parameter));
      }
    }
    file.finish();
  }
  writer.text(state_file, to_json(state));
  return writer.commit();
}

std::uint64_t checkpoint_bytes(const ModelLayout& layout) {
  // Twelve bytes per parameter, four of a frozen block; headers and texts are small beside that.
  constexpr std::uint64_t per_block = 1 << 16;
  std::uint64_t bytes = layout.blocks.size() * per_block;
  for (int block = 0; block < layout.num_blocks(); ++block) {
    for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
      bytes += static_cast<std::uint64_t>(parameter.numel()) * (layout.is_frozen(block) ? 4 : 12);
    }
  }
  return bytes;
}

TrainerState read_trainer_state(const io::CheckpointReader& checkpoint) {
  return trainer_state_from_json(checkpoint.text(state_file), checkpoint.path(state_file).string());
}

void load_checkpoint(const io::CheckpointReader& checkpoint, ParameterStore& store,
                     const BlockCallback& between_blocks) {
  const ModelLayout& layout = store.layout();
  for (int block = 0; block < layout.num_blocks(); ++block) {
    if (between_blocks) between_blocks(block, layout.num_blocks());
    const io::SafetensorsFile file = checkpoint.safetensors(block_file(block));
    const Slab& slab = store.slab(block);
    for (const SlabPart& part : slab_parts) {
      if (part.is_moment && slab.exp_avg == nullptr) continue;
      for (const Parameter& parameter : layout.blocks[static_cast<std::size_t>(block)].parameters) {
        const std::string name = parameter.name + part.suffix;
        const io::TensorEntry* const entry = file.find(name);
        if (entry == nullptr) {
          throw FileError(
              fmt::format("{}: no tensor {}; this checkpoint lacks a part of the exact state and cannot be "
                          "resumed",
                          file.path().string(), io::in_quotes(name)));
        }
        if (entry->dtype != part.dtype || entry->shape != parameter.shape.to_vector()) {
          throw FileError(fmt::format(
              "{}: tensor {} is {} {}, the exact state is {} {}; refusing a lossy resume",
              file.path().string(), io::in_quotes(name), name_of(entry->dtype), io::to_string(entry->shape),
              name_of(part.dtype), io::to_string(parameter.shape.to_vector())));
        }
        file.read(*entry, 0, piece_of(slab, part, parameter));
      }
    }
    store.bump_version(block);
  }
}

std::optional<std::filesystem::path> find_resume_point(const std::string& name,
                                                       const std::filesystem::path& output_dir) {
  if (name != "auto") return std::filesystem::path(name);
  const std::optional<io::FoundCheckpoint> newest = io::newest_complete(output_dir);
  if (!newest) return std::nullopt;
  return newest->path;
}

}  // namespace layerstream

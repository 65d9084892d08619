#include "model/hf_config.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <system_error>

#include "model/detail/hf_json.hpp"
#include "model/detail/hf_rope.hpp"

namespace layerstream {
namespace {

using detail::ConfigObject;

/// What a family's config class in transformers 5.24 says where the file says nothing.
struct FamilyTraits {
  Family family;
  std::string_view architecture;
  std::string_view model_type;
  std::int64_t num_key_value_heads;  ///< 0: as many as query heads
  std::int64_t head_dim;             ///< 0: hidden_size / num_attention_heads
  std::int64_t max_position_embeddings;
};

constexpr std::array<FamilyTraits, 4> families = {
    {{Family::llama, "LlamaForCausalLM", "llama", 0, 0, 2048},
     {Family::mistral, "MistralForCausalLM", "mistral", 8, 0, 131072},
     {Family::qwen2, "Qwen2ForCausalLM", "qwen2", 32, 0, 32768},
     {Family::qwen3, "Qwen3ForCausalLM", "qwen3", 32, 128, 32768}}};

constexpr std::string_view supported_architectures =
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";
constexpr std::string_view supported_model_types = "llama, mistral, qwen2, qwen3";

constexpr double default_rms_norm_eps = 1e-6;
constexpr std::int64_t default_sliding_window = 4096;
constexpr std::int64_t default_max_window_layers = 28;

constexpr const char* full_attention = "full_attention";
constexpr const char* sliding_attention = "sliding_attention";

const FamilyTraits* find_by_architecture(std::string_view name) {
  const auto it =
      std::find_if(families.begin(), families.end(), [&](const auto& f) { return f.architecture == name; });
  return it == families.end() ? nullptr : &*it;
}

const FamilyTraits* find_by_model_type(std::string_view name) {
  const auto it =
      std::find_if(families.begin(), families.end(), [&](const auto& f) { return f.model_type == name; });
  return it == families.end() ? nullptr : &*it;
}

const FamilyTraits& find_family(const ConfigObject& config) {
  const auto architectures = config.strings("architectures");
  const auto model_type = config.string("model_type");
  const FamilyTraits* by_type = model_type ? find_by_model_type(*model_type) : nullptr;
  if (!architectures || architectures->empty()) {
    if (!model_type) config.refuse("architectures", "expected one of {}", supported_architectures);
    if (by_type == nullptr)
      config.refuse("model_type", "not supported; supported are {}", supported_model_types);
    return *by_type;
  }
  const FamilyTraits* family =
      architectures->size() == 1 ? find_by_architecture(architectures->front()) : nullptr;
  if (family == nullptr)
    config.refuse("architectures", "not supported; expected one of {}", supported_architectures);
  if (model_type && by_type != family) {
    config.refuse("model_type", "contradicts architectures {}, whose type is {}", family->architecture,
                  family->model_type);
  }
  return *family;
}

/// Keys that ask for a function other than the dense decoder's. Absent, null or the value that means "off"
/// pass.
void refuse_other_functions(const ConfigObject& config) {
  if (config.string("hidden_act").value_or("silu") != "silu")
    config.refuse("hidden_act", "only silu is supported");
  if (config.number("attention_dropout").value_or(0.0) != 0.0) {
    config.refuse("attention_dropout", "dropout is not supported; set it to 0.0");
  }
  if (config.has("quantization_config")) {
    config.refuse("quantization_config",
                  "quantized checkpoints cannot be trained at full precision; use the unquantized one");
  }
  if (config.has("per_layer_config"))
    config.refuse("per_layer_config", "all layers must have the same sizes");
  if (!config.boolean("is_causal").value_or(true))
    config.refuse("is_causal", "only causal attention is supported");
  if (config.boolean("use_mrope").value_or(false))
    config.refuse("use_mrope", "multimodal rope is not supported");
}

void read_sizes(const ConfigObject& config, const FamilyTraits& family, ModelSpec& spec) {
  spec.vocab_size = config.required_positive_integer("vocab_size");
  spec.hidden_size = config.required_positive_integer("hidden_size");
  spec.intermediate_size = config.required_positive_integer("intermediate_size");
  spec.num_hidden_layers = config.required_positive_integer("num_hidden_layers");
  spec.num_attention_heads = config.required_positive_integer("num_attention_heads");
  spec.max_position_embeddings =
      config.positive_integer("max_position_embeddings").value_or(family.max_position_embeddings);

  // A null is the class's "derive it"; only a key that is not there takes the class default.
  const bool derive_kv = config.contains("num_key_value_heads") || family.num_key_value_heads == 0;
  spec.num_key_value_heads = config.positive_integer("num_key_value_heads")
                                 .value_or(derive_kv ? spec.num_attention_heads : family.num_key_value_heads);
  if (spec.num_attention_heads % spec.num_key_value_heads != 0) {
    config.refuse("num_key_value_heads", "num_attention_heads {} is not a multiple of {} key/value heads",
                  spec.num_attention_heads, spec.num_key_value_heads);
  }

  const bool derive_head_dim = config.contains("head_dim") || family.head_dim == 0;
  if (const auto head_dim = config.positive_integer("head_dim")) {
    spec.head_dim = *head_dim;
  } else if (!derive_head_dim) {
    spec.head_dim = family.head_dim;
  } else {
    if (spec.hidden_size % spec.num_attention_heads != 0) {
      config.refuse("hidden_size", "not a multiple of num_attention_heads {}; give head_dim explicitly",
                    spec.num_attention_heads);
    }
    spec.head_dim = spec.hidden_size / spec.num_attention_heads;
  }
  if (spec.head_dim % 2 != 0) {
    config.refuse("head_dim", "rotary embedding needs an even head_dim, got {}", spec.head_dim);
  }
}

void read_biases(const ConfigObject& config, ModelSpec& spec) {
  switch (spec.family) {
    case Family::llama:
      spec.qkv_bias = spec.output_bias = config.boolean("attention_bias").value_or(false);
      spec.mlp_bias = config.boolean("mlp_bias").value_or(false);
      return;
    case Family::mistral:
      return;
    case Family::qwen2:
      spec.qkv_bias = true;
      return;
    case Family::qwen3:
      spec.qkv_bias = spec.output_bias = config.boolean("attention_bias").value_or(false);
      spec.qk_norm = true;
      return;
  }
}

/// The number of leading "full_attention" layers, when only "sliding_attention" ones follow.
std::int64_t first_window_layer(const ConfigObject& config, const std::vector<std::string>& layer_types,
                                std::int64_t num_hidden_layers) {
  if (static_cast<std::int64_t>(layer_types.size()) != num_hidden_layers) {
    config.refuse("layer_types", "expected one entry for each of the {} layers, found {}", num_hidden_layers,
                  layer_types.size());
  }
  for (const std::string& type : layer_types) {
    if (type != full_attention && type != sliding_attention) {
      config.refuse("layer_types", "unknown layer type '{}'; known are {} and {}", type, full_attention,
                    sliding_attention);
    }
  }
  const auto first = std::find(layer_types.begin(), layer_types.end(), sliding_attention);
  const auto later = std::find(first, layer_types.end(), full_attention);
  if (later != layer_types.end()) {
    config.refuse("layer_types",
                  "layer {} has full attention after a layer with a window; only windows in all "
                  "layers from some layer on are supported",
                  later - layer_types.begin());
  }
  return first - layer_types.begin();
}

void read_mistral_window(const ConfigObject& config, ModelSpec& spec) {
  const bool unlimited = config.contains("sliding_window") && !config.has("sliding_window");
  if (!unlimited)
    spec.sliding_window = config.positive_integer("sliding_window").value_or(default_sliding_window);
  // MistralModel gives all layers one mask whatever layer_types says.
  if (const auto layer_types = config.strings("layer_types")) {
    const std::int64_t first = first_window_layer(config, *layer_types, spec.num_hidden_layers);
    if (first != (unlimited ? spec.num_hidden_layers : 0)) {
      config.refuse("layer_types",
                    "contradicts sliding_window, which holds for all layers of a Mistral model");
    }
  }
}

void read_qwen_window(const ConfigObject& config, ModelSpec& spec) {
  const bool unlimited = !config.boolean("use_sliding_window").value_or(false) ||
                         (config.contains("sliding_window") && !config.has("sliding_window"));
  std::int64_t first = spec.num_hidden_layers;
  if (const auto layer_types = config.strings("layer_types")) {
    first = first_window_layer(config, *layer_types, spec.num_hidden_layers);
    if (unlimited && first < spec.num_hidden_layers) {
      config.refuse("layer_types", "has '{}' but use_sliding_window is not set or sliding_window is null",
                    sliding_attention);
    }
  } else if (!unlimited) {
    // Zero is legal: every layer has the window.
    const auto given = config.number("max_window_layers");
    const bool zero = given && *given == 0.0;
    first = zero ? 0 : config.positive_integer("max_window_layers").value_or(default_max_window_layers);
  }
  if (first >= spec.num_hidden_layers) return;
  spec.first_window_layer = first;
  spec.sliding_window = config.positive_integer("sliding_window").value_or(default_sliding_window);
}

std::vector<std::string> layer_types_of(const ModelSpec& spec) {
  if (spec.sliding_window == 0) return {full_attention};
  if (spec.first_window_layer == 0) return {sliding_attention};
  return {full_attention, sliding_attention};
}

std::string read_dtype(const ConfigObject& config) {
  const auto old_key = config.string("torch_dtype");
  const auto new_key = config.string("dtype");
  if (old_key && new_key && *old_key != *new_key) {
    config.refuse("torch_dtype", "contradicts dtype {}; keep one of them", *new_key);
  }
  const std::string_view key = new_key ? "dtype" : "torch_dtype";
  std::string dtype = new_key ? *new_key : old_key.value_or("float32");
  if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
    config.refuse(key, "expected float32, bfloat16 or float16");
  }
  return dtype;
}

double read_initializer_range(const ConfigObject& config) {
  const double range = config.number("initializer_range").value_or(ModelSpec{}.initializer_range);
  if (!(range >= 0.0 && std::isfinite(range)))
    config.refuse("initializer_range", "expected a number of at least 0");
  return range;
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw FileError(fmt::format("{}: cannot be read: {}", path.string(), std::strerror(errno)));
  return text;
}

}  // namespace

ModelSpec parse_hf_config(const std::string& json_text, const std::string& where) {
  const auto json = detail::parse_json_object<nlohmann::json>(json_text, where);
  const ConfigObject config(json, where);
  const FamilyTraits& family = find_family(config);
  refuse_other_functions(config);

  ModelSpec spec;
  spec.family = family.family;
  read_sizes(config, family, spec);
  read_biases(config, spec);
  spec.rms_norm_eps = config.positive_number("rms_norm_eps").value_or(default_rms_norm_eps);
  spec.initializer_range = read_initializer_range(config);
  spec.tie_word_embeddings = config.boolean("tie_word_embeddings").value_or(false);
  if (spec.family == Family::mistral) read_mistral_window(config, spec);
  if (spec.family == Family::qwen2 || spec.family == Family::qwen3) read_qwen_window(config, spec);
  spec.rope = detail::parse_rope(config, {.head_dim = spec.head_dim, .layer_types = layer_types_of(spec)});
  spec.dtype = read_dtype(config);
  return spec;
}

HfConfigText read_hf_config(const std::filesystem::path& directory_or_file) {
  std::error_code error;
  const bool is_directory = std::filesystem::is_directory(directory_or_file, error);
  const std::filesystem::path path = is_directory ? directory_or_file / "config.json" : directory_or_file;
  if (!std::filesystem::exists(path, error)) {
    throw FileError(fmt::format(
        "{}: no such file; expected a Hugging Face model directory with a config.json", path.string()));
  }
  return {path.string(), read_text(path)};
}

std::vector<std::int32_t> read_end_tokens(const std::filesystem::path& directory) {
  for (const char* const name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path path = directory / name;
    std::error_code error;
    if (!std::filesystem::exists(path, error)) continue;
    const auto json = detail::parse_json_object<nlohmann::json>(read_text(path), path.string());
    const auto given = json.find("eos_token_id");
    if (given == json.end() || given->is_null()) continue;
    const nlohmann::json ids = given->is_array() ? *given : nlohmann::json::array({*given});
    const auto is_id = [](const nlohmann::json& id) {
      return id.is_number_unsigned() && id.get<std::uint64_t>() <= std::numeric_limits<std::int32_t>::max();
    };
    if (!std::ranges::all_of(ids, is_id)) {
      throw FileError(fmt::format("{}: eos_token_id: {} is neither a token id nor a list of them",
                                  path.string(), given->dump()));
    }
    if (!ids.empty()) return ids;
  }
  return {};
}

ModelSpec load_hf_config(const std::filesystem::path& directory_or_file) {
  const HfConfigText config = read_hf_config(directory_or_file);
  return parse_hf_config(config.text, config.path);
}

std::string export_hf_config(const std::string& json_text, DType dtype) {
  const std::string_view name = dtype == DType::f32    ? "float32"
                                : dtype == DType::bf16 ? "bfloat16"
                                : dtype == DType::f16  ? "float16"
                                                       : "";
  LAYERSTREAM_EXPECT(!name.empty(), "no Hugging Face model is stored as {}", name_of(dtype));
  auto json = detail::parse_json_object<nlohmann::ordered_json>(json_text, "config.json to export");
  const bool has_old = json.contains("torch_dtype");
  const bool has_new = json.contains("dtype");
  const bool add_new = !has_old && !has_new && json.contains("rope_parameters");
  if (has_new || add_new) json["dtype"] = name;
  if (has_old || !(has_new || add_new)) json["torch_dtype"] = name;
  constexpr int indent = 2;  // transformers writes the same
  return json.dump(indent, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace layerstream

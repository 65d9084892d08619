#include "io/safetensors_header.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"
#include "io/safetensors_dtypes.hpp"

namespace layerstream::io {

namespace {

constexpr std::array<std::pair<DType, std::string_view>, 13> dtype_names{{{DType::f64, "F64"},
                                                                          {DType::f32, "F32"},
                                                                          {DType::f16, "F16"},
                                                                          {DType::bf16, "BF16"},
                                                                          {DType::i64, "I64"},
                                                                          {DType::i32, "I32"},
                                                                          {DType::i16, "I16"},
                                                                          {DType::i8, "I8"},
                                                                          {DType::u64, "U64"},
                                                                          {DType::u32, "U32"},
                                                                          {DType::u16, "U16"},
                                                                          {DType::u8, "U8"},
                                                                          {DType::boolean, "BOOL"}}};

}  // namespace

std::string_view safetensors_name(DType dtype) {
  return std::ranges::find(dtype_names, dtype, [](const auto& pair) { return pair.first; })->second;
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  const auto found = std::ranges::find(dtype_names, name, [](const auto& pair) { return pair.second; });
  return found == dtype_names.end() ? std::nullopt : std::optional(found->first);
}

std::string safetensors_dtype_list() {
  std::string list;
  for (const auto& [dtype, name] : dtype_names) list += fmt::format("{}{}", list.empty() ? "" : ", ", name);
  return list;
}

std::optional<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return std::nullopt;
  }
  if (__builtin_mul_overflow(product, static_cast<std::int64_t>(size_of(dtype)), &product))
    return std::nullopt;
  return static_cast<std::uint64_t>(product);
}

std::string in_quotes(std::string_view name) {
  return nlohmann::json(std::string(name)).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string to_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", extent);
  return text + "]";
}

std::vector<TensorEntry> lay_out_safetensors(const std::vector<TensorSpec>& tensors,
                                             const std::string& file) {
  std::vector<TensorEntry> entries;
  entries.reserve(tensors.size());
  std::unordered_set<std::string_view> names;
  std::uint64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::string who = fmt::format("{}: tensor {}", file, in_quotes(tensor.name));
    LAYERSTREAM_EXPECT(tensor.name != "__metadata__", "{}: the name is reserved", who);
    LAYERSTREAM_EXPECT(names.insert(tensor.name).second, "{} is declared twice", who);
    const std::optional<std::uint64_t> bytes = tensor_bytes(tensor.dtype, tensor.shape);
    LAYERSTREAM_EXPECT(bytes.has_value(), "{}: shape {} is negative or overflows", who,
                       to_string(tensor.shape));
    LAYERSTREAM_EXPECT(end % size_of(tensor.dtype) == 0,
                       "{} would begin at byte {}, which {} cannot: declare tensors in aligned_order", who,
                       end, safetensors_name(tensor.dtype));
    LAYERSTREAM_EXPECT(*bytes <= static_cast<std::uint64_t>(INT64_MAX) - end, "{}: the file would overflow",
                       who);
    entries.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + *bytes, file});
    end += *bytes;
  }
  return entries;
}

std::string format_safetensors_header(const std::vector<TensorEntry>& entries,
                                      const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  auto& fields = header.get_ref<nlohmann::ordered_json::object_t&>();
  fields.reserve(entries.size() + 1);  // and no look-up of names: lay_out_safetensors found them distinct
  for (const TensorEntry& entry : entries) {
    fields.emplace_back(entry.name, nlohmann::ordered_json{{"dtype", safetensors_name(entry.dtype)},
                                                           {"shape", entry.shape},
                                                           {"data_offsets", {entry.begin, entry.end}}});
  }
  std::string json;
  try {
    json = header.dump();
  } catch (const nlohmann::json::exception& error) {
    throw ContractError(
        fmt::format("a safetensors header with a name that is not UTF-8: {}", in_quotes(error.what())));
  }
  json.resize((json.size() + 7) / 8 * 8, ' ');
  LAYERSTREAM_EXPECT(json.size() <= SafetensorsHeader::max_bytes, "a safetensors header of {} bytes",
                     json.size());

  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return text + json;
}

std::vector<TensorSpec> aligned_order(std::vector<TensorSpec> tensors) {
  std::ranges::stable_sort(tensors, std::greater{}, [](const TensorSpec& t) { return size_of(t.dtype); });
  return tensors;
}

}  // namespace layerstream::io

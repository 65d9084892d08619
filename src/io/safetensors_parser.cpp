#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>
#include <utility>

#include "core/error.hpp"
#include "io/safetensors_dtypes.hpp"
#include "io/safetensors_header.hpp"

namespace layerstream::io {

namespace {

using Json = nlohmann::json;

/// Receives the header's JSON events, and accepts nothing but
/// {name: {"dtype": string, "shape": [n...], "data_offsets": [n, n]}..., "__metadata__": {key: string}}.
/// Events instead of a tree: a key that is given twice is seen, and a hostile header costs no more
/// memory than its entries.
class HeaderHandler {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  HeaderHandler(const std::string& file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool null() { return refuse("null"); }
  bool boolean(bool value) { return refuse(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) { return refuse(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) { return refuse(text); }
  bool binary(binary_t&) { return refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) {
    if (place_ == Place::shape_items) {
      if (!std::in_range<std::int64_t>(value)) fail("shape overflows: it holds {}", value);
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::offset_items) {
      if (offsets_read_ == 2) fail("data_offsets has more than two numbers");
      (offsets_read_++ == 0 ? entry_.begin : entry_.end) = value;
    } else {
      return refuse(fmt::format("{}", value));
    }
    return true;
  }

  bool string(string_t& value) {
    if (place_ == Place::dtype_value) {
      const std::optional<DType> dtype = dtype_from_safetensors(value);
      if (!dtype) fail("unknown dtype {}; this program reads {}", in_quotes(value), safetensors_dtype_list());
      entry_.dtype = *dtype;
      place_ = Place::field;
    } else if (place_ == Place::metadata_value) {
      header_.metadata[key_] = value;
      place_ = Place::metadata_key;
    } else {
      return refuse("the string " + in_quotes(value));
    }
    return true;
  }

  bool start_object(std::size_t) {
    switch (place_) {
      case Place::start:
        place_ = Place::name;
        return true;
      case Place::tensor:
        place_ = Place::field;
        return true;
      case Place::metadata:
        place_ = Place::metadata_key;
        return true;
      default:
        return refuse("an object");
    }
  }

  bool key(string_t& key) {
    if (place_ == Place::name) {
      if (!names_.insert(key).second) {
        throw FileError(fmt::format("{}: {} occurs twice in the header", file_,
                                    key == "__metadata__" ? key : "tensor " + in_quotes(key)));
      }
      place_ = key == "__metadata__" ? Place::metadata : Place::tensor;
      entry_ = {.name = key, .dtype = DType::u8, .shape = {}, .begin = 0, .end = 0, .file = file_};
      seen_ = {};
    } else if (place_ == Place::metadata_key) {
      if (header_.metadata.contains(key)) {
        throw FileError(fmt::format("{}: __metadata__ has key {} twice", file_, in_quotes(key)));
      }
      key_ = key;
      place_ = Place::metadata_value;
    } else {
      const auto field = std::ranges::find(field_names, key);
      if (field == field_names.end()) fail("unknown field {}", in_quotes(key));
      const auto index = static_cast<std::size_t>(field - field_names.begin());
      if (std::exchange(seen_[index], true)) fail("field {} occurs twice", in_quotes(key));
      place_ = std::array{Place::dtype_value, Place::shape_value, Place::offset_value}[index];
    }
    return true;
  }

  bool end_object() {
    switch (place_) {
      case Place::name:
        place_ = Place::end;
        break;
      case Place::metadata_key:
        place_ = Place::name;
        break;
      default:  // a tensor's fields
        for (std::size_t i = 0; i < field_names.size(); ++i) {
          if (!seen_[i]) fail("field {} is missing", in_quotes(field_names[i]));
        }
        header_.entries.push_back(std::move(entry_));
        place_ = Place::name;
    }
    return true;
  }

  bool start_array(std::size_t) {
    switch (place_) {
      case Place::shape_value:
        place_ = Place::shape_items;
        return true;
      case Place::offset_value:
        place_ = Place::offset_items;
        offsets_read_ = 0;
        return true;
      default:
        return refuse("an array");
    }
  }

  bool end_array() {
    if (place_ == Place::offset_items && offsets_read_ != 2) {
      fail("data_offsets has {} numbers instead of two", offsets_read_);
    }
    place_ = Place::field;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const Json::exception& error) {
    const std::string_view what = error.what();
    if (what.find("ill-formed UTF-8") != std::string_view::npos) {
      throw FileError(fmt::format("{}: the header is not UTF-8 at its byte {}", file_, position));
    }
    throw FileError(
        fmt::format("{}: the header is not JSON at its byte {}: {}", file_, position, in_quotes(what)));
  }

 private:
  enum class Place {
    start,
    name,
    tensor,
    field,
    dtype_value,
    shape_value,
    shape_items,
    offset_value,
    offset_items,
    metadata,
    metadata_key,
    metadata_value,
    end
  };
  static constexpr std::array<std::string_view, 3> field_names{"dtype", "shape", "data_offsets"};

  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw FileError(fmt::format("{}: tensor {}: {}", file_, in_quotes(entry_.name),
                                fmt::format(format, std::forward<Args>(args)...)));
  }

  /// A value of the wrong kind.
  bool refuse(std::string_view got) const {
    switch (place_) {
      case Place::start:
        throw FileError(fmt::format("{}: the header is {} instead of a JSON object", file_, got));
      case Place::metadata:
        throw FileError(fmt::format("{}: __metadata__ is {} instead of an object", file_, got));
      case Place::metadata_value:
        throw FileError(
            fmt::format("{}: __metadata__ key {} is {} instead of a string", file_, in_quotes(key_), got));
      case Place::tensor:
        fail("is described by {} instead of an object", got);
      case Place::dtype_value:
        fail("dtype is {} instead of a string", got);
      case Place::shape_value:
        fail("shape is {} instead of an array", got);
      case Place::shape_items:
        fail("shape holds {} instead of a non-negative 64-bit integer", got);
      case Place::offset_value:
        fail("data_offsets is {} instead of an array", got);
      default:
        fail("data_offsets holds {} instead of a non-negative 64-bit integer", got);
    }
  }

  const std::string& file_;
  SafetensorsHeader& header_;
  Place place_ = Place::start;
  std::unordered_set<std::string> names_;
  TensorEntry entry_{};
  std::array<bool, 3> seen_{};
  int offsets_read_ = 0;
  std::string key_;
};

void check_entry(const TensorEntry& entry, std::uint64_t data_bytes) {
  const auto fail = [&](const std::string& fault) {
    throw FileError(fmt::format("{}: tensor {}: {}", entry.file, in_quotes(entry.name), fault));
  };
  if (entry.begin > entry.end) {
    fail(fmt::format("data_offsets [{}, {}] begin after their end", entry.begin, entry.end));
  }
  const std::optional<std::uint64_t> bytes = tensor_bytes(entry.dtype, entry.shape);
  if (!bytes) fail(fmt::format("shape {} overflows", to_string(entry.shape)));
  if (*bytes != entry.bytes()) {
    fail(fmt::format("shape {} of {} is {} bytes, but data_offsets [{}, {}] are {} bytes",
                     to_string(entry.shape), safetensors_name(entry.dtype), *bytes, entry.begin, entry.end,
                     entry.bytes()));
  }
  if (entry.end > data_bytes) {
    fail(fmt::format(
        "data_offsets [{}, {}] reach beyond the {} bytes of data in the file: it was cut off, fetch it again",
        entry.begin, entry.end, data_bytes));
  }
}

/// The entries, sorted, must cover [0, data_bytes) without gap or overlap.
void check_coverage(const std::vector<TensorEntry>& entries, std::uint64_t data_bytes,
                    const std::string& file) {
  std::uint64_t covered = 0;
  const TensorEntry* previous = nullptr;
  for (const TensorEntry& entry : entries) {
    if (entry.begin < covered) {
      throw FileError(fmt::format("{}: tensor {}: bytes [{}, {}) overlap those of tensor {}, [{}, {})", file,
                                  in_quotes(entry.name), entry.begin, entry.end, in_quotes(previous->name),
                                  previous->begin, previous->end));
    }
    if (entry.begin > covered) {
      throw FileError(fmt::format("{}: tensor {}: {} bytes before it, [{}, {}), belong to no tensor", file,
                                  in_quotes(entry.name), entry.begin - covered, covered, entry.begin));
    }
    covered = entry.end;
    previous = &entry;
  }
  if (covered != data_bytes) {
    throw FileError(fmt::format(
        "{}: {} bytes after {}, [{}, {}), belong to no tensor", file, data_bytes - covered,
        previous ? "the last tensor, " + in_quotes(previous->name) : "the header", covered, data_bytes));
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                           const std::string& file) {
  // The JSON parser takes a NUL for the end of its input.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw FileError(fmt::format("{}: the header is not JSON at its byte {}: a zero byte", file, nul));
  }
  // It also passes over a byte-order mark, which the format's reference implementation refuses.
  if (text.starts_with("\xef\xbb\xbf")) {
    throw FileError(fmt::format("{}: the header is not JSON at its byte 0: a byte-order mark", file));
  }
  SafetensorsHeader header;
  HeaderHandler handler(file, header);
  Json::sax_parse(text.begin(), text.end(), &handler);
  for (const TensorEntry& entry : header.entries) check_entry(entry, data_bytes);
  std::ranges::stable_sort(header.entries, {},
                           [](const TensorEntry& e) { return std::pair(e.begin, e.end); });
  check_coverage(header.entries, data_bytes, file);
  return header;
}

}  // namespace layerstream::io
